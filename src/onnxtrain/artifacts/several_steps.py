"""A step model that trains several batches in one call.

Runtimes that copy parameters and state in and out of every call, as WebAssembly does, spend less
on it that way. The fused step becomes the body of a Scan; what training changes is carried along.
"""

from __future__ import annotations

import dataclasses

import onnx
import onnx_ir as ir

from onnxtrain.errors import PrepareError
from onnxtrain.graph.builder import Names, names_in
from onnxtrain.graph.finish import finish
from onnxtrain.graph.versions import IR_VERSION, OPSET
from onnxtrain.manifest import ModelSpec, TensorSpec

LARGE = 1024  # bytes: larger constants lie outside the body, where files share them
_KEPT = ("parameter", "buffer", "state", "frozen")
_BY_STEP = ("lr", "step")
SMALL = 4_000_000
"""Bytes of parameters and state up to which several steps per call are the default for wasm."""
DEFAULT = 8


def several_steps(
    step: tuple[onnx.ModelProto, ModelSpec], count: int
) -> tuple[onnx.ModelProto, ModelSpec]:
    """Give a model that does ``count`` steps, one after the other, and its entry in the manifest.

    Batches get a leading axis of size ``count``; learning rate and step number have one element per
    step; loss, metrics and outputs come stacked. The results are those of single steps.
    """
    proto, spec = step
    body = ir.from_proto(proto).graph
    results = {y.name or "": y for y in body.outputs}
    fed = {t.feeds: t for t in spec.outputs if t.feeds is not None}
    carried = [t for t in spec.inputs if t.name in fed]
    scanned = [t for t in spec.inputs if t.name not in fed and t.role not in _KEPT]
    stacked = [t for t in spec.outputs if t.feeds is None]

    inputs = tuple(_several(t, count) if t in scanned else t for t in spec.inputs)
    outer = ir.Graph(
        [_value(t) for t in inputs], [], nodes=[], opset_imports={"": OPSET}, name="steps_model"
    )
    given = {x.name or "": x for x in outer.inputs}
    names = Names({*names_in(body), *given, *results})
    own = _take_inputs(body, given, {t.name for t in (*carried, *scanned)}, names)
    _hoist(body, outer)
    body.inputs.clear()
    body.inputs.extend(own[t.name] for t in (*carried, *scanned))
    body.outputs.clear()
    body.outputs.extend(results[t.name] for t in (*(fed[t.name] for t in carried), *stacked))
    body.name = "step"
    for y in body.outputs:
        y.name = names.fresh(f"{y.name}/each")

    feeds = [given[t.name] for t in carried]
    for t in scanned:
        x = given[t.name]
        feeds.append(_column(outer, x, count, names) if t.role in _BY_STEP else x)
    outputs = tuple(t if t.feeds is not None else _several(t, count) for t in spec.outputs)
    finals = {t.name: _value(t) for t in outputs}
    outer.append(
        ir.Node(
            "",
            "Scan",
            feeds,
            [ir.AttrGraph("body", body), ir.AttrInt64("num_scan_inputs", len(scanned))],
            outputs=[finals[t.name] for t in (*(fed[t.name] for t in carried), *stacked)],
            name=names.fresh("steps"),
        )
    )
    outer.outputs.extend(finals[t.name] for t in outputs)
    model = ir.Model(outer, ir_version=IR_VERSION)
    file = spec.file.removesuffix(".onnx") + f".x{count}.onnx"
    return finish(model), dataclasses.replace(
        spec, file=file, steps_per_call=count, inputs=inputs, outputs=outputs
    )


def steps_wanted(asked: int | None, target: str, accumulate: int, size: int) -> int:
    """Give the number of steps per call: the one asked for, or what suits the target.

    Args:
        asked: by the caller; ``None`` leaves it to the target.
        target: of the step model.
        accumulate: batches per update.
        size: bytes of parameters, buffers and state.

    Raises:
        PrepareError: if the number is impossible or has no effect.
    """
    if asked is None:
        return DEFAULT if target == "wasm" and accumulate == 1 and size <= SMALL else 1
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


def _column(graph: ir.Graph, x: ir.Value, count: int, names: Names) -> ir.Value:
    """Give [count] numbers as [count, 1]: one step sees a tensor of one element."""
    name = names.fresh(f"{x.name}/axes")
    axes = ir.Value(name=name, const_value=ir.tensor([1], name=name))
    graph.register_initializer(axes)
    name = names.fresh(f"{x.name}/column")
    out = ir.Value(name=name, type=x.type, shape=ir.Shape([count, 1]))
    graph.append(ir.Node("", "Unsqueeze", [x, axes], outputs=[out], name=name))
    return out


def _several(t: TensorSpec, count: int) -> TensorSpec:
    inner = () if t.role in _BY_STEP else t.shape
    return dataclasses.replace(t, shape=(count, *inner))


def _value(t: TensorSpec) -> ir.Value:
    names = {"float32": "FLOAT", "float64": "DOUBLE"}
    kind = ir.TensorType(ir.DataType[names.get(t.dtype, t.dtype.upper())])
    shape = ir.Shape([None if d == "?" else d for d in t.shape])
    return ir.Value(name=t.name, type=kind, shape=shape)
