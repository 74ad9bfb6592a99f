"""The options of :func:`onnxtrain.build`, declared once for API, manifest and command line."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from onnxtrain.artifacts.precision import Precision
from onnxtrain.autodiff.gradients import Names
from onnxtrain.graph.prepare.versions import OPSET
from onnxtrain.losses import LossLike, MetricLike
from onnxtrain.optim import Optimizer
from onnxtrain.optim.clip import Clip
from onnxtrain.optim.privacy import DP
from onnxtrain.options import Flag, as_it_is, option
from onnxtrain.targets import BUNDLES, TARGETS


def _clip_record(clip: float | Clip | None) -> dict[str, Any]:
    return dataclasses.asdict(Clip.of(clip))


def _precision_record(precision: str | Precision) -> str:
    return precision if isinstance(precision, str) else precision.name


NONE = "none"
"""As ``recompute``: nothing is made again, whatever the target prefers."""


def _recompute_record(recompute: str | Sequence[str]) -> str | list[str]:
    return recompute if isinstance(recompute, str) else list(recompute)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BuildRequest:
    """What ``build`` was asked for; its docstring tells what each option means."""

    loss: LossLike = option(flag=Flag(str, "cross_entropy, mse:reduction=sum, an output ..."))
    optimizer: str | Optimizer = option(
        flag=Flag(str, "adamw, sgd:momentum=0.9 ...", default="adamw")
    )
    train: Names = option(None, Flag(list[str], "Parameters to train: name or glob."))
    freeze: Names = option(None, Flag(list[str], "Parameters to leave alone."))
    mode: str = option("train", Flag(str, "train or as-is."), as_it_is)
    metrics: Sequence[MetricLike] = option(
        (), Flag(list[str], "accuracy, top_5, grad_norm ...", name="metric")
    )
    outputs: Names = option((), Flag(list[str], "Outputs to give besides the loss.", name="extra"))
    clip: float | Clip | None = option(
        None, Flag(float, "Largest norm of the gradients."), _clip_record
    )
    accumulate: int = option(1, Flag(int, "Batches per update."))
    ema: float | None = option(None, Flag(float, "Decay of a moving average of weights."), as_it_is)
    precision: str | Precision = option(
        "float32", Flag(str, "float32, bf16-mixed, fp16-mixed or file."), _precision_record
    )
    recompute: str | Sequence[str] = option(
        (),
        Flag(
            list[str],
            "Compute again to save memory: auto, none, or scopes, nodes and boundaries by glob.",
        ),
        _recompute_record,
    )
    target: str = option("cpu", Flag(str, f"One of {', '.join([*TARGETS, *BUNDLES])}."))
    dims: Mapping[str, int] | None = option(
        None,
        Flag(list[str], "Fix a size: batch=32, or by place: x[0]=1.", name="dim"),
        lambda dims: dict(dims or {}),
    )
    dp: DP | None = option(None)
    straight_through: bool = option(
        False, Flag(bool, "Train through quantisers: gradients pass inside their range."), as_it_is
    )
    randomness: str = option("portable", record=as_it_is)
    steps_per_call: int | None = option(
        None, Flag(int, "Also a step model for so many batches; 8 for small ones on wasm.")
    )
    opset: int | None = option(
        None,
        Flag(int, "Of all models, where a runtime wants an older one than 21."),
        lambda opset: OPSET if opset is None else opset,
    )
    check: bool = option(True)

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is to be made again, not even what the target would by itself."""
        return self.recompute == NONE or list(self.recompute) == [NONE]

    @property
    def blocks(self) -> str | tuple[str, ...]:
        """What is to be computed again in blocks, if anything."""
        if self.keeps_all:
            return ()
        return self.recompute if isinstance(self.recompute, str) else tuple(self.recompute)


__all__ = ["BuildRequest", "Names"]
