"""Generate text with a language model, with or without its KV cache.

For samples and demos: one sequence, greedy or sampled. onnxruntime-genai is for serving.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from onnxtrain.errors import OnnxTrainError, PrepareError
from onnxtrain.graph.io import CheckedModel, Source, load
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
    ModelFolder,
    inspect_model,
    is_past,
    past_of,
    without_cache,
)
from onnxtrain.text.tokenizer import Tokenizer
from onnxtrain.training import Trainer

Model = Source | Trainer
"""Models that generate text: a file, a folder, a model, or a trainer with its weights."""
_TYPES = {"tensor(float)": "float32", "tensor(float16)": "float16", "tensor(double)": "float64"}


class Decoder(Protocol):
    """A language model with the tokens of one sequence."""

    def reset(self) -> None:
        """Start a new sequence."""
        ...

    def next_logits(self, new: Sequence[int]) -> np.ndarray:
        """Append tokens to the sequence and return the logits of the next one."""
        ...


class UncachedDecoder:
    """A decoder that runs the whole sequence for each token."""

    def __init__(self, run: Callable[[dict[str, np.ndarray]], np.ndarray], names: Sequence[str]):
        self._run, self._names = run, [n for n in names if n != LABELS]
        self._ids: list[int] = []

    def reset(self) -> None:
        """Start a new sequence."""
        self._ids = []

    def next_logits(self, new: Sequence[int]) -> np.ndarray:
        """Append tokens to the sequence and return the logits of the next one."""
        self._ids += new
        ids = np.array(self._ids, np.int64)
        return self._run(collate([Example(ids, ids)], self._names))[0, -1]


class CachedDecoder:
    """A decoder that feeds keys and values of earlier tokens back to the model."""

    def __init__(self, session: Any, head_size: int | None) -> None:
        self._session = session
        self._specs = {x.name: x for x in session.get_inputs()}
        self._past = [n for n in self._specs if is_past(n)]
        outputs = [y.name for y in session.get_outputs()]
        self._past_of = {y: past_of(y, self._past) for y in outputs}
        self._outputs = ["logits", *(y for y, x in self._past_of.items() if x is not None)]
        self._head_size = head_size
        self.reset()

    def reset(self) -> None:
        """Start a new sequence."""
        self._length = 0
        self._cache = {name: self._empty_cache(self._specs[name]) for name in self._past}

    def _empty_cache(self, spec: Any) -> np.ndarray:
        """Return a cache of no tokens: ``[batch, heads, 0, head_size]``."""
        defaults = {0: 1, 2: 0, len(spec.shape) - 1: self._head_size}
        sizes = [defaults.get(i) if not isinstance(d, int) else d for i, d in enumerate(spec.shape)]
        shape = [s for s in sizes if s is not None]
        if len(shape) < len(sizes):
            raise PrepareError(
                f"the cache {spec.name!r} has symbolic sizes: {spec.shape}\n"
                "hint: set head_size in genai_config.json"
            )
        return np.zeros(shape, numpy_dtype(_TYPES[spec.type]))

    def next_logits(self, new: Sequence[int]) -> np.ndarray:
        """Append tokens to the sequence and return the logits of the next one."""
        before, self._length = self._length, self._length + len(new)
        arrays = {
            INPUT_IDS: np.array([new], np.int64),
            ATTENTION_MASK: np.ones((1, self._length), np.int64),
            POSITION_IDS: np.arange(before, self._length)[None],
            TOKEN_TYPE_IDS: np.zeros((1, len(new)), np.int64),
            "cache_position": np.arange(before, self._length),
        }
        for name, value in SETTING_INPUTS.items():
            arrays[name] = np.array(value if name != "use_cache_branch" else before > 0)
        feeds = {n: arrays[n] for n in self._specs if n in arrays}
        for name in SETTING_INPUTS:
            if name in feeds:
                feeds[name] = feeds[name].reshape([1] * len(self._specs[name].shape))
        results = runtime.run(self._session, self._outputs, {**feeds, **self._cache})
        for name, array in zip(self._outputs[1:], results[1:], strict=True):
            past = self._past_of[name]
            if past is not None:
                self._cache[past] = array
        return results[0][0, -1]


def make_decoder(
    model: Model | ModelFolder | str | os.PathLike[str], *, threads: int | None = None
) -> Decoder:
    """Return a decoder for a model, a file or folder, or the current weights of a trainer."""
    if isinstance(model, Trainer):
        spec = model.manifest.model("infer")
        names = [t.name for t in spec.inputs] if spec is not None else []
        if INPUT_IDS not in names:
            raise PrepareError(
                f"not a language model: its inputs are {', '.join(names)}\n"
                "hint: generate needs the input input_ids and the output logits"
            )
        return UncachedDecoder(lambda feeds: model.predict(**feeds)["logits"], names)
    if isinstance(model, str | os.PathLike):
        model = inspect_model(model, "causal_lm")
    path, head_size = None, None
    if isinstance(model, ModelFolder):
        path, head_size, model = model.path, model.head_size, model.model
    loaded = model.model if isinstance(model, CheckedModel) else load(model)
    inputs = {x.name or "" for x in loaded.graph.inputs}
    if INPUT_IDS not in inputs or "logits" not in {y.name for y in loaded.graph.outputs}:
        raise PrepareError(
            f"not a language model: its inputs are {', '.join(sorted(inputs))}\n"
            "hint: generate needs the input input_ids and the output logits"
        )
    # A sliding-window cache has a fixed length and drops old tokens; CachedDecoder grows its cache.
    sliding = any("sliding_window_cache" in node.attributes for node in loaded.graph)
    if any(is_past(n) for n in inputs) and not sliding:
        if path is None:
            session = runtime.create_for(loaded, threads=threads)
        else:
            session = runtime.create(str(path), threads=threads, as_shipped=True)
        return CachedDecoder(session, head_size)
    session = runtime.create_for(without_cache(CheckedModel(loaded)), threads=threads)
    names = [x.name for x in session.get_inputs()]
    return UncachedDecoder(lambda feeds: runtime.run(session, ["logits"], feeds)[0], names)


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Sampling parameters; a temperature of 0 is greedy decoding."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise PrepareError(f"temperature must not be negative, got {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise PrepareError(f"top_p must be in (0, 1], got {self.top_p}")

    def sample(self, logits: np.ndarray, rng: np.random.Generator) -> int:
        """Return a token drawn from the logits."""
        if self.temperature == 0.0:
            return int(logits.argmax())
        scaled = logits.astype(np.float64) / self.temperature
        probabilities = np.exp(scaled - scaled.max())
        probabilities /= probabilities.sum()
        order = np.argsort(-probabilities, kind="stable")
        cumulative = np.cumsum(probabilities[order])
        nucleus = order[: int(np.searchsorted(cumulative, self.top_p)) + 1]
        weights = probabilities[nucleus]
        return int(rng.choice(nucleus, p=weights / weights.sum()))


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
    """Generate text with a language model.

    Uses the model's KV cache if it has one; otherwise each token runs the whole sequence. Use
    onnxruntime-genai for serving.

    Args:
        model: an ``.onnx`` file, its folder, a model, or a :class:`Trainer` (its current weights).
        prompt: a text, messages (``[{"role": "user", "content": ...}]``), or token ids.
        max_tokens: maximum number of new tokens.
        temperature: sampling temperature; 0 is greedy decoding.
        top_p: sample from the smallest set of most likely tokens with this total probability.
        seed: random seed for sampling.
        tokenizer: a tokenizer or its folder. Default: the tokenizer in the model's folder.
        stop: token ids that end the generation. Default: the model's end-of-sequence tokens.
        threads: number of threads for onnxruntime.

    Returns:
        The new text without the prompt; token ids if the prompt is token ids.

    Raises:
        PrepareError: if the model is not a language model.
    """
    sampling = Sampling(temperature, top_p, seed)
    folder = inspect_model(model, "causal_lm") if isinstance(model, str | os.PathLike) else None
    decoder = make_decoder(model if folder is None else folder, threads=threads)
    is_ids = not isinstance(prompt, str) and all(isinstance(t, int | np.integer) for t in prompt)
    resolved = None if is_ids else _resolve_tokenizer(folder, tokenizer)
    if resolved is None:
        ids = [int(t) for t in prompt]  # pyright: ignore[reportArgumentType]
    elif isinstance(prompt, str):
        ids = resolved.encode(prompt).ids
    else:
        text = resolved.chat(prompt, answer=True)  # pyright: ignore[reportArgumentType]
        ids = resolved.encode(text, special=not resolved.has_template).ids
    stop_ids = set(_eos_token_ids(folder, resolved) if stop is None else stop)
    new_ids = generate_tokens(decoder, ids, max_tokens, sampling, stop_ids)
    return new_ids if resolved is None else resolved.decode(new_ids)


def generate_tokens(
    decoder: Decoder, ids: Sequence[int], max_tokens: int, sampling: Sampling, stop: set[int]
) -> list[int]:
    """Return the tokens that a decoder generates after a prompt, without the stop token."""
    if not ids:
        raise PrepareError("the prompt is empty\nhint: pass at least one token")
    rng = np.random.default_rng(sampling.seed)
    decoder.reset()
    generated: list[int] = []
    new = list(ids)
    for _ in range(max_tokens):
        token = sampling.sample(decoder.next_logits(new), rng)
        if token in stop:
            break
        generated.append(token)
        new = [token]
    return generated


def _resolve_tokenizer(
    folder: ModelFolder | None, tokenizer: Tokenizer | str | os.PathLike[str] | None
) -> Tokenizer:
    if isinstance(tokenizer, Tokenizer):
        return tokenizer
    if tokenizer is not None:
        return Tokenizer(tokenizer)
    if folder is not None:
        return Tokenizer(folder.folder)
    raise OnnxTrainError(
        "a text prompt requires a tokenizer: the model was not loaded from a folder\n"
        "hint: tokenizer='folder', or pass the prompt as token ids"
    )


def _eos_token_ids(folder: ModelFolder | None, tokenizer: Tokenizer | None) -> list[int]:
    ids = [] if folder is None else list(folder.eos_token_ids)
    own = None if tokenizer is None else tokenizer.id_of("eos_token")
    return ids if own is None else [*ids, own]
