"""Shapes in files that no array can have."""

from __future__ import annotations

import math
from collections.abc import Sequence

from onnxtrain.graph.io.limits import Limits

_LARGEST = (1 << 63) - 1  # bytes


def why_no_array(shape: Sequence[int], itemsize: int) -> str | None:
    """Return why there is no array of a shape, if there is none.

    >>> why_no_array([0, 2**63 - 1], 4)
    'no array has the shape [0, 9223372036854775807]'
    """
    if len(shape) > Limits().rank:
        return f"{len(shape)} dimensions, the limit is {Limits().rank}"
    # A zero does not make the other sizes possible.
    if math.prod(max(size, 1) for size in shape) * itemsize > _LARGEST:
        return f"no array has the shape {list(shape)}"
    return None
