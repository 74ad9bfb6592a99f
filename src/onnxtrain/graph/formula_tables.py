"""Detect constant tables by their values: sinusoids, windows, filter banks, masks, grids.

Models contain float initializers that a formula computed and that should not be trained. Each test
looks for a pattern that training does not produce: a whole matrix of exact sinusoids, of narrow
frequency bands, of triangular filters.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

_MAX_SAMPLED_ROWS = 96  # rows and columns tested of a large matrix
_MAX_LENGTH = 2048  # elements tested of a long row
_MASK_THRESHOLD = -20.0  # added to a score: exp(-20) is zero next to the other probabilities


def detect_formula_table(array: np.ndarray, kind: str) -> str | None:
    """Return a description of the fixed table in an array; ``None`` if the array may be learned.

    Args:
        array: the values.
        kind: the parameter role that the use of the tensor suggests, such as ``"weight"``.
    """
    if array.size < 8 or (array == array.flat[0]).all():
        return None  # weights may be initialized to zeros or ones
    if not np.isfinite(array).all():
        return _is_infinite(array)
    for test, description in _TESTS.get(kind, _COMMON_TESTS):
        if test(array):
            return description
    return None


def is_mask(array: np.ndarray) -> bool:
    """Return whether an array holds only zeros and one large negative value, such as -inf."""
    values = np.unique(array if array.size <= 1 << 16 else array.reshape(-1)[: 1 << 16])
    return 0 < len(values) <= 2 and values[-1] == 0.0 and bool(values[0] <= _MASK_THRESHOLD)


def is_arange(array: np.ndarray) -> bool:
    """Return whether an array is 0, 1, 2 ..."""
    flat = array.reshape(-1)
    return flat.size >= 3 and bool(np.array_equal(flat, np.arange(flat.size)))


def _is_infinite(array: np.ndarray) -> str | None:
    return "a mask" if np.isinf(array).any() and not np.isnan(array).any() else None


def _is_identity(array: np.ndarray) -> bool:
    matrix = np.squeeze(array)
    square = matrix.ndim == 2 and matrix.shape[0] == matrix.shape[1]
    return square and bool(np.array_equal(matrix, np.eye(len(matrix))))


def _is_grid(array: np.ndarray) -> bool:
    """Return whether all values are multiples of 0.5, at least three of them distinct."""
    values = np.unique(array if array.size <= 1 << 16 else array.reshape(-1)[: 1 << 16])
    return len(values) >= 3 and bool(np.array_equal(values * 2, np.round(values * 2)))


def _is_progression(array: np.ndarray) -> bool:
    """Return whether values are ``a + b * i``."""
    flat = np.squeeze(array).astype(np.float64)
    if flat.ndim != 1 or flat[0] == flat[-1]:
        return False
    line = np.linspace(flat[0], flat[-1], flat.size)
    return bool(np.allclose(flat, line, rtol=0, atol=1e-4 * abs(flat[-1] - flat[0])))


def _is_geometric(array: np.ndarray) -> bool:
    """Return whether values are ``a * r^i``: the frequencies of rotary and Fourier embeddings."""
    flat = np.squeeze(array).astype(np.float64)
    if flat.ndim != 1 or (flat <= 0).any():
        return False
    logs, positions = np.log(flat), np.arange(flat.size)
    rate, start = np.polyfit(positions, logs, 1)
    steps = np.diff(logs)
    monotonic = (steps > 0).all() or (steps < 0).all()
    return bool(monotonic and abs(logs - rate * positions - start).max() < 0.02)


def _is_window(array: np.ndarray) -> bool:
    """Return whether values rise from near zero to one peak and fall again symmetrically."""
    flat = np.squeeze(array).astype(np.float64)
    if flat.ndim != 1 or flat.size < 16 or flat.min() < -1e-6 or flat.max() <= 0:
        return False
    symmetric = np.allclose(flat, flat[::-1], atol=1e-4 * flat.max())
    periodic = np.allclose(flat[1:], flat[:0:-1], atol=1e-4 * flat.max())
    return (symmetric or periodic) and flat[0] < 0.2 * flat.max() and _has_single_peak(flat)


def _has_single_peak(flat: np.ndarray) -> bool:
    direction = np.sign(np.diff(flat))
    direction = direction[direction != 0]
    return int((np.diff(direction) != 0).sum()) <= 1


def _are_sinusoids(array: np.ndarray) -> bool:
    """Return whether each row or column satisfies ``x[t+1] + x[t-1] = 2 cos(w) x[t]``."""
    return any(_rows_oscillate(series) for series in _sample_rows_and_columns(array))


def _rows_oscillate(series: np.ndarray) -> bool:
    inner, around = series[:, 1:-1], series[:, 2:] + series[:, :-2]
    energy = (inner**2).sum(axis=1)
    used = energy > 1e-12
    if used.sum() < 2 or series.shape[1] < 8:
        return False
    inner, around, energy = inner[used], around[used], energy[used]
    c = (inner * around).sum(axis=1) / energy
    residual = np.sqrt(((around - c[:, None] * inner) ** 2).sum(axis=1) / energy)
    return bool((residual < 1e-2).mean() > 0.95 and (c < 1.98).sum() >= 2)


def _are_bands(array: np.ndarray) -> bool:
    """Return whether rows are narrow bands at many different frequencies: bases of DFT and CQT."""
    return any(_rows_are_narrow(series) for series in _sample_rows_and_columns(array))


def _rows_are_narrow(series: np.ndarray) -> bool:
    if series.shape[1] < 32:
        return False
    power = np.abs(np.fft.rfft(series, axis=1)) ** 2
    total = power.sum(axis=1)
    used = total > 1e-12
    if used.sum() < 8:
        return False
    power = power[used] / total[used, None]
    share = np.cumsum(power, axis=1)
    low, high = (share > 0.01).argmax(axis=1), (share >= 0.99).argmax(axis=1)
    width = (high - low + 1) / power.shape[1]
    peaks = len(np.unique(power.argmax(axis=1)))
    return bool((width < 0.2).mean() > 0.85 and peaks >= len(power) // 4)


def _are_filters(array: np.ndarray) -> bool:
    """Return whether each row or column is one non-negative bump: mel filter banks."""
    matrix = np.squeeze(array)
    if matrix.ndim != 2 or min(matrix.shape) < 8 or matrix.min() < 0:
        return False
    if not 0.6 <= (matrix == 0).mean() < 1.0 or not matrix.any(axis=1).mean() > 0.2:
        return False
    return any(all(_is_bump(row) for row in m) for m in (matrix, matrix.T) if len(m) < 1024)


def _is_bump(row: np.ndarray) -> bool:
    nonzero = np.flatnonzero(row)
    if nonzero.size == 0:
        return True
    return nonzero[-1] - nonzero[0] + 1 == nonzero.size and _has_single_peak(row[nonzero])


def _is_resampler(array: np.ndarray) -> bool:
    """Return whether single-channel kernels are phases of one low-pass filter."""
    if array.ndim < 3 or array.shape[1] != 1:
        return False
    matrix = array.reshape(len(array), -1).astype(np.float64)
    if matrix.shape[1] < 8:
        return False
    if len(matrix) == 1:
        return len(matrix[0]) >= 16 and _is_symmetric_about_peak(matrix[0])
    sums = matrix.sum(axis=1)
    even = abs(sums).min() > 1e-3 and np.allclose(sums, sums[0], rtol=2e-2)
    largest = np.abs(matrix).max()
    flipped = matrix[::-1, ::-1]
    symmetric = np.allclose(matrix, flipped, atol=1e-3 * largest)
    # If phase 0 comes first, it is symmetric in itself and the other rows mirror each other.
    rest_symmetric = np.allclose(matrix[1:, 1:], flipped[:-1, :-1], atol=1e-3 * largest)
    return bool(even and (symmetric or rest_symmetric))


def _is_symmetric_about_peak(row: np.ndarray) -> bool:
    """Return whether a row is symmetric about its largest value and small at its ends."""
    top = int(np.abs(row).argmax())
    reach = min(top, row.size - 1 - top)
    left, right = row[top - reach : top][::-1], row[top + 1 : top + 1 + reach]
    near = 1e-2 * abs(row[top])
    ends = np.abs(np.concatenate([row[: top - reach], row[top + 1 + reach :]]))
    even = np.allclose(row, row[::-1], atol=1e-3 * abs(row[top]))
    return bool(even or (reach > 4 and np.allclose(left, right, atol=near) and (ends < near).all()))


def _sample_rows_and_columns(array: np.ndarray) -> list[np.ndarray]:
    """Return evenly spaced rows, and evenly spaced columns, of an array as float64 matrices."""
    squeezed = np.squeeze(array)
    if squeezed.ndim < 2:
        return []
    rows = squeezed.reshape(-1, squeezed.shape[-1])
    columns = np.moveaxis(squeezed, -2, -1).reshape(-1, squeezed.shape[-2])
    samples = []
    for series in (rows, columns):
        step = max(1, len(series) // _MAX_SAMPLED_ROWS)
        samples.append(series[::step, :_MAX_LENGTH].astype(np.float64))
    return samples


_Test = tuple[Callable[[np.ndarray], bool], str]
_COMMON_TESTS: list[_Test] = [
    (_are_sinusoids, "a table of sines and cosines"),
    (_is_progression, "evenly spaced values"),
    (_is_geometric, "a geometric progression of frequencies"),
    (_is_window, "a window function"),
    (_is_grid, "a grid of whole or half numbers"),
    (_is_identity, "an identity matrix"),
]
_MATMUL_TESTS: list[_Test] = [
    (_are_sinusoids, "a basis of sines and cosines"),
    (_are_bands, "a basis of a Fourier or constant-Q transform"),
    (_are_filters, "a bank of filters over frequencies"),
    (_is_progression, "evenly spaced values"),
    (_is_resampler, "a resampling filter"),
    (_is_window, "a window function"),
]
# By parameter role; other roles use _COMMON_TESTS. With an empty list every array may be learned.
_TESTS: dict[str, list[_Test]] = {
    "weight": _MATMUL_TESTS,
    "bias": [],
    "normalization": [],
    "recurrent weight": [],
    "slope": [],
}
