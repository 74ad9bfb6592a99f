"""Text from a language model, token by token: for samples and demos."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from onnxtrain.errors import OnnxTrainError, PrepareError
from onnxtrain.graph.io import Source
from onnxtrain.text.feeds import Decoder, decoder_of
from onnxtrain.text.folder import look_at
from onnxtrain.text.tokenizer import Tokenizer
from onnxtrain.training import Trainer

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
    decoder = decoder_of(model, threads=threads)
    given_ids = not isinstance(prompt, str) and all(isinstance(t, int | np.integer) for t in prompt)
    tokens = None if given_ids else _tokenizer(model, tokenizer)
    if tokens is None:
        ids = [int(t) for t in prompt]  # pyright: ignore[reportArgumentType]
    elif isinstance(prompt, str):
        ids = tokens.encode(prompt).ids
    else:
        text = tokens.chat(prompt, answer=True)  # pyright: ignore[reportArgumentType]
        ids = tokens.encode(text, special=not tokens.has_template).ids
    ends = set(_stops(model, tokens) if stop is None else stop)
    written = continued(decoder, ids, max_tokens, sampling, ends)
    return written if tokens is None else tokens.decode(written)


def continued(
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
        return Tokenizer(look_at(model, "causal_lm").folder)
    raise OnnxTrainError(
        "which tokenizer? the model did not come from a folder\n"
        "hint: tokenizer='folder', or give the prompt as token ids"
    )


def _stops(model: Any, tokenizer: Tokenizer | None) -> list[int]:
    ends = list(look_at(model, "causal_lm").eos) if isinstance(model, str | os.PathLike) else []
    end = None if tokenizer is None else tokenizer.id_of("eos_token")
    return ends if end is None else [*ends, end]


__all__ = ["Sampling", "continued", "generate"]
