"""Values that are kept for the backward pass though it could make them again for next to nothing.

A product wants its operand again for the gradient of its weight. Where that is one pass over a
value that is kept as well, the activation behind a linear layer or a row by its own factor, keeping
both takes twice the memory, and the pass takes little of the time of a step. Scores of long
attention are much larger than queries and keys, which are kept as well: torch's own kernel makes
them again, too.

What is made again reads another view of the same memory, since onnxruntime would merge two equal
nodes. It runs late because only the backward pass reads it, and nodes run in the order of a file.
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

_UNKNOWN_DIM_SIZE = 32  # what a symbolic size counts as
Dims = Sequence[Dim] | None

_VIEWS = ("Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze")


def rematerialize(model: ir.Model, op: OpBuilder) -> int:
    """Let late readers of cheap values read copies of these, in place; return how many."""
    graph = model.graph
    early = forward_nodes(graph)
    place = {node: i for i, node in enumerate(graph)}
    sizes, count = Sizes(other=_UNKNOWN_DIM_SIZE), 0
    fused = op.target.prefers("fuse-attention") and can_upgrade_opset(model, ATTENTION_OPSET)
    for node in nodes(graph, "Gelu", "Mul", "Softmax"):
        y = node.outputs[0]
        if node not in early or y.is_graph_output() or sizes(y) < T.REMATERIALIZE_BYTES:
            continue
        uses = list(y.uses())
        late = [use for use in uses if use.node not in early and use.node in place]
        chain = _recompute_recipe(node, early, fused=fused)
        if not late or len(late) == len(uses) or chain is None:
            continue
        if is_op(node, "Gelu") and not all(_feeds_only_matmuls(use.node, use.idx) for use in late):
            continue
        op.position = min((use.node for use in late), key=place.__getitem__)
        again = _append_copy(op, chain)
        if again is None:
            continue
        for use in late:
            use.node.replace_input_with(use.idx, again)
        count += 1
    return count


def _recompute_recipe(node: ir.Node, early: set[ir.Node], *, fused: bool) -> list[ir.Node] | None:
    """Return the nodes that make a value again from values that are kept in any case.

    Scores in 16 bits cost nothing where the forward pass need not make them.
    """
    y = node.outputs[0]
    if is_op(node, "Softmax"):
        scores = match_attention_scores(node)
        if scores is None or not (scores.is_long or (fused and scores.fits_fused_attention)):
            return None
        kept = all(_is_saved_for_backward(x, early) for x in (scores.query, scores.key))
        return list(scores.nodes) if kept else None
    if is_op(node, "Gelu"):
        by_tanh = node.attributes.get("approximate")
        if by_tanh is not None and by_tanh.as_string() != "none":
            return None  # its gradient reads the result as well
        return [node] if _is_saved_for_backward(node.inputs[0], early) else None
    large = [x for x in node.inputs if x is not None and S.same_shape(x, y)]
    factors = [x for x in node.inputs if x is not None and _is_row_scale(x, y)]
    if len(large) != 1 or len(factors) != 1 or not _is_saved_for_backward(large[0], early):
        return None
    return [node]


def _is_row_scale(x: ir.Value, y: ir.Value) -> bool:
    """Return whether a value has one number for each row of another."""
    dims, whole = S.dims_of(x), S.dims_of(y)
    if dims is None or whole is None or len(dims) != len(whole) or len(dims) < 2:
        return False
    return None not in whole and dims == (*whole[:-1], 1) and whole[-1] != 1


def _is_saved_for_backward(x: ir.Value | None, early: set[ir.Node]) -> bool:
    """Return whether the backward pass reads a value; inputs are there at any time."""
    if x is None or S.dims_of(x) is None:
        return False
    return x.producer() is None or any(use.node not in early for use in x.uses())


def _feeds_only_matmuls(node: ir.Node, index: int) -> bool:
    """Return whether nothing but products of matrices reads what a node makes of its input."""
    if is_op(node, "MatMul", "Gemm"):
        return index < 2
    if not is_op(node, *_VIEWS) or index or node.outputs[0].is_graph_output():
        return False
    return all(_feeds_only_matmuls(use.node, use.idx) for use in node.outputs[0].uses())


def _append_copy(op: OpBuilder, chain: Sequence[ir.Node]) -> ir.Value | None:
    """Append the nodes once more, on other views of what they read; return the result."""
    y = chain[-1].outputs[0]
    first, back = chain[0], _shape(S.dims_of(y))
    view = _unsqueezed_shape if is_op(first, "MatMul") else _rows
    shapes = [None if x is None else view(S.dims_of(x)) for x in first.inputs]
    if back is None or None in shapes:
        return None
    mine: dict[ir.Value, ir.Value] = {}
    for x, shape in zip(first.inputs, shapes, strict=True):
        assert x is not None
        mine[x] = op.Reshape(x, shape)
    for node in chain:
        inputs = [x if x is None else mine.get(x, x) for x in node.inputs]
        if is_op(node, "Softmax"):  # the last axis may have a new number
            again = op.Softmax(*inputs, axis=-1)
        else:
            again = copy_node(op, node, inputs)
        mine[node.outputs[0]] = again
    return op.Reshape(mine[y], back)


def _shape(dims: Dims) -> list[int] | None:
    """Return what a Reshape wants for some sizes, of which one may be open."""
    if dims is None or sum(not isinstance(d, int) for d in dims) > 1:
        return None
    return [d if isinstance(d, int) else -1 for d in dims]


def _unsqueezed_shape(dims: Dims) -> list[int] | None:
    shape = _shape(dims)
    return None if shape is None else [1, *shape]


def _rows(dims: Dims) -> list[int] | None:
    """Return the shape of a matrix of all rows, or of one such matrix if it is one already."""
    if not dims or len(dims) < 2 or not isinstance(dims[-1], int):
        return None
    return [1, -1, dims[-1]] if len(dims) == 2 else [-1, dims[-1]]


__all__ = ["rematerialize"]
