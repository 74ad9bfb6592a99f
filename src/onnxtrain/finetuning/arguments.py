"""The options of :func:`onnxtrain.finetune`, declared once for API and command line."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onnxtrain.errors import PrepareError
from onnxtrain.options import Flag, option, unchanged


def _path(value: Any) -> Any:
    """Return what a file keeps of a path, or of data that came otherwise."""
    if isinstance(value, str | os.PathLike):
        return os.fsdecode(value)
    return value if isinstance(value, float | None) else type(value).__name__


@dataclasses.dataclass(frozen=True, kw_only=True)
class FineTuneOptions:
    """How a model is fine-tuned; the docstring of ``finetune`` tells what each option means."""

    kind: str | None = option(
        None,
        Flag(str, "causal_lm, classification, embeddings or vision; told by the files."),
        unchanged,
    )
    validation: Any = option(
        None, Flag(str, "A file to validate on, or a part of the data such as 0.1."), _path
    )
    tokenizer: Any = option(None, Flag(Path, "The tokenizer's folder; the model's own."), _path)
    lora_rank: int | None = option(
        None, Flag(int, "Rank of the adapters; 8 for language models, 0 trains weights."), unchanged
    )
    lora_alpha: float | None = option(
        None, Flag(float, "Adapters are scaled by alpha / rank; twice the rank."), unchanged
    )
    targets: str | Sequence[str] = option(
        (),
        Flag(list[str], "attention (the default), all-linear, or names or globs; repeatable."),
        lambda value: value if isinstance(value, str) else list(value),
    )
    train: str | Sequence[str] | None = option(
        None,
        Flag(list[str], "Without adapters: bias, norm, last:2, or names or globs; repeatable."),
        lambda value: list(value) if isinstance(value, list | tuple) else value,
    )
    epochs: int = option(3, Flag(int, "How often to go through the data."))
    batch_size: int = option(4, Flag(int, "Rows of a batch."), unchanged)
    accumulate: int = option(1, Flag(int, "Batches that count as one."), unchanged)
    lr: float | None = option(
        None, Flag(float, "Learning rate; 2e-4 for adapters, 2e-5 for weights."), unchanged
    )
    schedule: str = option("cosine", Flag(str, "Of the learning rate."), unchanged)
    warmup: float = option(0.03, Flag(float, "Steps, or a part of all steps."), unchanged)
    optimizer: str = option("adamw", Flag(str, "adamw, lion ..."), unchanged)
    clip: float | None = option(1.0, Flag(float, "Largest norm of the gradients."), unchanged)
    max_length: int | None = option(
        None, Flag(int, "Tokens of a row; 512, or what the model takes."), unchanged
    )
    pack: bool = option(False, Flag(bool, "Several examples in a row."), unchanged)
    learn_prompts: bool = option(False, Flag(bool, "Learn prompts, too."), unchanged)
    recompute: str | Sequence[str] = option(
        (), Flag(list[str], "auto, or globs: keep less, compute again; repeatable.")
    )
    prompts: Sequence[str] = option(
        (), Flag(list[str], "A text to go on from, before and after; repeatable.", name="prompt")
    )
    sample_tokens: int = option(40, Flag(int, "Length of these samples; 0 for none."))
    requantize: bool = option(
        False, Flag(bool, "Round adapters into quantized weights of the merged model.")
    )
    checkpoint_every: int = option(100, Flag(int, "Steps between checkpoints."))
    resume: bool = option(False, Flag(bool, "Go on from the last checkpoint in the folder."))
    seed: int = option(0, Flag(int, "Of adapters, masks and the order of the data."), unchanged)
    device: str = option("cpu", Flag(str, "cpu or cuda."))
    threads: int | None = option(None, Flag(int, "Threads to use; all cores by default."))
    progress: bool | str = option(True)

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "accumulate", "checkpoint_every", "max_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise PrepareError(f"{name} must be at least 1: {value}")
        if self.train is not None and self.lora_rank:
            raise PrepareError(
                "train chooses weights, and adapters leave them as they are\nhint: lora_rank=0"
            )
        if self.lora_rank is not None and self.lora_rank < 0:
            raise PrepareError(f"lora_rank must not be negative: {self.lora_rank}")

    def completed(self, kind: str) -> FineTuneOptions:
        """Return the options with what depends on the kind of model filled in."""
        rank = self.lora_rank
        if rank is None:
            rank = 8 if kind == "causal_lm" and self.train is None else 0
        alpha = float(2 * rank) if self.lora_alpha is None else self.lora_alpha
        lr = self.lr if self.lr is not None else (2e-4 if rank else 2e-5)
        targets = self.targets or "attention"
        if not isinstance(targets, str) and len(targets) == 1 and targets[0] in _TARGET_PRESETS:
            (targets,) = targets
        recompute = "auto" if list(self.recompute) == ["auto"] else self.recompute
        return dataclasses.replace(
            self,
            kind=kind,
            lora_rank=rank,
            lora_alpha=alpha,
            lr=lr,
            targets=targets,
            recompute=recompute,
        )


_TARGET_PRESETS = ("attention", "all-linear")

__all__ = ["FineTuneOptions"]
