"""The options of :func:`onnxtrain.build`: one dataclass for Python, command line and manifest.

The fields of :class:`BuildOptions` have the names and defaults of the arguments of ``build``. Each
field declares its flag on the command line, how its argument is converted, and what the manifest
records of it. :class:`Selection` names the tensors of one model that the options select.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from onnxtrain.artifacts.precision import Precision
from onnxtrain.autodiff.gradients import Names
from onnxtrain.errors import PrepareError
from onnxtrain.importer.opset import OPSET
from onnxtrain.losses import LossLike, MetricLike
from onnxtrain.optim import Optimizer
from onnxtrain.optim import resolve as resolve_optimizer
from onnxtrain.optim.optimizer import Clip
from onnxtrain.optim.privacy import DP
from onnxtrain.options import Flag, convert_fields, option, unchanged
from onnxtrain.registry import unknown_name_error
from onnxtrain.targets import BUNDLES, TARGETS, Target, find

NO_RECOMPUTE = "none"
"""As ``recompute``: store all activations, even where the target prefers to recompute some."""
GRAD_NORM = "grad_norm"
"""The metric that is computed from gradients; all others are computed from predictions."""
_MODES = ("train", "as-is")
_RANDOMNESS = ("portable", "native")


def _patterns(recompute: str | Sequence[str]) -> str | list[str]:
    return recompute if isinstance(recompute, str) else list(recompute)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """Arguments of ``build`` for a single target; its docstring explains each of them.

    Names are converted to objects: ``"adamw"`` to ``AdamW()``, ``clip=1.0`` to ``Clip(norm=1.0)``.

    Raises:
        PrepareError: if a value is out of range, or two options exclude each other.
    """

    loss: LossLike = option(
        flag=Flag(
            str,
            "cross_entropy, mse:reduction=sum, an output ... Without it, the file's training info "
            "trains.",
            default="",
        )
    )
    optimizer: Optimizer = option(
        flag=Flag(str, "adamw, sgd:momentum=0.9 ...", default="adamw"), convert=resolve_optimizer
    )
    train: Names = option(None, Flag(list[str], "Parameters to train: name or glob."))
    freeze: Names = option(None, Flag(list[str], "Parameters to freeze: name or glob."))
    mode: str = option("train", Flag(str, "train or as-is."), unchanged)
    metrics: tuple[MetricLike, ...] = option(
        (), Flag(list[str], "accuracy, top_5, grad_norm ...", name="metric"), convert=tuple
    )
    outputs: Names = option(
        (), Flag(list[str], "Model outputs to return besides the loss.", name="extra")
    )
    clip: Clip = option(
        None, Flag(float, "Maximum global norm of the gradients."), dataclasses.asdict, Clip.of
    )
    accumulate: int = option(1, Flag(int, "Gradient accumulation steps."))
    ema: float | None = option(
        None, Flag(float, "Decay of the moving average of weights."), unchanged
    )
    precision: Precision = option(
        "float32",
        Flag(str, "float32, bf16-mixed, fp16-mixed or file."),
        lambda precision: precision.name,
        Precision.of,
    )
    recompute: str | Sequence[str] = option(
        (),
        Flag(
            list[str],
            "Activation checkpointing: auto, none, or globs of scopes, nodes and block outputs.",
        ),
        _patterns,
    )
    target: Target = option(
        "cpu",
        Flag(str, f"One of {', '.join([*TARGETS, *BUNDLES])}."),
        convert=lambda target: find(target, bundles=True),
    )
    dims: Mapping[str, int | str] = option(
        None,
        Flag(list[str], "Fix a dimension: batch=32, x[0]=1; or free it: x[0]=batch.", name="dim"),
        dict,
        lambda dims: dict(dims or {}),
    )
    dp: DP | None = option(None)
    straight_through: bool = option(
        False,
        Flag(bool, "Train through quantizers: gradients pass inside their range."),
        unchanged,
    )
    randomness: str = option("portable", record=unchanged)
    steps_per_call: int | None = option(
        None, Flag(int, "Batches per call of an extra step model; 8 for small models on wasm.")
    )
    opset: int | None = option(
        None,
        Flag(int, "Opset of all models, for a runtime that needs one older than 21."),
        lambda opset: OPSET if opset is None else opset,
    )
    check: bool = option(True)

    def __post_init__(self) -> None:
        convert_fields(self)
        if self.mode not in _MODES:
            raise unknown_name_error(self.mode, _MODES, "mode")
        if self.randomness not in _RANDOMNESS:
            raise unknown_name_error(self.randomness, _RANDOMNESS, "randomness")
        if self.accumulate < 1:
            raise PrepareError(f"accumulate must be at least 1: {self.accumulate}")
        if self.ema is not None and not 0.0 < self.ema < 1.0:
            raise PrepareError(f"ema must be between 0 and 1: {self.ema}")
        self.precision.check(self.target)
        if self.dp is not None and self.accumulate > 1:
            raise PrepareError("dp= adds noise to every batch\nhint: leave accumulate at 1")
        if self.dp is not None and self.precision.half is not None:
            raise PrepareError("dp= clips in float32\nhint: leave precision at 'float32'")

    @property
    def blocks(self) -> str | tuple[str, ...]:
        """What ``recompute`` selects; empty if activations are stored."""
        if self._disables_recompute:
            return ()
        return self.recompute if isinstance(self.recompute, str) else tuple(self.recompute)

    @property
    def graph_target(self) -> Target:
        """The target, without the preferences that other options rule out."""
        target = self.target
        if self._disables_recompute:
            target = target.without("chunked-attention", "rematerialize")
        if self.opset is not None:
            # Older opsets lack the operators for sizes that depend on data.
            target = target.without("fuse-attention", "data-dependent-shapes")
        return target

    @property
    def prediction_metrics(self) -> tuple[MetricLike, ...]:
        """Metrics other than the norm of the gradients."""
        return tuple(m for m in self.metrics if m != GRAD_NORM)

    @property
    def _disables_recompute(self) -> bool:
        return self.recompute == NO_RECOMPUTE or list(self.recompute) == [NO_RECOMPUTE]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Selection:
    """Tensors of one model that a build trains or returns, by name."""

    candidates: tuple[str, ...]
    """Initializers to train, if they reach the loss."""
    explicit: bool = False
    """Whether the user named them: then each of them must reach the loss."""
    buffers: tuple[str, ...] = ()
    """Running statistics."""
    outputs: tuple[str, ...] = ()
    """Values to return besides loss and metrics."""
