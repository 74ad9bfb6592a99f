"""Batches that are too small for the statistics of BatchNormalization."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from onnxtrain.errors import ShapeError
from onnxtrain.manifest import TensorSpec


def check_batch_size(
    products: Any, specs: Sequence[TensorSpec], feeds: Mapping[str, np.ndarray]
) -> None:
    """Refuse a batch that leaves BatchNormalization one value per channel.

    Args:
        products: of sizes that have to be above 1, as the manifest's options list them.
        specs: of the batch.
        feeds: the batch.

    Raises:
        ShapeError: naming the size.
    """
    if not products:
        return
    pairs = [(s, feeds[s.name]) for s in specs if s.name in feeds]
    sizes = {d: n for s, a in pairs for d, n in zip(s.shape, a.shape, strict=True)}
    for product in products:
        names = str(product).split("*")
        if all(n in sizes for n in names) and math.prod(sizes[n] for n in names) == 1:
            raise ShapeError(
                f"{' and '.join(names)} of 1 leave BatchNormalization one value per channel; in "
                "training it needs more\n"
                "hint: another batch_size, drop_last=True if it is the last batch of an epoch, or "
                "build(mode='as-is')"
            )
