"""One form per operator: explicit padding, no ``CastLike``, no legacy forms."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.nodes import nodes
from onnxtrain.graph.shapes import dims as D
from onnxtrain.graph.shapes.dims import Dim

_WINDOWED = frozenset({"Conv", "AveragePool", "LpPool", "MaxPool", "ConvTranspose", "ConvInteger"})


def normalise(model: ir.Model) -> list[str]:
    """Rewrite nodes to their plain form, in place; return a line for each kind of change."""
    changed: dict[str, int] = {}
    _explicit_conditions(model)
    for node in nodes(model.graph, subgraphs=True):
        if node.op_type == "CastLike" and _cast_like(node):
            changed["CastLike became Cast"] = changed.get("CastLike became Cast", 0) + 1
        elif node.op_type in _WINDOWED and _explicit_padding(node):
            key = f"auto_pad of {node.op_type} made explicit"
            changed[key] = changed.get(key, 0) + 1
    return [f"{what}: {n} node(s)" for what, n in changed.items()]


def _explicit_conditions(model: ir.Model) -> None:
    """Give loops that carry nothing their condition: an absent last input is not written."""
    op = OpBuilder(model.graph, "prepare/")
    for node in nodes(model.graph, "Loop", subgraphs=True):
        if len(node.inputs) < 2 or (len(node.inputs) == 2 and node.inputs[1] is None):
            node.resize_inputs(2)
            node.replace_input_with(1, op.const(True))


def _cast_like(node: ir.Node) -> bool:
    like = node.inputs[1]
    if like is None or like.dtype is None:
        return False
    graph = node.graph
    assert graph is not None
    attributes = [a for n, a in node.attributes.items() if n == "saturate"]
    cast = ir.Node(
        "",
        "Cast",
        [node.inputs[0]],
        attributes=[ir.AttrInt64("to", int(like.dtype)), *attributes],
        num_outputs=1,
        name=node.name,
        version=node.version,
    )
    graph.insert_before(node, cast)
    old, new = node.outputs[0], cast.outputs[0]
    new.name, new.type, new.shape = old.name, old.type, old.shape
    old.name = f"{old.name}.replaced"
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    graph.remove(node, safe=True)
    return True


def _explicit_padding(node: ir.Node) -> bool:
    attribute = node.attributes.get("auto_pad")
    mode = "NOTSET" if attribute is None else attribute.as_string()
    if mode == "NOTSET":
        return False
    x = node.inputs[0]
    dims = None if x is None else S.dims_of(x)
    if dims is None:
        return False
    n = len(dims) - 2
    if mode == "VALID":
        pads = [0] * 2 * n
    else:
        same_pads = _same_pads(node, dims, n, upper=mode == "SAME_UPPER")
        if same_pads is None:
            return False
        pads = same_pads
    node.attributes.pop("auto_pad")
    node.attributes["pads"] = ir.AttrInt64s("pads", pads)
    return True


def _same_pads(node: ir.Node, dims: Sequence[Dim], n: int, *, upper: bool) -> list[int] | None:
    """Return the padding that makes ``output = ceil(input / stride)``."""
    if "output_shape" in node.attributes or node.attributes.get("ceil_mode", _NO).value:
        return None
    w = node.inputs[1] if len(node.inputs) > 1 else None
    kernel = _ints(node, "kernel_shape")
    if not kernel and w is not None:
        kernel = D.numbers((S.dims_of(w) or ())[2:])
    strides, dilations = _ints(node, "strides") or [1] * n, _ints(node, "dilations") or [1] * n
    extra = _ints(node, "output_padding") or [0] * n
    if not kernel:
        return None
    before: list[int] = []
    after: list[int] = []
    for size, k, s, d, e in zip(dims[2:], kernel, strides, dilations, extra, strict=True):
        extent = (k - 1) * d + 1
        if node.op_type == "ConvTranspose":
            # Transposed: the output is exactly input * stride.
            total = max(extent + e - s, 0)
        elif isinstance(size, int):
            total = max((-(-size // s) - 1) * s + extent - size, 0)
        elif s == 1:
            total = extent - 1
        else:
            return None
        small, large = total // 2, total - total // 2
        before.append(small if upper else large)
        after.append(large if upper else small)
    return before + after


def _ints(node: ir.Node, name: str) -> list[int] | None:
    attribute = node.attributes.get(name)
    return None if attribute is None else list(attribute.as_ints())


_NO = ir.AttrInt64("none", 0)
