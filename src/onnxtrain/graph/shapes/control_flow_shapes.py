"""Types and shapes of the outputs of If, Loop and Scan, from those of their bodies."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.nodes import is_standard
from onnxtrain.graph.shapes.dims import Dim


def infer_control_flow(node: ir.Node) -> bool:
    """Set the outputs of If, Loop and Scan from their bodies; ``False`` for any other node."""
    infer = _BY_OPERATOR.get(node.op_type)
    if infer is None or not is_standard(node):
        return False
    infer(node)
    return True


def _if(node: ir.Node) -> None:
    then = node.attributes["then_branch"].as_graph()
    other = node.attributes["else_branch"].as_graph()
    for out, a, b in zip(node.outputs, then.outputs, other.outputs, strict=False):
        _adopt(out, a.type or b.type, _join(S.dims_of(a), S.dims_of(b)))


def _loop(node: ir.Node) -> None:
    body = node.attributes["body"].as_graph()
    carried = len(node.inputs) - 2
    for i, out in enumerate(node.outputs):
        inner = body.outputs[i + 1]
        if i < carried:
            _adopt_state(out, node.inputs[i + 2], inner)
        else:
            dims = S.dims_of(inner)
            _adopt(out, inner.type, None if dims is None else (None, *dims))


def _scan(node: ir.Node) -> None:
    body = node.attributes["body"].as_graph()
    scans = node.attributes["num_scan_inputs"].as_int()
    carried = len(node.inputs) - scans
    axes_in = _ints(node, "scan_input_axes") or [0] * scans
    axes_out = _ints(node, "scan_output_axes") or [0] * (len(node.outputs) - carried)
    length = _steps(node.inputs[carried:], axes_in)
    for i, out in enumerate(node.outputs):
        inner = body.outputs[i]
        if i < carried:
            _adopt_state(out, node.inputs[i], inner)
            continue
        dims = S.dims_of(inner)
        if dims is None:
            _adopt(out, inner.type, None)
        else:
            axis = axes_out[i - carried] % (len(dims) + 1)
            _adopt(out, inner.type, (*dims[:axis], length, *dims[axis:]))


_BY_OPERATOR = {"If": _if, "Loop": _loop, "Scan": _scan}


def _steps(scanned: Sequence[ir.Value | None], axes: Sequence[int]) -> Dim:
    """Return the number of steps of a Scan, from the first input whose shape is known."""
    for x, axis in zip(scanned, axes, strict=True):
        dims = None if x is None else S.dims_of(x)
        if dims is not None:
            return dims[axis]
    return None


def _ints(node: ir.Node, name: str) -> list[int] | None:
    attribute = node.attributes.get(name)
    return None if attribute is None else list(attribute.as_ints())


def _adopt_state(out: ir.Value, start: ir.Value | None, inner: ir.Value) -> None:
    """A state may leave as it came in, if there is no step, or as the body makes it."""
    before = None if start is None else S.dims_of(start)
    type_ = inner.type or (None if start is None else start.type)
    _adopt(out, type_, _join(before, S.dims_of(inner)))


def _join(a: Sequence[Dim] | None, b: Sequence[Dim] | None) -> list[Dim] | None:
    if a is None or b is None or len(a) != len(b):
        return None
    return [p if p == q else None for p, q in zip(a, b, strict=True)]


def _adopt(out: ir.Value, type_: ir.TypeProtocol | None, dims: Sequence[Dim] | None) -> None:
    out.type = type_ or out.type
    if dims is not None:
        S.set_dims(out, dims)
