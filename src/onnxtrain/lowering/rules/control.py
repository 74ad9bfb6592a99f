"""Control flow as data flow."""

from __future__ import annotations

from onnxtrain.graph import shapes as S
from onnxtrain.lowering.inlining import inline
from onnxtrain.lowering.registry import lower


@lower("If")
def both_branches(op, condition, *, node):
    """Both branches, and one of each pair of results.

    Only for results of one shape. What would fail in the branch that is not taken fails here too.
    """
    branches = [node.attributes[n].as_graph() for n in ("then_branch", "else_branch")]
    taken, other = (inline(op, branch, []) for branch in branches)
    scalar = condition if op.dims(condition) == () else op.Reshape(condition, [])
    selected = []
    for a, b in zip(taken, other, strict=True):
        if a.dtype != b.dtype or not S.same_shape(a, b):
            return None
        selected.append(a if a is b else op.Where(scalar, a, b))
    return selected
