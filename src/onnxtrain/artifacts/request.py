"""The options of :func:`onnxtrain.build`, declared once for API, manifest and command line.

What the graphs of a training run are made from: a request, resolved for a model.

Mixed precision of a build, and dynamic loss scaling in the graphs.

float16 reaches down to 6e-8 only, so small gradients would vanish in it. The reverse sweep
therefore starts from a scale instead of one, and the optimizer divides by it. If a gradient is not
finite, the step changes nothing but the scale, which shrinks; after enough good steps it grows: the
rules of ``torch.amp.GradScaler``. bfloat16 has the range of float32 and needs none of this.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.gradients import Names
from onnxtrain.errors import PrepareError
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.importer.opset import OPSET
from onnxtrain.losses import LossLike, MetricLike
from onnxtrain.manifest import StateSpec
from onnxtrain.optim import Optimizer
from onnxtrain.optim.optimizer import Clip
from onnxtrain.optim.privacy import DP
from onnxtrain.options import Flag, option, unchanged
from onnxtrain.targets import BUNDLES, TARGETS, Target, find

LOSS_SCALE_OWNER = "loss_scale"
SCALE, GOOD, SKIPPED = (
    f"{LOSS_SCALE_OWNER}.scale",
    f"{LOSS_SCALE_OWNER}.good_steps",
    f"{LOSS_SCALE_OWNER}.skipped",
)
_FILE = "file"
_HALF_TYPES = {"bf16-mixed": ir.DataType.BFLOAT16, "fp16-mixed": ir.DataType.FLOAT16}


@dataclasses.dataclass(frozen=True)
class Precision:
    """How a step computes; the numbers say how the loss of ``fp16-mixed`` is scaled."""

    name: str = "float32"
    """``float32``, ``bf16-mixed``, ``fp16-mixed``, or ``file`` for the types of the file."""
    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    """How many good steps in a row let the scale grow."""

    def __post_init__(self) -> None:
        names = ("float32", *_HALF_TYPES, _FILE)
        if self.name not in names:
            raise PrepareError(
                f"no such precision: {self.name!r}\nhint: {', '.join(names[:-1])} or {names[-1]}"
            )
        if (
            not (self.init_scale > 0 and self.growth_factor > 1 > self.backoff_factor > 0)
            or not 0 < self.growth_interval < 1 << 24
        ):
            raise PrepareError(
                f"no loss scale can be kept by {self}\nhint: init_scale > 0, growth_factor > 1, "
                "0 < backoff_factor < 1, growth_interval from 1 to 2**24"
            )

    @property
    def half(self) -> ir.DataType | None:
        """The type of products, if it is not float32."""
        return _HALF_TYPES.get(self.name)

    @property
    def upcasts_to_float32(self) -> bool:
        """Whether float32 takes the place of what is 16 bits wide in the file."""
        return self.name != _FILE

    @property
    def scaled(self) -> bool:
        """Whether the loss is scaled."""
        return self.half == ir.DataType.FLOAT16

    def state(self) -> list[StateSpec]:
        """Return what the scaler keeps from step to step: the scale and two counters."""
        starts = {SCALE: self.init_scale, GOOD: 0.0, SKIPPED: 0.0} if self.scaled else {}
        return [
            StateSpec(
                n, LOSS_SCALE_OWNER, n.removeprefix(f"{LOSS_SCALE_OWNER}."), "float32", (1,), start
            )
            for n, start in starts.items()
        ]

    def settings(self) -> dict[str, Any] | None:
        """Return the numbers of the scaler for the manifest, if there is one."""
        values = dataclasses.asdict(self)
        del values["name"]
        return values if self.scaled else None


def resolve_precision(precision: str | Precision, target: str | Target) -> Precision:
    """Return the precision asked for.

    Raises:
        PrepareError: if there is none of that name, or not for this target.
    """
    resolved = Precision(precision) if isinstance(precision, str) else precision
    if resolved.half is not None and find(target).lacks("float16"):
        raise PrepareError(
            f"precision {resolved.name!r} is not there for WebGPU\n"
            "hint: float32, or target cuda, cpu, wasm or portable"
        )
    return resolved


def initial_scaler_state(spec: StateSpec) -> np.ndarray:
    """Return the start of a tensor of the scaler."""
    return np.full(spec.shape, spec.init, np.float32)


class GradScaler:
    """The scaler inside a graph that updates parameters.

    Args:
        op: where nodes go.
        precision: with the scaler's numbers.
        slots: its state, by name, as inputs of the graph.
        gradients: scaled ones, already multiplied with what else there is.
    """

    def __init__(
        self,
        op: OpBuilder,
        precision: Precision,
        slots: Mapping[str, ir.Value],
        gradients: Mapping[str, ir.Value],
    ) -> None:
        self.op, self.precision, self.slots = op, precision, slots
        # x - x is zero for every finite number and NaN for all else; a plain sum could overflow.
        marks = [op.ReduceSum(op.Sub(g, g), keepdims=0) for g in gradients.values()]
        marks = [op.cast(m, ir.DataType.FLOAT) for m in marks]
        total = marks[0] if len(marks) == 1 else op.Sum(*marks)
        self.good = op.Equal(total, 0.0)
        """A scalar: all gradients are finite."""

    def steps_done(self, step: ir.Value) -> ir.Value:
        """Return the number of this step among those that were not skipped."""
        return self.op.Sub(step, self.op.cast(self.slots[SKIPPED], step.dtype))

    def keep(self, old: Mapping[str, ir.Value], new: Mapping[str, ir.Value]) -> dict[str, ir.Value]:
        """Return the new values, or the old ones if this step is skipped."""
        return {n: self.op.Where(self.good, v, old[n]) for n, v in new.items()}

    def new_state(self) -> dict[str, ir.Value]:
        """Return the scaler's state after this step."""
        op, p = self.op, self.precision
        scale, good, skipped = (self.slots[n] for n in (SCALE, GOOD, SKIPPED))
        more = op.Add(good, 1.0)
        due = op.GreaterOrEqual(more, float(p.growth_interval))
        larger = op.Mul(scale, p.growth_factor)
        fits = op.Less(larger, float(np.finfo(np.float32).max))
        grown = op.Where(op.And(due, fits), larger, scale)
        return {
            SCALE: op.Where(self.good, grown, op.Mul(scale, p.backoff_factor)),
            GOOD: op.Where(op.And(self.good, op.Not(due)), more, 0.0),
            SKIPPED: op.Where(self.good, skipped, op.Add(skipped, 1.0)),
        }


