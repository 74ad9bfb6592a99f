"""Per-example gradients for differential privacy: clip each example, sum, add noise.

Forward and backward pass of a batch of one become the body of a Scan over the examples. This is
exact for every layer that does not mix examples. It is slow, since all matmuls have one row.
"""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from onnxtrain.artifacts.graphs import DifferentiatedModel
from onnxtrain.errors import PrepareError
from onnxtrain.graph.builder import OpBuilder, names_in
from onnxtrain.modes.randomness import RandomStream
from onnxtrain.optim import clip_by_global_norm
from onnxtrain.optim.privacy import DP
from onnxtrain.targets import Target

RNG = "rng"
_SEEDS = 2**24
_FIRST_ID = 4096  # of the streams of noise; those of the model's own random nodes are below
_MEAN_METRICS = ("accuracy", "top_")  # metrics of which a batch's is the mean of its examples'


def per_example(origin: DifferentiatedModel, dp: DP, target: Target) -> DifferentiatedModel:
    """Return the model with private gradients; ``origin.model`` is consumed.

    Loss and metrics are means over the examples.

    Raises:
        PrepareError: if the model mixes examples or has no dynamic batch dimension.
    """
    _check(origin)
    body = origin.model.graph
    given = [ir.Value(name=x.name, type=x.type, shape=x.shape) for x in body.inputs]
    outer = ir.Graph(given, [], nodes=[], opset_imports=dict(body.opset_imports), name=body.name)
    op = OpBuilder(outer, "private/", target=target)
    op.names.taken |= names_in(body)
    known = {x.name or "": x for x in given}
    own = {x.name or "": x for x in body.inputs}
    for name, x in list(body.initializers.items()):
        del body.initializers[name]
        outer.register_initializer(x)
    first = known[origin.inputs[0]]
    scanned = {n: op.Unsqueeze(known[n], op.const([1])) for n in (*origin.inputs, *origin.targets)}
    if origin.rng is not None:
        scanned[origin.rng] = _example_rng(op, known[origin.rng], first)
    for name, x in own.items():
        if name not in scanned:
            x.replace_all_uses_with(known[name])
            continue
        x.name = op.names.fresh(f"{name}/each")
        if name != origin.rng and x.shape is not None:
            x.shape = ir.Shape([1, *x.shape[1:]])
    sums, reported = _scan(op, origin, body, [own[n] for n in scanned], list(scanned.values()), dp)
    rng = origin.rng
    if dp.noise and rng is None:
        rng = RNG
        op.input(RNG, ir.DataType.FLOAT, [2])
    gradients = _add_noise(op, sums, dp, first, rng)
    outer.outputs.extend(op.ReduceMean(y, keepdims=0) for y in reported)
    outer.outputs.extend(gradients)
    model = ir.Model(outer, ir_version=origin.model.ir_version)
    model.graph.meta.update(origin.model.graph.meta)
    return dataclasses.replace(origin, model=model, rng=rng, above_one=())


def _scan(
    op: OpBuilder,
    origin: DifferentiatedModel,
    body: ir.Graph,
    inputs: list[ir.Value],
    feeds: list[ir.Value],
    dp: DP,
) -> tuple[list[ir.Value], list[ir.Value]]:
    """Emit the Scan; return the sums of clipped gradients, and loss and metrics per example."""
    inner = OpBuilder(body, "private/", target=op.target, parent=op)
    results = list(body.outputs)
    reports = results[: 1 + len(origin.metrics)]
    gradients = dict(zip(origin.parameters, results[len(reports) :], strict=True))
    clipped = clip_by_global_norm(inner, gradients, dp.clip)
    sums = {
        n: ir.Value(name=op.names.fresh(f"{n}/sum"), type=g.type, shape=g.shape)
        for n, g in gradients.items()
    }
    new = [inner.Add(sums[n], clipped[n]) for n in sums]
    reports = [inner.Reshape(y, inner.const([], ir.DataType.INT64)) for y in reports]
    body.inputs.clear()
    body.inputs.extend([*sums.values(), *inputs])
    body.outputs.clear()
    body.outputs.extend([*new, *reports])
    body.name = "example"
    starts = [op.zeros_like(x) for x in (_parameter(op, n) for n in sums)]
    ends = [
        ir.Value(name=op.names.fresh("private/sum"), type=s.type, shape=s.shape)
        for s in sums.values()
    ]
    listed = [
        ir.Value(name=op.names.fresh("private/each"), type=y.type, shape=ir.Shape([None]))
        for y in reports
    ]
    attributes = [ir.AttrGraph("body", body), ir.AttrInt64("num_scan_inputs", len(feeds))]
    name = op.names.fresh("private/examples")
    op.graph.append(
        ir.Node("", "Scan", [*starts, *feeds], attributes, outputs=[*ends, *listed], name=name)
    )
    return ends, listed


