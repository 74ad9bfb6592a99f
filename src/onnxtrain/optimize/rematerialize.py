"""Rematerialize cheap activations in the backward pass instead of storing them.

The weight gradient of `y = f(x) W` reads `f(x)` again. If `x` is stored anyway, because another
gradient reads it, and `f` is one elementwise kernel (GELU, a scale per row) or the softmax of long
attention, recomputing `f(x)` saves one activation of that size for one memory-bound kernel:

    before:  x -> Gelu -> g -> MatMul(W)   ...   backward: MatMul(g^T, dy)
    after:   x -> Gelu -> g -> MatMul(W)   ...   backward: MatMul(Gelu(Reshape(x))^T, dy)

The copy reads a reshaped view of `x`, because onnxruntime would merge two equal nodes. It runs in
the backward pass, because nodes run in the order of the file.

Scores of long attention are much larger than queries and keys, which are stored anyway; torch's
kernels recompute them, too.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain import thresholds as T
from onnxtrain.graph import shapes as S
from onnxtrain.graph.attention_scores import match_attention_scores
from onnxtrain.graph.builder import OpBuilder, copy_node
from onnxtrain.graph.memory_usage import Sizes, forward_nodes
from onnxtrain.graph.nodes import is_op, nodes
from onnxtrain.graph.shapes.dims import Dim
from onnxtrain.modes.mixed_precision import ATTENTION_OPSET, can_upgrade_opset

_UNKNOWN_DIM_SIZE = 32  # assumed for symbolic sizes
Dims = Sequence[Dim] | None

_VIEWS = ("Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze")


def rematerialize(model: ir.Model, op: OpBuilder) -> int:
    """Redirect backward uses of cheap activations to recomputed copies; return how many values."""
    graph = model.graph
    forward = forward_nodes(graph)
    position = {node: i for i, node in enumerate(graph)}
    sizes, count = Sizes(other=_UNKNOWN_DIM_SIZE), 0
    fused = op.target.prefers("fuse-attention") and can_upgrade_opset(model, ATTENTION_OPSET)
    for node in nodes(graph, "Gelu", "Mul", "Softmax"):
        y = node.outputs[0]
        if node not in forward or y.is_graph_output() or sizes(y) < T.REMATERIALIZE_BYTES:
            continue
        uses = list(y.uses())
        backward_uses = [use for use in uses if use.node not in forward and use.node in position]
        recipe = _recompute_recipe(node, forward, fused=fused)
        if not backward_uses or len(backward_uses) == len(uses) or recipe is None:
            continue
        if is_op(node, "Gelu") and not all(_feeds_only_matmuls(*use) for use in backward_uses):
            continue
        op.position = min((use.node for use in backward_uses), key=position.__getitem__)
        recomputed = _append_copy(op, recipe)
        if recomputed is None:
            continue
        for use in backward_uses:
            use.node.replace_input_with(use.idx, recomputed)
        count += 1
    return count


def _recompute_recipe(node: ir.Node, forward: set[ir.Node], *, fused: bool) -> list[ir.Node] | None:
    """Return the nodes that recompute a value from values that are stored anyway.

    Scores in 16 bits are always worth it if the fused operator can replace the forward pass.
    """
    y = node.outputs[0]
    if is_op(node, "Softmax"):
        scores = match_attention_scores(node)
        if scores is None or not (scores.is_long or (fused and scores.fits_fused_attention)):
            return None
        saved = all(_is_saved_for_backward(x, forward) for x in (scores.query, scores.key))
        return list(scores.nodes) if saved else None
    if is_op(node, "Gelu"):
        if node.attributes.get_string("approximate", "none") != "none":
            return None  # the gradient of the tanh form reads the result, too
        return [node] if _is_saved_for_backward(node.inputs[0], forward) else None
    large = [x for x in node.inputs if x is not None and S.same_shape(x, y)]
    factors = [x for x in node.inputs if x is not None and _is_row_scale(x, y)]
    if len(large) != 1 or len(factors) != 1 or not _is_saved_for_backward(large[0], forward):
        return None
    return [node]


def _is_row_scale(x: ir.Value, y: ir.Value) -> bool:
    """Return whether a value has one element per row of another."""
    dims, whole = S.dims_of(x), S.dims_of(y)
    if dims is None or whole is None or len(dims) != len(whole) or len(dims) < 2:
        return False
    return None not in whole and dims == (*whole[:-1], 1) and whole[-1] != 1


def _is_saved_for_backward(x: ir.Value | None, forward: set[ir.Node]) -> bool:
    """Return whether the backward pass reads a value, or it is a graph input."""
    if x is None or S.dims_of(x) is None:
        return False
    return x.producer() is None or any(use.node not in forward for use in x.uses())


def _feeds_only_matmuls(node: ir.Node, index: int) -> bool:
    """Return whether only matmuls read an input of a node, possibly through views."""
    if is_op(node, "MatMul", "Gemm"):
        return index < 2
    if not is_op(node, *_VIEWS) or index or node.outputs[0].is_graph_output():
        return False
    return all(_feeds_only_matmuls(*use) for use in node.outputs[0].uses())


def _append_copy(op: OpBuilder, chain: Sequence[ir.Node]) -> ir.Value | None:
    """Append copies of nodes that read reshaped views; return the result in its old shape."""
    y = chain[-1].outputs[0]
    first, back = chain[0], _shape(S.dims_of(y))
    view = _unsqueezed_shape if is_op(first, "MatMul") else _rows_shape
    shapes = [None if x is None else view(S.dims_of(x)) for x in first.inputs]
    if back is None or None in shapes:
        return None
    copies: dict[ir.Value, ir.Value] = {}
    for x, shape in zip(first.inputs, shapes, strict=True):
        assert x is not None
        copies[x] = op.Reshape(x, shape)
    for node in chain:
        inputs = [x if x is None else copies.get(x, x) for x in node.inputs]
        if is_op(node, "Softmax"):  # a positive axis may be another one in the view
            copy = op.Softmax(*inputs, axis=-1)
        else:
            copy = copy_node(op, node, inputs)
        copies[node.outputs[0]] = copy
    return op.Reshape(copies[y], back)


def _shape(dims: Dims) -> list[int] | None:
    """Return a shape for Reshape, with -1 for one symbolic size."""
    if dims is None or sum(not isinstance(d, int) for d in dims) > 1:
        return None
    return [d if isinstance(d, int) else -1 for d in dims]


def _unsqueezed_shape(dims: Dims) -> list[int] | None:
    shape = _shape(dims)
    return None if shape is None else [1, *shape]


def _rows_shape(dims: Dims) -> list[int] | None:
    """Return the shape of a matrix of all rows; a matrix gets an axis of size 1."""
    if not dims or len(dims) < 2 or not isinstance(dims[-1], int):
        return None
    return [1, -1, dims[-1]] if len(dims) == 2 else [-1, dims[-1]]


__all__ = ["rematerialize"]
