"""A step model that trains several batches in one call.

Runtimes that copy parameters and state in and out of every call, as WebAssembly does, spend less
on it that way. The fused step becomes the body of a Scan; what training changes is carried along.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import onnx
import onnx_ir as ir

from onnxtrain import thresholds as T
from onnxtrain.errors import PrepareError
from onnxtrain.graph.builder import Names, OpBuilder, names_in
from onnxtrain.graph.io.finish import finish
from onnxtrain.graph.prepare.versions import IR_VERSION, OPSET
from onnxtrain.manifest import ModelSpec, TensorSpec
from onnxtrain.optim.packing import Pack
from onnxtrain.targets import Target, find

LARGE = 1024  # bytes: larger constants lie outside the body, where files share them
_KEPT = ("parameter", "buffer", "state", "frozen")
_BY_STEP = ("lr", "step")
_FADING = (".exp_avg", ".exp_avg_sq", ".momentum_buffer")
TINY = 1e-35
"""State below this becomes 0 after each call. The moments of dead units shrink for ever, and
WebAssembly cannot flush denormal numbers, on which processors are much slower."""


def multi_step_model(
    step: tuple[onnx.ModelProto, ModelSpec], count: int, plain: ModelSpec, packs: Sequence[Pack]
) -> tuple[onnx.ModelProto, ModelSpec]:
    """Return a model that does ``count`` steps, one after the other, and its entry in the manifest.

    Batches get a leading axis of size ``count``; learning rate and step number have one element per
    step; loss, metrics and outputs come stacked. The results are those of single steps.

    Args:
        step: one step, its small parameters packed as ``packs`` say.
        count: how many.
        plain: inputs and outputs of a single step, nothing packed.
        packs: parameters and state that are one tensor in ``step``.
    """
    proto, inner = step
    one = ir.from_proto(proto)
    body = one.graph
    fed = {t.feeds: t for t in inner.outputs if t.feeds is not None}
    carried = [t for t in inner.inputs if t.name in fed]
    scanned = [t for t in inner.inputs if t.name not in fed and t.role not in _KEPT]
    stacked = [t for t in inner.outputs if t.feeds is None]

    inputs = tuple(t if t.role in _KEPT else _several(t, count) for t in plain.inputs)
    outputs = tuple(t if t.feeds is not None else _several(t, count) for t in plain.outputs)
    opsets = {**one.opset_imports, "": OPSET}
    outer = ir.Graph(
        [_value(t) for t in inputs], [], nodes=[], opset_imports=opsets, name="steps_model"
    )
    given = {x.name or "": x for x in outer.inputs}
    results = [y.name or "" for y in body.outputs]
    names = Names({*names_in(body), *given, *results, *(t.name for t in plain.outputs)})
    op = OpBuilder(outer, "steps/")
    op.names.taken |= names.taken
    own = _take_inputs(body, given, {t.name for t in (*carried, *scanned)}, names)
    _hoist(body, outer)
    ordered = [t.name for t in (*(fed[t.name] for t in carried), *stacked)]
    _become_step(body, [own[t.name] for t in (*carried, *scanned)], ordered, names)

    whole = {p.name: p for p in packs}
    feeds = _feeds(op, [*carried, *scanned], given, whole)
    finals = {t.name: _value(t) for t in outputs}
    new = {t.feeds: finals[t.name] for t in outputs if t.feeds is not None}
    ends: list[ir.Value] = []
    for t in (*carried, *stacked):
        if t.name in whole or _fades(t):
            like = own[t.name]
            name = op.names.fresh("steps/end")
            ends.append(ir.Value(name=name, type=like.type, shape=like.shape))
        else:
            ends.append(new[t.name] if t in carried else finals[t.name])
    attributes = [ir.AttrGraph("body", body), ir.AttrInt64("num_scan_inputs", len(scanned))]
    outer.append(ir.Node("", "Scan", feeds, attributes, outputs=ends, name=names.fresh("steps")))
    for name, end in _unpacked(op, carried, ends, whole):
        finals[_out(outputs, name)] = _renamed(end, new[name])
    outer.outputs.extend(finals[t.name] for t in outputs)
    model = ir.Model(outer, ir_version=IR_VERSION)
    file = plain.file.removesuffix(".onnx") + f".x{count}.onnx"
    return finish(model), dataclasses.replace(
        plain, file=file, steps_per_call=count, inputs=inputs, outputs=outputs
    )


def _become_step(
    body: ir.Graph, inputs: Sequence[ir.Value], outputs: Sequence[str], names: Names
) -> None:
    """Make the graph of a step the body of a Scan: its inputs and outputs in that order."""
    results = {y.name or "": y for y in body.outputs}
    body.inputs.clear()
    body.inputs.extend(inputs)
    body.outputs.clear()
    body.outputs.extend(results[name] for name in outputs)
    body.name = "step"
    for y in body.outputs:
        y.name = names.fresh(f"{y.name}/each")


def _feeds(
    op: OpBuilder,
    tensors: Sequence[TensorSpec],
    given: Mapping[str, ir.Value],
    whole: Mapping[str, Pack],
) -> list[ir.Value]:
    """Return the inputs of the Scan, packed where the step wants that."""
    feeds: list[ir.Value] = []
    for t in tensors:
        if t.name in whole:
            feeds.append(whole[t.name].join(op, given))
        else:
            x = given[t.name]
            feeds.append(op.Unsqueeze(x, op.const([1])) if t.role in _BY_STEP else x)
    return feeds


def _unpacked(
    op: OpBuilder,
    carried: Sequence[TensorSpec],
    ends: Sequence[ir.Value],
    whole: Mapping[str, Pack],
) -> Iterator[tuple[str, ir.Value]]:
    """Yield what becomes of the tensors that come out of the Scan packed, or with tiny state."""
    for t, end in zip(carried, ends, strict=False):
        last = op.Shrink(end, lambd=TINY, bias=0.0) if _fades(t) else end
        if t.name in whole:
            yield from whole[t.name].split(op, last).items()
        elif _fades(t):
            yield t.name, last


def _fades(t: TensorSpec) -> bool:
    """Return whether elements may sink below what the processor handles at full speed."""
    return t.role == "state" and t.dtype == "float32" and t.name.endswith(_FADING)


def _out(outputs: Sequence[TensorSpec], member: str) -> str:
    return next(t.name for t in outputs if t.feeds == member)


def _renamed(value: ir.Value, like: ir.Value) -> ir.Value:
    """Return a value under the name of another, which is not used then."""
    name, like.name = like.name, None
    value.name, value.type, value.shape = name, like.type, like.shape
    return value


def steps_wanted(asked: int | None, target: str | Target, accumulate: int, size: int) -> int:
    """Return the number of steps per call: the one asked for, or what suits the target.

    Args:
        asked: by the caller; ``None`` leaves it to the target.
        target: of the step model.
        accumulate: batches per update.
        size: bytes of parameters, buffers and state.

    Raises:
        PrepareError: if the number is impossible or has no effect.
    """
    if asked is None:
        several = find(target).prefers("several-steps")
        small = accumulate == 1 and size <= T.SEVERAL_STEPS_BYTES
        return T.STEPS_PER_CALL if several and small else 1
    if asked < 1:
        raise PrepareError(f"steps_per_call must be at least 1: {asked}")
    if asked > 1 and accumulate > 1:
        raise PrepareError(
            f"steps_per_call={asked} with accumulate={accumulate}: the step model updates on "
            "every batch\nhint: leave one of them at 1"
        )
    return asked


def _take_inputs(
    body: ir.Graph, given: dict[str, ir.Value], anew: set[str], names: Names
) -> dict[str, ir.Value]:
    """Rename what the body gets anew in each step; the rest it reads from outside."""
    own = {x.name or "": x for x in body.inputs}
    for name, x in own.items():
        if name in anew:
            x.name = names.fresh(f"{name}/each")
        else:
            x.replace_all_uses_with(given[name])
    return own


def _hoist(body: ir.Graph, outer: ir.Graph) -> None:
    for name, x in list(body.initializers.items()):
        if x.const_value is not None and x.const_value.nbytes >= LARGE:
            del body.initializers[name]
            outer.register_initializer(x)


def _several(t: TensorSpec, count: int) -> TensorSpec:
    inner = () if t.role in _BY_STEP else t.shape
    return dataclasses.replace(t, shape=(count, *inner))


def _value(t: TensorSpec) -> ir.Value:
    names = {"float32": "FLOAT", "float64": "DOUBLE"}
    kind = ir.TensorType(ir.DataType[names.get(t.dtype, t.dtype.upper())])
    shape = ir.Shape([None if d == "?" else d for d in t.shape])
    return ir.Value(name=t.name, type=kind, shape=shape)
