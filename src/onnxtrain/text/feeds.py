"""A language model run token by token, with its cache or without."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import PrepareError
from onnxtrain.graph.io import load, save
from onnxtrain.runtime import session as runtime
from onnxtrain.runtime.feeds import numpy_dtype
from onnxtrain.text.batches import inputs_for
from onnxtrain.text.examples import Example
from onnxtrain.text.folder import look_at
from onnxtrain.text.names import IDS, LABELS, MASK, POSITIONS, SWITCHES, TYPES, is_past, past_of
from onnxtrain.text.without_cache import without_cache
from onnxtrain.training import Trainer

_TYPES = {"tensor(float)": "float32", "tensor(float16)": "float16", "tensor(double)": "float64"}


class Decoder(Protocol):
    """What gives the scores of the next token."""

    def reset(self) -> None:
        """Forget all tokens."""
        ...

    def scores(self, new: Sequence[int]) -> np.ndarray:
        """Return the scores of the token after those so far and some new ones."""
        ...


class Whole:
    """Computes the whole sequence again for each token."""

    def __init__(self, run: Callable[[dict[str, np.ndarray]], np.ndarray], names: Sequence[str]):
        self._run, self._names = run, [n for n in names if n != LABELS]
        self._ids: list[int] = []

    def reset(self) -> None:
        """Forget all tokens."""
        self._ids = []

    def scores(self, new: Sequence[int]) -> np.ndarray:
        """Return the scores of the next token."""
        self._ids += new
        ids = np.array(self._ids, np.int64)
        return self._run(inputs_for([Example(ids, ids)], self._names))[0, -1]


class Cached:
    """Keeps keys and values of earlier tokens."""

    def __init__(self, session: Any, head: int | None) -> None:
        self._session = session
        self._specs = {x.name: x for x in session.get_inputs()}
        self._past = [n for n in self._specs if is_past(n)]
        outputs = [y.name for y in session.get_outputs()]
        self._feeds_to = {y: past_of(y, self._past) for y in outputs}
        self._outputs = ["logits", *(y for y, x in self._feeds_to.items() if x is not None)]
        self._head = head
        self.reset()

    def reset(self) -> None:
        """Forget all tokens."""
        self._length = 0
        self._cache = {name: self._empty(self._specs[name]) for name in self._past}

    def _empty(self, spec: Any) -> np.ndarray:
        usual = {0: 1, 2: 0, len(spec.shape) - 1: self._head}
        sizes = [usual.get(i) if not isinstance(d, int) else d for i, d in enumerate(spec.shape)]
        shape = [s for s in sizes if s is not None]
        if len(shape) < len(sizes):
            raise PrepareError(
                f"the cache {spec.name!r} has the shape {spec.shape}\n"
                "hint: head_size in genai_config.json would tell it"
            )
        return np.zeros(shape, numpy_dtype(_TYPES[spec.type]))

    def scores(self, new: Sequence[int]) -> np.ndarray:
        """Return the scores of the next token."""
        before, self._length = self._length, self._length + len(new)
        made = {
            IDS: np.array([new], np.int64),
            MASK: np.ones((1, self._length), np.int64),
            POSITIONS: np.arange(before, self._length)[None],
            TYPES: np.zeros((1, len(new)), np.int64),
            "cache_position": np.arange(before, self._length),
        }
        for name, value in SWITCHES.items():
            made[name] = np.array(value if name != "use_cache_branch" else before > 0)
        feeds = {n: made[n] for n in self._specs if n in made}
        for name in SWITCHES:
            if name in feeds:
                feeds[name] = feeds[name].reshape([1] * len(self._specs[name].shape))
        results = runtime.run(self._session, self._outputs, {**feeds, **self._cache})
        for name, array in zip(self._outputs[1:], results[1:], strict=True):
            past = self._feeds_to[name]
            if past is not None:
                self._cache[past] = array
        return results[0][0, -1]


def decoder_of(model: Any, *, threads: int | None = None) -> Decoder:
    """Return what runs a model, its file or folder, or a trainer with the weights of the moment."""
    if isinstance(model, Trainer):
        spec = model.manifest.model("infer")
        names = [t.name for t in spec.inputs] if spec is not None else []
        if IDS not in names:
            raise PrepareError(f"not a language model: it takes {', '.join(names)}")
        return Whole(lambda feeds: model.predict(**feeds)["logits"], names)
    head = None
    if isinstance(model, str | os.PathLike):
        folder = look_at(model, "causal_lm")
        model, head = folder.path, folder.head
    loaded = load(model)
    inputs = {x.name or "" for x in loaded.graph.inputs}
    if IDS not in inputs or "logits" not in {y.name for y in loaded.graph.outputs}:
        raise PrepareError(
            f"not a language model: it takes {', '.join(sorted(inputs))}\n"
            "hint: input_ids and an output called logits are needed"
        )
    windows = any("sliding_window_cache" in node.attributes for node in loaded.graph)
    if any(is_past(n) for n in inputs) and not windows:
        return Cached(_session(model, loaded, threads), head)
    lean = without_cache(loaded)
    session = _session(lean, lean, threads)
    names = [x.name for x in session.get_inputs()]
    return Whole(lambda feeds: runtime.run(session, ["logits"], feeds)[0], names)


def _session(model: Any, loaded: ir.Model, threads: int | None) -> Any:
    """Return a session of a file, or of a model in memory, whose weights may lie in files."""
    if isinstance(model, str | os.PathLike):
        return runtime.create(os.fsdecode(model), threads=threads, as_shipped=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        save(loaded, path)
        return runtime.create(str(path), threads=threads, as_shipped=True)


__all__ = ["Cached", "Decoder", "Whole", "decoder_of"]
