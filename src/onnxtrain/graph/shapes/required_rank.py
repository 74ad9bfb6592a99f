"""The rank that a value must have, by those who read it."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.nodes import is_op
from onnxtrain.graph.shapes.formulas import elements_in

_DEPTH = 64  # readers that are followed one behind the other
_SAME = frozenset(
    (
        *("Identity", "Cast", "Relu", "Sigmoid", "Tanh", "LeakyRelu", "Elu", "Selu", "Gelu"),
        *("Softmax", "LogSoftmax", "Exp", "Log", "Sqrt", "Abs", "Neg", "Clip", "Dropout"),
        *("Erf", "HardSigmoid", "HardSwish", "Softplus", "BatchNormalization", "Slice"),
        *("Split", "CumSum", "LayerNormalization", "InstanceNormalization", "Pad", "Tile"),
    )
)
_REDUCTIONS = frozenset(
    f"Reduce{name}"
    for name in ("Mean", "Sum", "Max", "Min", "Prod", "L1", "L2", "SumSquare", "LogSumExp")
)


def required_rank(value: ir.Value, declared: dict[ir.Value, int]) -> int | None:
    """Return the rank without which some reader of a value could not run; ``None`` if any will do.

    Args:
        value: what is read.
        declared: ranks that the file states for outputs of the graph.
    """
    return _required(value, declared, _DEPTH)


def _required(value: ir.Value, declared: dict[ir.Value, int], depth: int) -> int | None:
    if value in declared:
        return declared[value]
    if depth == 0:
        return None
    home = value.graph
    for node, i in value.uses():
        if node.graph is not home:
            continue  # a body may not run
        rank = _by_schema(node, i)
        if rank is None:
            rank = _through(node, i, lambda y: _required(y, declared, depth - 1))
        if rank is not None:
            return rank
    return None


def _by_schema(node: ir.Node, i: int) -> int | None:
    if is_op(node, "LSTM", "GRU", "RNN"):
        return 3 if i in (0, 1, 2, 5, 6) else None
    if is_op(node, "Conv", "ConvTranspose") and i == 0:
        w = node.inputs[1]
        return None if w is None or w.shape is None else len(w.shape)
    if is_op(node, "MaxPool", "AveragePool", "LpPool"):
        kernel = node.attributes.get("kernel_shape")
        return None if kernel is None else len(kernel.as_ints()) + 2
    if is_op(node, "Gemm") and i < 2:
        return 2
    if is_op(node, "DepthToSpace", "SpaceToDepth"):
        return 4
    if is_op(node, "Transpose"):
        perm = node.attributes.get("perm")
        return None if perm is None else len(perm.as_ints())
    if is_op(node, "Concat"):
        known = [x.shape for x in node.inputs if x is not None and x.shape is not None]
        return len(known[0]) if known else None
    return None


def _through(node: ir.Node, i: int, after: Callable[[ir.Value], int | None]) -> int | None:
    """Return the rank before a node from the one behind it."""
    if is_op(node, "Add", "Sub", "Mul", "Div") and len(node.inputs) == 2:
        other = node.inputs[1 - i]
        rank = None if other is None or other.shape is None else after(node.outputs[0])
        # What has more axes gives its rank to the result.
        wider = rank is not None and other is not None and rank > len(other.shape or ())
        return rank if wider or rank == 0 else None
    if is_op(node, "Concat"):
        return after(node.outputs[0])
    if i != 0:
        return None
    if is_op(node, *_SAME):
        return after(node.outputs[0])
    change = _change(node)
    rank = None if change is None else after(node.outputs[0])
    return None if rank is None or change is None else rank - change


def _change(node: ir.Node) -> int | None:
    """Return how many axes a node adds, ``None`` if that depends on values."""
    if is_op(node, "Unsqueeze", "Squeeze"):
        axes = elements_in(node, 1)
        return None if axes is None else len(axes) * (1 if node.op_type == "Unsqueeze" else -1)
    if is_op(node, *_REDUCTIONS):
        axes, keep = elements_in(node, 1), node.attributes.get("keepdims")
        if keep is None or keep.as_int():
            return 0
        return None if axes is None else -len(axes)
    if is_op(node, "Gather"):
        at = node.inputs[1]
        return None if at is None or at.shape is None else S.rank_of(at) - 1
    return None