def _parameter(op: OpBuilder, name: str) -> ir.Value:
    return next(x for x in op.graph.inputs if x.name == name)


def _add_noise(
    op: OpBuilder, sums: list[ir.Value], dp: DP, first: ir.Value, rng: str | None
) -> list[ir.Value]:
    """Return the mean gradients: the sums plus noise, divided by the number of examples."""
    count = _example_count(op, first)
    stream = None
    if dp.noise:
        assert rng is not None
        stream = RandomStream(op, _parameter(op, rng))
    means: list[ir.Value] = []
    for i, total in enumerate(sums):
        if stream is not None:
            noise = op.Mul(stream.normal(total, _FIRST_ID + 4 * i), dp.clip * dp.noise)
            total = op.Add(total, op.cast(noise, total.dtype))
        mean = op.Div(total, op.cast(count, total.dtype))
        mean.shape = sums[i].shape
        means.append(mean)
    return means


def _example_count(op: OpBuilder, x: ir.Value) -> ir.Value:
    """Return the number of examples, an int64 scalar."""
    return op.Reshape(op.Slice(op.Shape(x), [0], [1], [0]), op.const([], ir.DataType.INT64))


def _example_rng(op: OpBuilder, rng: ir.Value, first: ir.Value) -> ir.Value:
    """Return one (seed, draw) per example: float32 [examples, 2]."""
    count = _example_count(op, first)
    step = op.Cast(op.Slice(rng, [1], [2], [0]), to=ir.DataType.INT64)
    numbers = op.Add(op.Mul(step, count), op.Range(0, count, 1))
    draws = op.Cast(op.Mod(numbers, _SEEDS), to=ir.DataType.FLOAT)
    seeds = op.Add(op.Mul(draws, 0.0), op.Slice(rng, [0], [1], [0]))
    return op.Concat(op.Unsqueeze(seeds, [1]), op.Unsqueeze(draws, [1]), axis=1)


def _check(origin: DifferentiatedModel) -> None:
    graph = origin.model.graph
    if origin.changing:
        raise PrepareError(
            "BatchNormalization in training mode mixes examples, so there are no per-example "
            f"gradients: {', '.join(origin.changing)}\n"
            "hint: mode='as-is', or a model with another normalization"
        )
    if origin.outputs:
        raise PrepareError("dp= does not support outputs=\nhint: remove outputs=")
    unsupported = [n for n in origin.metrics if not n.startswith(_MEAN_METRICS)]
    if unsupported:
        raise PrepareError(
            f"dp= does not support metric {unsupported[0]!r}: it is not a mean over examples\n"
            "hint: use accuracy or top_k"
        )
    sizes = {}
    for x in graph.inputs:
        if x.name in (*origin.inputs, *origin.targets):
            sizes[x.name] = x.shape[0] if x.shape is not None and len(x.shape) else None
    fixed = [n for n, size in sizes.items() if not isinstance(size, ir.SymbolicDim)]
    if fixed or len({str(size) for size in sizes.values()}) > 1:
        listing = ", ".join(f"{n}: {size}" for n, size in sizes.items())
        raise PrepareError(
            "dp= needs inputs that share a dynamic batch dimension (one row per example): "
            f"{listing}"
        )
