"""Text from a language model, token by token: for samples and demos.

A language model run token by token, with its cache or without.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import OnnxTrainError, PrepareError
from onnxtrain.graph.io import Source, load, save
from onnxtrain.runtime import session as runtime
from onnxtrain.runtime.feeds import numpy_dtype
from onnxtrain.text.data import Example, collate
from onnxtrain.text.model_folder import (
    ATTENTION_MASK,
    INPUT_IDS,
    LABELS,
    POSITION_IDS,
    SETTING_INPUTS,
    TOKEN_TYPE_IDS,
    inspect_model,
    is_past,
    past_of,
    without_cache,
)
from onnxtrain.text.tokenizer import Tokenizer
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


class UncachedDecoder:
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
        return self._run(collate([Example(ids, ids)], self._names))[0, -1]


class CachedDecoder:
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
            INPUT_IDS: np.array([new], np.int64),
            ATTENTION_MASK: np.ones((1, self._length), np.int64),
            POSITION_IDS: np.arange(before, self._length)[None],
            TOKEN_TYPE_IDS: np.zeros((1, len(new)), np.int64),
            "cache_position": np.arange(before, self._length),
        }
        for name, value in SETTING_INPUTS.items():
            made[name] = np.array(value if name != "use_cache_branch" else before > 0)
        feeds = {n: made[n] for n in self._specs if n in made}
        for name in SETTING_INPUTS:
            if name in feeds:
                feeds[name] = feeds[name].reshape([1] * len(self._specs[name].shape))
        results = runtime.run(self._session, self._outputs, {**feeds, **self._cache})
        for name, array in zip(self._outputs[1:], results[1:], strict=True):
            past = self._feeds_to[name]
            if past is not None:
                self._cache[past] = array
        return results[0][0, -1]


def make_decoder(model: Any, *, threads: int | None = None) -> Decoder:
    """Return what runs a model, its file or folder, or a trainer with the weights of the moment."""
    if isinstance(model, Trainer):
        spec = model.manifest.model("infer")
        names = [t.name for t in spec.inputs] if spec is not None else []
        if INPUT_IDS not in names:
            raise PrepareError(f"not a language model: it takes {', '.join(names)}")
        return UncachedDecoder(lambda feeds: model.predict(**feeds)["logits"], names)
    head = None
    if isinstance(model, str | os.PathLike):
        folder = inspect_model(model, "causal_lm")
        model, head = folder.path, folder.head
    loaded = load(model)
    inputs = {x.name or "" for x in loaded.graph.inputs}
    if INPUT_IDS not in inputs or "logits" not in {y.name for y in loaded.graph.outputs}:
        raise PrepareError(
            f"not a language model: it takes {', '.join(sorted(inputs))}\n"
            "hint: input_ids and an output called logits are needed"
        )
    windows = any("sliding_window_cache" in node.attributes for node in loaded.graph)
    if any(is_past(n) for n in inputs) and not windows:
        return CachedDecoder(_session(model, loaded, threads), head)
    lean = without_cache(loaded)
    session = _session(lean, lean, threads)
    names = [x.name for x in session.get_inputs()]
    return UncachedDecoder(lambda feeds: runtime.run(session, ["logits"], feeds)[0], names)


def _session(model: Any, loaded: ir.Model, threads: int | None) -> Any:
    """Return a session of a file, or of a model in memory, whose weights may lie in files."""
    if isinstance(model, str | os.PathLike):
        return runtime.create(os.fsdecode(model), threads=threads, as_shipped=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        save(loaded, path)
        return runtime.create(str(path), threads=threads, as_shipped=True)


Model = Source | Trainer
"""What text can be generated with: a file, a folder, a model, or a trainer with its weights."""


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is chosen: the likeliest one, unless ``temperature`` is above 0."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0 or not 0.0 < self.top_p <= 1.0:
            raise PrepareError(
                f"temperature must not be negative, top_p must lie in (0, 1]: "
                f"{self.temperature}, {self.top_p}"
            )

    def pick(self, logits: np.ndarray, rng: np.random.Generator) -> int:
        """Return a token by its scores."""
        if self.temperature == 0.0:
            return int(logits.argmax())
        scores = logits.astype(np.float64) / self.temperature
        chances = np.exp(scores - scores.max())
        chances /= chances.sum()
        order = np.argsort(-chances, kind="stable")
        sums = np.cumsum(chances[order])
        kept = order[: int(np.searchsorted(sums, self.top_p)) + 1]
        return int(rng.choice(kept, p=chances[kept] / chances[kept].sum()))


def generate(
    model: Model | str | os.PathLike[str],
    prompt: str | Sequence[int] | Sequence[Mapping[str, Any]],
    *,
    max_tokens: int = 64,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    tokenizer: Tokenizer | str | os.PathLike[str] | None = None,
    stop: Sequence[int] | None = None,
    threads: int | None = None,
) -> str | list[int]:
    """Return what a language model writes after a prompt; token ids if the prompt is token ids.

    The keys and values of earlier tokens are kept where the model has a cache for them, else every
    token computes the whole sequence again. For serving, take onnxruntime-genai.

    Args:
        model: an ``.onnx`` file, its folder, a model, or a :class:`Trainer`, whose weights count.
        prompt: a text, messages (``[{"role": "user", "content": ...}]``), or token ids.
        max_tokens: how many tokens to write at most.
        temperature: 0 takes the likeliest token; above, tokens are drawn.
        top_p: drawn from the likeliest tokens that together have this probability.
        seed: of the draws.
        tokenizer: or its folder; that of the model's folder if ``None``.
        stop: token ids that end the text; those of the model's folder if ``None``.
        threads: of onnxruntime's pool.

    Raises:
        PrepareError: the model does not look like a language model.
    """
    sampling = Sampling(temperature, top_p, seed)
    decoder = make_decoder(model, threads=threads)
    given_ids = not isinstance(prompt, str) and all(isinstance(t, int | np.integer) for t in prompt)
    tokens = None if given_ids else _tokenizer(model, tokenizer)
    if tokens is None:
        ids = [int(t) for t in prompt]  # pyright: ignore[reportArgumentType]
    elif isinstance(prompt, str):
        ids = tokens.encode(prompt).ids
    else:
        text = tokens.chat(prompt, answer=True)  # pyright: ignore[reportArgumentType]
        ids = tokens.encode(text, special=not tokens.has_template).ids
    ends = set(_stop_tokens(model, tokens) if stop is None else stop)
    written = generate_tokens(decoder, ids, max_tokens, sampling, ends)
    return written if tokens is None else tokens.decode(written)


def generate_tokens(
    decoder: Decoder, ids: Sequence[int], most: int, sampling: Sampling, ends: set[int]
) -> list[int]:
    """Return the tokens that follow others."""
    if not ids:
        raise PrepareError("the prompt is empty\nhint: give at least one token")
    rng = np.random.default_rng(sampling.seed)
    decoder.reset()
    written: list[int] = []
    new = list(ids)
    for _ in range(most):
        token = sampling.pick(decoder.scores(new), rng)
        if token in ends:
            break
        written.append(token)
        new = [token]
    return written


def _tokenizer(model: Any, given: Tokenizer | str | os.PathLike[str] | None) -> Tokenizer:
    if isinstance(given, Tokenizer):
        return given
    if given is not None:
        return Tokenizer(given)
    if isinstance(model, str | os.PathLike):
        return Tokenizer(inspect_model(model, "causal_lm").folder)
    raise OnnxTrainError(
        "which tokenizer? the model did not come from a folder\n"
        "hint: tokenizer='folder', or give the prompt as token ids"
    )


def _stop_tokens(model: Any, tokenizer: Tokenizer | None) -> list[int]:
    ends = (
        list(inspect_model(model, "causal_lm").eos) if isinstance(model, str | os.PathLike) else []
    )
    end = None if tokenizer is None else tokenizer.id_of("eos_token")
    return ends if end is None else [*ends, end]