def scalar(op: OpBuilder, value: ir.Value) -> ir.Value:
    """Return the only element of a tensor of shape [1]."""
    return op.Reshape(value, op.const([]))


def unscale(
    op: OpBuilder,
    gradients: Mapping[str, ir.Value],
    scale: ir.Value,
    factor: ir.Value | None = None,
) -> dict[str, ir.Value]:
    """Return gradients divided by the loss scale, and multiplied with a scalar if there is one."""
    one = op.const(1.0, ir.DataType.FLOAT) if factor is None else factor
    inverse = op.Div(one, scalar(op, scale))
    return {n: op.Mul(g, op.cast(inverse, g.dtype)) for n, g in gradients.items()}


def _clip_record(clip: float | Clip | None) -> dict[str, Any]:
    return dataclasses.asdict(Clip.of(clip))


def _precision_record(precision: str | Precision) -> str:
    return precision if isinstance(precision, str) else precision.name


NO_RECOMPUTE = "none"
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
    mode: str = option("train", Flag(str, "train or as-is."), unchanged)
    metrics: Sequence[MetricLike] = option(
        (), Flag(list[str], "accuracy, top_5, grad_norm ...", name="metric")
    )
    outputs: Names = option((), Flag(list[str], "Outputs to give besides the loss.", name="extra"))
    clip: float | Clip | None = option(
        None, Flag(float, "Largest norm of the gradients."), _clip_record
    )
    accumulate: int = option(1, Flag(int, "Batches per update."))
    ema: float | None = option(
        None, Flag(float, "Decay of a moving average of weights."), unchanged
    )
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
        False, Flag(bool, "Train through quantisers: gradients pass inside their range."), unchanged
    )
    randomness: str = option("portable", record=unchanged)
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
    def disables_recompute(self) -> bool:
        """Whether nothing is to be made again, not even what the target would by itself."""
        return self.recompute == NO_RECOMPUTE or list(self.recompute) == [NO_RECOMPUTE]

    @property
    def blocks(self) -> str | tuple[str, ...]:
        """What is to be computed again in blocks, if anything."""
        if self.disables_recompute:
            return ()
        return self.recompute if isinstance(self.recompute, str) else tuple(self.recompute)


GRAD_NORM = "grad_norm"
"""The metric that looks at gradients."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateOptions:
    """What the update of the parameters depends on, resolved."""

    optimizer: Optimizer
    clip: Clip = dataclasses.field(default_factory=Clip)
    ema: float | None = None
    precision: Precision = dataclasses.field(default_factory=Precision)
    target: Target = TARGETS["cpu"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BuildOptions(UpdateOptions):
    """What was asked for, resolved."""

    loss: Any
    metrics: tuple[Any, ...] = ()
    outputs: tuple[str, ...] = ()
    candidates: tuple[str, ...]
    chosen_by_user: bool
    buffers: tuple[str, ...]
    mode: str
    randomness: str
    recompute: str | tuple[str, ...] = ()

    @property
    def graph_metrics(self) -> tuple[Any, ...]:
        """Metrics of predictions; the norm of the gradients is none."""
        return tuple(m for m in self.metrics if m != GRAD_NORM)
