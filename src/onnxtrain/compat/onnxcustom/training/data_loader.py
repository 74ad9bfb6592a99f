"""Batches of consecutive rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from onnxtrain.compat.onnxcustom.utils.onnxruntime_helper import (
    get_ort_device,
    numpy_to_ort_value,
    ort_device_to_string,
)


class OrtDataLoader:
    """Draws batches from arrays.

    All batches have ``batch_size`` rows, or all rows if there are fewer.

    Args:
        X: features; every number of rows.
        y: one number per row, or several columns.
        sample_weight: one number per row, or nothing.
        batch_size: rows of a batch.
        device: where batches go.
        random_iter: windows at random places, drawn with replacement; else in order, where the
            last one ends with the data.
    """

    def __init__(
        self,
        X: Any,
        y: Any,
        sample_weight: Any = None,
        batch_size: int = 20,
        device: Any = "cpu",
        random_iter: bool = True,
    ) -> None:
        if len(y.shape) == 1:
            y = y.reshape((-1, 1))
        if X.shape[0] != y.shape[0]:
            raise ValueError(f"X has {X.shape[0]} rows, y has {y.shape[0]}")
        if sample_weight is not None and len(sample_weight) != len(X):
            raise ValueError(f"X has {len(X)} rows, sample_weight has {len(sample_weight)}")
        self.X_np = np.ascontiguousarray(X)
        self.y_np = np.ascontiguousarray(y)
        self.w_np = None
        if sample_weight is not None:
            self.w_np = np.ascontiguousarray(sample_weight).reshape(-1)
        self.batch_size, self.random_iter = batch_size, random_iter
        self.device = get_ort_device(device)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "device": ort_device_to_string(self.device)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.device = get_ort_device(self.device)

    def __len__(self) -> int:
        return len(self.X_np)

    def __repr__(self) -> str:
        device = ort_device_to_string(self.device)
        return f"{type(self).__name__}(..., ..., batch_size={self.batch_size!r}, device={device!r})"

    @property
    def desc(self) -> list[tuple[tuple[int, ...], np.dtype]]:
        """Shape and type of each array."""
        return [(a.shape, a.dtype) for a in self.data_np]

    @property
    def data_np(self) -> tuple[np.ndarray, ...]:
        """The arrays."""
        return tuple(a for a in (self.X_np, self.y_np, self.w_np) if a is not None)

    @property
    def data_ort(self) -> tuple[Any, ...]:
        """The arrays as values of onnxruntime."""
        return tuple(numpy_to_ort_value(a, self.device) for a in self.data_np)

    def windows(self) -> Iterator[slice]:
        """Return the rows of each batch of an epoch; random places are drawn one by one."""
        rows, size = len(self), self.batch_size
        last = rows - size
        if last <= 0 or size <= 0:
            yield slice(0, rows)
            return
        for at in range(0, rows, size):
            start = np.random.randint(0, last) if self.random_iter else min(at, last)
            yield slice(start, start + size)

    def iter_numpy(self) -> Iterator[tuple[np.ndarray, ...]]:
        """Return batches as arrays."""
        for rows in self.windows():
            yield tuple(a[rows] for a in self.data_np)

    def iter_ortvalue(self) -> Iterator[tuple[Any, ...]]:
        """Return batches as onnxruntime's C++ OrtValues."""
        for batch in self.iter_numpy():
            yield tuple(numpy_to_ort_value(a, self.device) for a in batch)

    def iter_bind(self, bind: Any, names: Sequence[str]) -> Iterator[int]:
        """Bind each batch to the inputs of a session; return its number of rows.

        Args:
            bind: the binding inside onnxruntime's ``IOBinding``.
            names: features, labels, weights if there are any, then the learning rate, which is not
                bound here.
        """
        if len(names) not in (3, 4):
            raise NotImplementedError(
                f"expected features, label, (sample weight,) learning rate, got {list(names)}"
            )
        bind = getattr(bind, "_iobinding", bind)
        for batch in self.iter_ortvalue():
            for name, value in zip(names, batch, strict=False):
                bind.bind_ortvalue_input(name, value)
            yield batch[0].shape()[0]
