"""Find inputs that a file accepts, by their names and by trial."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

TYPES = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(double)": np.float64,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(uint8)": np.uint8,
    "tensor(int8)": np.int8,
    "tensor(bool)": np.bool_,
}
SIZES = (6, 1, 16, 32, 48, 64, 80, 128, 224, 320, 512, 576, 1024, 4096, 16000)
"""Tried for dimensions whose names say nothing."""
WORDS = {
    "batch": 2,
    "sliding": 0,
    "past": 0,
    "total": 6,
    "audio": 32,
    "seq": 6,
    "height": 32,
    "width": 32,
    "channel": 3,
}
CAPTION, PAST = 6, 0
SOUND = ("wave", "audio", "pcm")
"""Inputs of these names are seconds of sound; short ones stop some kernels of the runtime."""
SECOND = 16000
STATES = ("state", "h", "c", "hn", "cn", "h0", "c0")
"""Inputs of these names have the batch behind the layers."""


def candidates(session: Any) -> Iterator[dict[str, np.ndarray]]:
    """Return feeds, the likeliest first."""
    names = [str(d) for x in session.get_inputs() for d in x.shape]
    windows = (32, 0) if any("sliding" in n for n in names) else (0,)
    long = any(w in x.name.lower() for x in session.get_inputs() for w in SOUND)
    unnamed = (SECOND, 4000, *SIZES) if long else SIZES
    for words, size, batch, window in itertools.product((40, 8), unnamed, (2, 1), windows):
        sizes = Sizes(size, batch, window, words, size if long else CAPTION)
        yield {x.name: array(x, sizes) for x in session.get_inputs()}


def accepted(session: Any) -> dict[str, np.ndarray] | None:
    """Return the first feeds that the file runs on and gives finite numbers for."""
    spare = None
    for feeds in candidates(session):
        try:
            outputs = session.run(None, feeds)
        except Exception:  # the runtime has no common class for inputs that it refuses
            continue
        floats = [y for y in outputs if isinstance(y, np.ndarray) and y.dtype.kind == "f"]
        if any(y.size > 1 and np.isfinite(y).all() and np.ptp(y) > 0 for y in floats):
            names = [y.name for y in session.get_outputs()]
            return with_heads(feeds, dict(zip(names, outputs, strict=True)))
        spare = spare or (feeds if floats and floats[0].size else None)
    return spare


def with_heads(feeds: dict[str, np.ndarray], outputs: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return feeds whose empty caches have the sizes of what the file gives back.

    Kernels do not look at the other sizes of a cache without tokens; a reference that appends does.
    """
    fitting = dict(feeds)
    for name, array in feeds.items():
        present = outputs.get(name.replace("past_key_values", "present"))
        if not array.size and isinstance(present, np.ndarray) and present.ndim == array.ndim:
            sizes = zip(array.shape, present.shape, strict=True)
            fitting[name] = np.zeros([a and b for a, b in sizes], array.dtype)
    return fitting


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is tried at once."""

    unnamed: int
    batch: int = 2
    window: int = 0
    words: int = 40
    length: int = CAPTION


def array(x: Any, sizes: Sizes) -> np.ndarray:
    """Return an array for an input."""
    if x.type not in TYPES:
        raise TypeError(f"{x.name}: {x.type}")
    dtype = TYPES[x.type]
    dims = [dimension(d, i, sizes) for i, d in enumerate(x.shape)]
    floats = np.issubdtype(dtype, np.floating)
    if floats and x.name.lower() in STATES and len(dims) == 3 and not isinstance(x.shape[1], int):
        dims[1] = sizes.batch
    if floats and len(dims) == 2 and "seq" in str(x.shape[1]):  # samples, not tokens
        dims[1] = sizes.unnamed
    rng = np.random.default_rng(sum(map(ord, x.name)))
    name = x.name.lower()
    if dtype == np.bool_:
        return np.ones(dims, bool)
    if np.issubdtype(dtype, np.integer):
        return integers(name, dims, rng, sizes).astype(dtype)
    return rng.standard_normal(dims).astype(dtype)


def integers(name: str, dims: list[int], rng: np.random.Generator, sizes: Sizes) -> np.ndarray:
    """Return whole numbers that fit a name."""
    if "mask" in name or "use_cache" in name:
        return np.ones(dims, np.int64)
    if "position" in name:
        return np.broadcast_to(np.arange(dims[-1] if dims else 1), dims).copy()
    if name == "sr" or "sample_rate" in name:
        return np.full(dims, 16000)
    if "length" in name or "len" in name or not dims:
        return np.full(dims, sizes.length)
    if "type" in name or "segment" in name or "bbox" in name:
        return np.zeros(dims, np.int64)
    return rng.integers(3, sizes.words, dims)


def dimension(d: Any, axis: int, sizes: Sizes) -> int:
    """Return a size for a dimension: fixed, inferred from its name, or the one to try."""
    if isinstance(d, int) and d > 0:
        return d
    word = str(d or "").lower()
    if "past" in word and ("+" in word or "total" in word):
        return CAPTION
    known = {**WORDS, "batch": sizes.batch, "sliding": sizes.window}
    for key, value in known.items():
        if key in word:
            return value
    return sizes.batch if axis == 0 else sizes.unnamed
