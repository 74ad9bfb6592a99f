"""Options of :func:`onnxtrain.finetune`, declared once for the API and the command line."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onnxtrain.errors import PrepareError, argument
from onnxtrain.options import Flag, option, unchanged


def _path(value: Any) -> Any:
    """Return a path as a string; for other objects the name of their type."""
    if isinstance(value, str | os.PathLike):
        return os.fsdecode(value)
    return value if isinstance(value, float | None) else type(value).__name__


@dataclasses.dataclass(frozen=True, kw_only=True)
class FineTuneOptions:
    """Options of a fine-tuning run; see :func:`onnxtrain.finetune`."""

    kind: str | None = option(
        None,
        Flag(
            str,
            "Kind of model: causal_lm, classification, embeddings, regression, "
            "token_classification or vision. Default: detected.",
        ),
        unchanged,
    )
    method: str = option(
        "sft",
        Flag(str, "Training method of language models: sft, dpo, ipo, orpo or kto."),
        unchanged,
    )
    beta: float | None = option(
        None,
        Flag(
            float, "Weight of the reference in dpo, ipo and kto, of the odds in orpo. Default: 0.1."
        ),
        unchanged,
    )
    cache_reference: bool = option(
        False,
        Flag(
            bool,
            "Compute the reference of dpo, ipo and kto once before training, not in each step.",
        ),
        unchanged,
    )
    validation: Any = option(
        None,
        Flag(str, "Validation file, or fraction of the data such as 0.1. Default: 0.05."),
        _path,
    )
    tokenizer: Any = option(
        None, Flag(Path, "Folder of the tokenizer. Default: that of the model."), _path
    )
    lora_rank: int | None = option(
        None,
        Flag(
            int,
            "LoRA rank; 0 trains the weights themselves. Default: 8 for language models, else 0.",
        ),
        unchanged,
    )
    lora_alpha: float | None = option(
        None,
        Flag(float, "LoRA alpha: adapters are scaled by alpha / rank. Default: twice the rank."),
        unchanged,
    )
    lora_blocks: bool = option(
        False,
        Flag(bool, "Adapters that merge into quantized weights without rounding (QA-LoRA)."),
        unchanged,
    )
    targets: str | Sequence[str] = option(
        (),
        Flag(
            list[str],
            "Layers that get an adapter: attention (the default), all-linear, or names or globs; "
            "repeatable.",
        ),
        lambda value: value if isinstance(value, str) else list(value),
    )
    train: str | Sequence[str] | None = option(
        None,
        Flag(
            list[str],
            "Weights to train without adapters: bias, norm, last:2, or names or globs. "
            "Default: all; repeatable.",
        ),
        lambda value: list(value) if isinstance(value, list | tuple) else value,
    )
    epochs: int = option(3, Flag(int, "Number of training epochs."))
    batch_size: int = option(4, Flag(int, "Examples per batch."), unchanged)
    accumulate: int = option(1, Flag(int, "Gradient accumulation steps."), unchanged)
    lr: float | None = option(
        None, Flag(float, "Learning rate. Default: 2e-4 for adapters, 2e-5 for weights."), unchanged
    )
    schedule: str = option(
        "cosine", Flag(str, "Learning rate schedule: constant, linear, cosine ..."), unchanged
    )
    warmup: float = option(
        0.03, Flag(float, "Warm-up steps, or a fraction of all steps if below 1."), unchanged
    )
    optimizer: str = option("adamw", Flag(str, "Optimizer: adamw, lion ..."), unchanged)
    clip: float | None = option(1.0, Flag(float, "Maximum gradient norm."), unchanged)
    max_length: int | None = option(
        None,
        Flag(int, "Maximum tokens per example. Default: 512, or less if the model has a limit."),
        unchanged,
    )
    pack: bool = option(
        False, Flag(bool, "Pack several examples into one sequence of max-length."), unchanged
    )
    learn_prompts: bool = option(
        False, Flag(bool, "Also train on prompts, not only on answers."), unchanged
    )
    recompute: str | Sequence[str] = option(
        (),
        Flag(
            list[str],
            "Activation checkpointing: auto, or globs of scopes, nodes and block outputs; "
            "repeatable.",
        ),
    )
    prompts: Sequence[str] = option(
        (),
        Flag(
            list[str],
            "Prompt to generate a sample from, before and after training; repeatable.",
            name="prompt",
        ),
    )
    sample_tokens: int = option(40, Flag(int, "Tokens per sample; 0 for no samples."))
    requantize: bool = option(
        False,
        Flag(
            bool,
            "Merge adapters into quantized weights and quantize again. Default: keep adapters as "
            "branches.",
        ),
    )
    checkpoint_every: int = option(100, Flag(int, "Steps between checkpoints."))
    resume: bool = option(
        False, Flag(bool, "Resume from the last checkpoint in the output folder.")
    )
    seed: int = option(0, Flag(int, "Random seed for adapters, dropout and shuffling."), unchanged)
    device: str = option(
        "cpu", Flag(str, "Device: cpu, cuda, cuda:N ...; `onnxtrain devices` lists all.")
    )
    threads: int | None = option(None, Flag(int, "Number of CPU threads. Default: all cores."))
    progress: bool | str = option(True)

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "accumulate", "checkpoint_every", "max_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise PrepareError(f"{name} must be at least 1, got {value}")
        if self.method not in _METHODS:
            raise PrepareError(
                f"unknown method: {self.method!r} (expected one of {', '.join(_METHODS)})"
            )
        if self.method == "sft" and (self.beta is not None or self.cache_reference):
            raise PrepareError(
                "beta and cache_reference are options of preference tuning\n"
                f"hint: {argument('method', 'dpo')}"
            )
        if self.train is not None and self.lora_rank:
            raise PrepareError(
                "train cannot be used with adapters, which freeze the weights\n"
                "hint: lora_rank=0 (--lora-rank 0)"
            )
        if self.lora_rank is not None and self.lora_rank < 0:
            raise PrepareError(f"lora_rank must not be negative, got {self.lora_rank}")

    def completed(self, kind: str) -> FineTuneOptions:
        """Return the options with the defaults of a kind of model."""
        if self.method != "sft" and kind != "causal_lm":
            raise PrepareError(f"method {self.method!r} trains language models, not {kind}")
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


_METHODS = ("sft", "dpo", "ipo", "orpo", "kto")
_TARGET_PRESETS = ("attention", "all-linear")

__all__ = ["FineTuneOptions"]
