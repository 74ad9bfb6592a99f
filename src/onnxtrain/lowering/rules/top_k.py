"""The largest elements, one after the other."""

from __future__ import annotations

import numpy as np

from onnxtrain.lowering.registry import lower
from onnxtrain.lowering.value_range import may_be_infinite

_MOST = 64  # elements that are looked for one by one
_WIDEST = 1024  # the table of what is taken out has the square of this


@lower("TopK")
def top_k(op, x, k, *, axis, largest, sorted):
    """``k`` times the place of the largest, which then goes down to minus infinity.

    Of equal elements the first comes first, as TopK has it. Not for elements that may be infinite.
    """
    count, last = op.constant(k), op.rank(x) - 1
    n = op.dims(x)[axis % op.rank(x)]
    if count is None or not isinstance(n, int) or n > _WIDEST:
        return None
    count = int(count.reshape(()))
    if not 0 < count <= min(_MOST, n) or not x.dtype.is_floating_point() or may_be_infinite(x):
        return None
    left = op.move_axis(x if largest else op.Neg(x), axis % op.rank(x), last)
    out = op.const(np.where(np.eye(n, dtype=bool), -np.inf, 0.0), x.dtype)
    values, places = [], []
    for i in range(count):
        place = op.ArgMax(left, axis=last, keepdims=0)
        values.append(op.ReduceMax(left, [last], keepdims=1))
        places.append(op.Unsqueeze(place, [last]))
        if i + 1 < count:
            left = op.Add(left, op.Gather(out, place, axis=0))
    value = op.Concat(*values, axis=last) if count > 1 else values[0]
    where = op.Concat(*places, axis=last) if count > 1 else places[0]
    back = [op.move_axis(v, last, axis % op.rank(x)) for v in (value, where)]
    return (back[0] if largest else op.Neg(back[0])), back[1]
