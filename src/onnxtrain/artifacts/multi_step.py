"""A step model that trains several batches in one call.

WebAssembly copies parameters and state in and out of every call, which dominates the time of a
small step. :func:`multi_step_model` makes the step the body of a Scan: batches are scanned inputs;
parameters, buffers and state are carried from step to step.

In a small model, most nodes belong to the update. :func:`pack_parameters` therefore joins small
parameters and their state into vectors (``optim/vectors.py``), which stay joined inside the Scan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import onnx_ir as ir

from onnxtrain import thresholds as T
from onnxtrain.artifacts.build_options import BuildOptions
from onnxtrain.artifacts.graphs import BuiltModel, DifferentiatedModel, dtype_from_name
from onnxtrain.errors import PrepareError
from onnxtrain.graph.builder import Names, OpBuilder, names_in
from onnxtrain.importer.opset import IR_VERSION, OPSET
from onnxtrain.manifest import ModelSpec, StateSpec, TensorSpec
from onnxtrain.optim.vectors import Pack, pack_small_parameters
from onnxtrain.targets import Target, find

HOIST_MIN_BYTES = 1024  # larger constants move out of the body, so that model files can share them
_LOOP_ROLES = ("parameter", "buffer", "state", "frozen")
_PER_STEP_ROLES = ("lr", "step")
_DECAYING_SLOTS = (".exp_avg", ".exp_avg_sq", ".momentum_buffer")
DENORMAL_THRESHOLD = 1e-35
"""State below this becomes 0 after each call. The moments of dead units decay forever, and
WebAssembly cannot flush denormal numbers, which are much slower to compute with."""


def multi_step_model(
    step: BuiltModel, count: int, plain: ModelSpec, packs: Sequence[Pack]
) -> BuiltModel:
    """Return a model that computes ``count`` consecutive steps.

    Batches get a leading axis of size ``count``; learning rate and step number have one element per
    step; loss, metrics and outputs are stacked. The results equal those of single steps.

    Args:
        step: a single step with packed parameters; its graph becomes the body of the Scan.
        count: number of steps.
        plain: inputs and outputs of a single step without packing.
        packs: parameters and state that are one tensor in ``step``.
    """
    inner, body = step.spec, step.model.graph
    fed = {t.feeds: t for t in inner.outputs if t.feeds is not None}
    carried = [t for t in inner.inputs if t.name in fed]
    scanned = [t for t in inner.inputs if t.name not in fed and t.role not in _LOOP_ROLES]
    stacked = [t for t in inner.outputs if t.feeds is None]

    inputs = tuple(t if t.role in _LOOP_ROLES else _stacked_spec(t, count) for t in plain.inputs)
    outputs = tuple(t if t.feeds is not None else _stacked_spec(t, count) for t in plain.outputs)
    opsets = {**step.model.opset_imports, "": OPSET}
    outer = ir.Graph(
        [_spec_value(t) for t in inputs], [], nodes=[], opset_imports=opsets, name="steps_model"
    )
    outer.meta.update(body.meta)  # the file of large weights, which may move to this graph
    given = {x.name or "": x for x in outer.inputs}
    results = [y.name or "" for y in body.outputs]
    names = Names({*names_in(body), *given, *results, *(t.name for t in plain.outputs)})
    op = OpBuilder(outer, "steps/")
    op.names.taken |= names.taken
    own = _take_inputs(body, given, {t.name for t in (*carried, *scanned)}, names)
    _hoist_constants(body, outer)
    ordered = [t.name for t in (*(fed[t.name] for t in carried), *stacked)]
    _become_step(body, [own[t.name] for t in (*carried, *scanned)], ordered, names)

    whole = {p.name: p for p in packs}
    feeds = _scan_inputs(op, [*carried, *scanned], given, whole)
    finals = {t.name: _spec_value(t) for t in outputs}
    new = {t.feeds: finals[t.name] for t in outputs if t.feeds is not None}
    ends: list[ir.Value] = []
    for t in (*carried, *stacked):
        if t.name in whole or _can_underflow(t):
            like = own[t.name]
            name = op.names.fresh("steps/end")
            ends.append(ir.Value(name=name, type=like.type, shape=like.shape))
        else:
            ends.append(new[t.name] if t in carried else finals[t.name])
    attributes = [ir.AttrGraph("body", body), ir.AttrInt64("num_scan_inputs", len(scanned))]
    outer.append(ir.Node("", "Scan", feeds, attributes, outputs=ends, name=names.fresh("steps")))
    for name, end in _unpack_scan_outputs(op, carried, ends, whole):
        finals[_output_name(outputs, name)] = _with_name_of(end, new[name])
    outer.outputs.extend(finals[t.name] for t in outputs)
    model = ir.Model(outer, ir_version=IR_VERSION)
    file = plain.file.removesuffix(".onnx") + f".x{count}.onnx"
    spec = dataclasses.replace(
        plain, file=file, steps_per_call=count, inputs=inputs, outputs=outputs
    )
    return BuiltModel(model, spec)


def _become_step(
    body: ir.Graph, inputs: Sequence[ir.Value], outputs: Sequence[str], names: Names
) -> None:
    """Turn the graph of a step into the body of a Scan with these inputs and outputs."""
    results = {y.name or "": y for y in body.outputs}
    body.inputs.clear()
    body.inputs.extend(inputs)
    body.outputs.clear()
    body.outputs.extend(results[name] for name in outputs)
    body.name = "step"
    for y in body.outputs:
        y.name = names.fresh(f"{y.name}/each")


def _scan_inputs(
    op: OpBuilder,
    tensors: Sequence[TensorSpec],
    given: Mapping[str, ir.Value],
    whole: Mapping[str, Pack],
) -> list[ir.Value]:
    """Return the inputs of the Scan, packed as the body expects them."""
    feeds: list[ir.Value] = []
    for t in tensors:
        if t.name in whole:
            feeds.append(whole[t.name].join(op, given))
        else:
            x = given[t.name]
            feeds.append(op.Unsqueeze(x, op.const([1])) if t.role in _PER_STEP_ROLES else x)
    return feeds


def _unpack_scan_outputs(
    op: OpBuilder,
    carried: Sequence[TensorSpec],
    ends: Sequence[ir.Value],
    whole: Mapping[str, Pack],
) -> Iterator[tuple[str, ir.Value]]:
    """Yield (name, final value) of carried tensors that are packed or may contain denormals."""
    for t, end in zip(carried, ends, strict=False):
        last = op.Shrink(end, lambd=DENORMAL_THRESHOLD, bias=0.0) if _can_underflow(t) else end
        if t.name in whole:
            yield from whole[t.name].split(op, last).items()
        elif _can_underflow(t):
            yield t.name, last


def _can_underflow(t: TensorSpec) -> bool:
    """Return whether elements may become denormal."""
    return t.role == "state" and t.dtype == "float32" and t.name.endswith(_DECAYING_SLOTS)


def _output_name(outputs: Sequence[TensorSpec], member: str) -> str:
    return next(t.name for t in outputs if t.feeds == member)


def _with_name_of(value: ir.Value, like: ir.Value) -> ir.Value:
    """Return a value with name, type and shape of another, which loses its name."""
    name, like.name = like.name, None
    value.name, value.type, value.shape = name, like.type, like.shape
    return value


def resolve_steps_per_call(
    requested: int | None, target: str | Target, accumulate: int, size: int
) -> int:
    """Return the number of steps per call, by request or by the default of the target.

    Args:
        requested: the option of the user; ``None`` is the default of the target.
        target: target of the step model.
        accumulate: gradient accumulation steps.
        size: bytes of parameters, buffers, state and frozen weights.

    Raises:
        PrepareError: if the number is below 1, or excludes ``accumulate``.
    """
    if requested is None:
        several = find(target).prefers("multi-step")
        small = accumulate == 1 and size <= T.MULTI_STEP_BYTES
        return T.STEPS_PER_CALL if several and small else 1
    if requested < 1:
        raise PrepareError(f"steps_per_call must be at least 1: {requested}")
    if requested > 1 and accumulate > 1:
        raise PrepareError(
            f"steps_per_call={requested} with accumulate={accumulate}: the step model updates "
            "after every batch\nhint: leave one of them at 1"
        )
    return requested


def _take_inputs(
    body: ir.Graph, given: dict[str, ir.Value], per_step: set[str], names: Names
) -> dict[str, ir.Value]:
    """Rename inputs that change from step to step; replace the others by values outside."""
    own = {x.name or "": x for x in body.inputs}
    for name, x in own.items():
        if name in per_step:
            x.name = names.fresh(f"{name}/each")
        else:
            x.replace_all_uses_with(given[name])
    return own


def _hoist_constants(body: ir.Graph, outer: ir.Graph) -> None:
    for name, x in list(body.initializers.items()):
        if x.const_value is not None and x.const_value.nbytes >= HOIST_MIN_BYTES:
            del body.initializers[name]
            outer.register_initializer(x)


def _stacked_spec(t: TensorSpec, count: int) -> TensorSpec:
    inner = () if t.role in _PER_STEP_ROLES else t.shape
    return dataclasses.replace(t, shape=(count, *inner))


def _spec_value(t: TensorSpec) -> ir.Value:
    shape = ir.Shape([None if d == "?" else d for d in t.shape])
    return ir.Value(name=t.name, type=ir.TensorType(dtype_from_name(t.dtype)), shape=shape)


def pack_parameters(
    origin: DifferentiatedModel, options: BuildOptions, state: Sequence[StateSpec]
) -> tuple[DifferentiatedModel, list[StateSpec], list[Pack]]:
    """Join small parameters into vectors; return model, state and packs of parameters and state.

    before:  inputs p1, p2                       outputs g1, g2
    after:   input p -> Split -> p1, p2          output Concat(g1, g2)
    """
    packs = _packs(origin, options, state)
    if not packs:
        return origin, list(state), []
    model = origin.model.clone()
    graph = model.graph
    known = {x.name or "": x for x in graph.inputs}
    outputs = list(graph.outputs)
    first = len(outputs) - len(origin.parameters) - len(origin.changing)
    gradients = dict(zip(origin.parameters, outputs[first:], strict=False))
    gone: set[str] = set()
    first_node = next(iter(graph), None)
    back = OpBuilder(graph, "pack/", target=options.target)
    front = OpBuilder(graph, "pack/", target=options.target, before=first_node, parent=back)
    for pack in packs:
        values = [known[n] for n in pack.members]
        values[0].name = front.names.fresh(f"{pack.name}/member")
        size = ir.Shape([sum(pack.sizes)])
        whole = ir.Value(name=pack.name, type=values[0].type, shape=size)
        for old, new in zip(values, pack.split(front, whole).values(), strict=True):
            old.replace_all_uses_with(new)
        graph.inputs[list(graph.inputs).index(values[0])] = whole
        gradients[pack.name] = pack.join(back, gradients)
        gone.update(pack.members[1:])
        for n in pack.members[1:]:
            graph.inputs.remove(known[n])
    parameters = tuple(n for n in origin.parameters if n not in gone)
    tail = outputs[len(outputs) - len(origin.changing) :]
    graph.outputs.clear()
    graph.outputs.extend([*outputs[:first], *(gradients[n] for n in parameters), *tail])
    slots = [pack.of_slot(s.slot) for pack in packs for s in state if s.parameter == pack.name]
    whole = {p.name: (sum(p.sizes),) for p in slots}
    kept = [
        dataclasses.replace(s, shape=whole.get(s.name, s.shape))
        for s in state
        if s.parameter not in gone
    ]
    return (
        dataclasses.replace(origin, model=model, parameters=parameters),
        kept,
        [*packs, *slots],
    )


def _packs(
    origin: DifferentiatedModel, options: BuildOptions, state: Sequence[StateSpec]
) -> list[Pack]:
    """Return packs of the small float32 parameters that one update can serve."""
    if options.ema is not None or options.precision.half is not None:
        return []
    shapes = {
        x.name or "": tuple(d for d in x.shape or () if isinstance(d, int))
        for x in origin.model.graph.inputs
        if x.name in origin.parameters and x.dtype == ir.DataType.FLOAT
    }
    # Factored state (Adafactor) has another shape than its parameter and cannot be joined.
    factored = {s.parameter for s in state if s.shape != shapes.get(s.parameter)}
    same = {n: shape for n, shape in shapes.items() if n not in factored}
    return pack_small_parameters(options.optimizer, same, max_elements=T.PACKED_PARAMETER_ELEMENTS)
