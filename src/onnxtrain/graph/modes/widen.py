"""float32 in the place of 16-bit floats, so that small updates are not lost.

An update below half a unit in the last place vanishes: in float16 that is one part in 4,000 of a
weight, far more than most steps change. So parameters, their state and all that is computed are
float32 here, whatever the file holds; what is exported has the types of the file again. Weights
that are not trained keep their bytes and are cast where they are read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np
import onnx_ir as ir

from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.captured_values import subgraphs_of
from onnxtrain.graph.nodes import is_standard
from onnxtrain.targets import Target

FLOAT = ir.DataType.FLOAT
NARROW = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_SMALL = 1 << 12
"""Elements: constants up to this size are converted once and for all."""
_TYPES = ("to", "dtype", "output_dtype")


def widen(model: ir.Model, trained: Collection[str], *, target: str | Target) -> list[str]:
    """Compute in float32 what a prepared model computes in 16 bits, in place; say what was done.

    The inputs of the model keep their types, its outputs become float32.

    Args:
        model: a prepared model.
        trained: names of the initializers that become float32 themselves.
        target: where it will run.
    """
    names = sorted(
        {v.dtype.name.lower() for v in _values(model.graph) if _is_narrow(v) and v.dtype}
    )
    if not names:
        return []
    op = OpBuilder(model.graph, "wide/", target=target)
    widened = 0
    for name, x in list(model.graph.initializers.items()):
        if not _is_narrow(x):
            continue
        widened += name in trained
        if name in trained or op.target.lacks("float16") or _becomes_constant(x):
            _convert(x)
        else:
            _cast_behind(op, x)
    for x in list(model.graph.inputs):
        if _is_narrow(x):
            _cast_behind(op, x)
    kept = {*model.graph.inputs, *model.graph.initializers.values()}
    for value in _values(model.graph):
        if value in kept:
            continue
        if value.const_value is not None and value.const_value.dtype in NARROW:
            _convert(value)
        elif value.type is not None:
            value.type = _wide_type(value.type)
    for node in model.graph.all_nodes():
        _widen_attributes(node)
    what = " and ".join(names)
    return [f"{widened} {what} parameter(s) are float32 in training; exports keep {what}"]


def _is_narrow(x: ir.Value) -> bool:
    return x.dtype in NARROW


def _becomes_constant(x: ir.Value) -> bool:
    """Return whether a frozen weight is small, or read by what wants constants: scales, say."""
    if x.const_value is None or x.const_value.size <= _SMALL:
        return True
    return any(not is_standard(u.node) or u.node.op_type == "DequantizeLinear" for u in x.uses())


def _convert(x: ir.Value) -> None:
    assert x.const_value is not None
    array = np.asarray(x.const_value.numpy()).astype(np.float32)
    x.const_value = ir.Tensor(array, FLOAT, name=x.name)
    x.type = ir.TensorType(FLOAT)


def _cast_behind(op: OpBuilder, x: ir.Value) -> None:
    """Let every reader of a value read it in float32."""
    uses = list(x.uses())
    if not uses and not x.is_graph_output():
        return
    first = next(iter(op.graph), None)
    wide = (op if first is None else op.before(first)).Cast(x, to=FLOAT)
    wide.type, wide.shape = ir.TensorType(FLOAT), x.shape
    for use in uses:
        use.node.replace_input_with(use.idx, wide)


def _widen_attributes(node: ir.Node) -> None:
    """Let what says its own type say float32."""
    if node.op_type == "Cast" and _is_narrow_input(node):
        return
    for name in _TYPES:
        attribute = node.attributes.get(name)
        if attribute is not None and not attribute.is_ref() and attribute.value in NARROW:
            node.attributes[name] = ir.AttrInt64(name, FLOAT.value)
    for name, attribute in list(node.attributes.items()):
        if attribute.type == ir.AttributeType.TENSOR and not attribute.is_ref():
            tensor = attribute.as_tensor()
            if tensor.dtype in NARROW:
                wide = ir.Tensor(tensor.numpy().astype(np.float32), FLOAT, name=tensor.name)
                node.attributes[name] = ir.AttrTensor(name, wide)


def _is_narrow_input(cast: ir.Node) -> bool:
    x = cast.inputs[0]
    return x is not None and _is_narrow(x)


def _wide_type(kind: ir.TypeProtocol) -> ir.TypeProtocol:
    if isinstance(kind, ir.TensorType):
        return ir.TensorType(FLOAT) if kind.dtype in NARROW else kind
    if isinstance(kind, ir.SequenceType):
        return ir.SequenceType(_wide_type(kind.elem_type))
    if isinstance(kind, ir.OptionalType):
        return ir.OptionalType(_wide_type(kind.elem_type))
    return kind


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    """Return all values of a graph and of those inside it."""
    pending: list[ir.Graph] = [graph]
    while pending:
        at = pending.pop()
        yield from at.inputs
        yield from at.initializers.values()
        for node in at:
            yield from node.outputs
            pending += subgraphs_of(node)
