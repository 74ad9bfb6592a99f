"""Shapes that onnx's inference gives up on: sizes known by name only.

Two kinds of formulas, by operator: some give the dimensions of the first output, others follow
the elements of small integer tensors (the usual ``Shape -> Gather -> Concat -> Reshape``
arithmetic).
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.nodes import is_standard
from onnxtrain.graph.shapes import symbolic_shapes, symbolic_values, window_shapes
from onnxtrain.graph.shapes.formulas import Formula

_SHAPES: dict[str, Formula] = {**symbolic_shapes.FORMULAS, **window_shapes.FORMULAS}
_VALUES: dict[str, Formula] = symbolic_values.FORMULAS


def refine(node: ir.Node, opset: int) -> None:
    """Improve the shapes and record the symbolic elements of a node's outputs."""
    if not is_standard(node) or not node.outputs:
        return
    formula = _SHAPES.get(node.op_type)
    value = _VALUES.get(node.op_type)
    if formula is None and value is None:
        return
    attributes = S.attributes_of(node, opset)
    out = node.outputs[0]
    # onnx counts windows that start behind the input; no runtime does. It takes both sides of the
    # spectrum where STFT has no frame_length; no runtime does.
    overrule = bool(attributes.get("ceil_mode")) or node.op_type == "STFT"
    if formula is not None and (overrule or any(not S.is_static(o) for o in node.outputs)):
        dims = formula(node, attributes)
        if dims is not None:
            known = S.dims_of(out)
            if known is not None and len(known) == len(dims) and not overrule:
                dims = [
                    k if isinstance(k, int) or d is None else d
                    for k, d in zip(known, dims, strict=True)
                ]
            S.set_dims(out, dims)
    if value is not None and out.dtype in (ir.DataType.INT64, ir.DataType.INT32):
        S.set_symbolic(out, value(node, attributes))
