"""Mixed precision of a build, and dynamic loss scaling inside the graphs.

``bf16-mixed`` and ``fp16-mixed`` compute matmuls in 16 bits and keep parameters and everything else
in float32. float16 ends at 6e-8, so small gradients would underflow. The backward pass therefore
starts from a scale instead of one, and the update divides by it. If a gradient is not finite, the
step changes nothing but the scale, which shrinks; after enough finite steps it grows. These are the
rules of ``torch.amp.GradScaler``. bfloat16 has the range of float32 and needs no scaling.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import PrepareError
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.manifest import StateSpec
from onnxtrain.registry import unknown_name_error
from onnxtrain.targets import Target

LOSS_SCALE_OWNER = "loss_scale"
"""In the manifest, the parameter that the state of the scaler belongs to."""
SCALE, GOOD_STEPS, SKIPPED = (
    f"{LOSS_SCALE_OWNER}.scale",
    f"{LOSS_SCALE_OWNER}.good_steps",
    f"{LOSS_SCALE_OWNER}.skipped",
)
_FILE = "file"
_HALF_TYPES = {"bf16-mixed": ir.DataType.BFLOAT16, "fp16-mixed": ir.DataType.FLOAT16}
_NAMES = ("float32", *_HALF_TYPES, _FILE)
_MAX_GROWTH_INTERVAL = 1 << 24  # the counter is a float32, which is exact up to here


@dataclasses.dataclass(frozen=True)
class Precision:
    """Types that a step computes in; the other fields set the loss scaling of ``fp16-mixed``."""

    name: str = "float32"
    """``float32``, ``bf16-mixed``, ``fp16-mixed``, or ``file`` for the types of the file."""
    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    """Number of finite steps in a row after which the scale grows."""

    def __post_init__(self) -> None:
        if self.name not in _NAMES:
            raise unknown_name_error(self.name, _NAMES, "precision")
        if (
            not (self.init_scale > 0 and self.growth_factor > 1 > self.backoff_factor > 0)
            or not 0 < self.growth_interval < _MAX_GROWTH_INTERVAL
        ):
            raise PrepareError(
                f"invalid loss scaling: {self}\nhint: init_scale > 0, growth_factor > 1, "
                "0 < backoff_factor < 1, 1 <= growth_interval < 2**24"
            )

    @classmethod
    def of(cls, precision: str | Precision) -> Precision:
        """Return the precision of a name."""
        return cls(precision) if isinstance(precision, str) else precision

    @property
    def half(self) -> ir.DataType | None:
        """The 16-bit type of matrix products, if they are not float32."""
        return _HALF_TYPES.get(self.name)

    @property
    def upcasts_to_float32(self) -> bool:
        """Whether 16-bit tensors of the file train in float32."""
        return self.name != _FILE

    @property
    def scaled(self) -> bool:
        """Whether the loss is scaled."""
        return self.half == ir.DataType.FLOAT16

    def check(self, target: Target) -> None:
        """Raise PrepareError if the target cannot compute in this precision."""
        if self.half is not None and target.lacks("float16"):
            raise PrepareError(
                f"precision {self.name!r} is not supported on target {target.name!r}\n"
                "hint: precision='float32', or target cuda, cpu, wasm or portable"
            )

    def state(self) -> list[StateSpec]:
        """Return the state of the scaler: the scale and two counters."""
        initial = {SCALE: self.init_scale, GOOD_STEPS: 0.0, SKIPPED: 0.0} if self.scaled else {}
        return [
            StateSpec(name, LOSS_SCALE_OWNER, name.split(".")[1], "float32", (1,), value)
            for name, value in initial.items()
        ]

    def settings(self) -> dict[str, Any] | None:
        """Return the settings of the scaler for the manifest; ``None`` without scaling."""
        values = dataclasses.asdict(self)
        del values["name"]
        return values if self.scaled else None


class GradScaler:
    """The scaler inside a graph that updates parameters.

    Args:
        op: builder of the graph.
        precision: settings of the scaler.
        slots: state of the scaler by name, as inputs of the graph.
        gradients: gradients after unscaling.
    """

    def __init__(
        self,
        op: OpBuilder,
        precision: Precision,
        slots: Mapping[str, ir.Value],
        gradients: Mapping[str, ir.Value],
    ) -> None:
        self.op, self.precision, self.slots = op, precision, slots
        # x - x is 0 for a finite x and NaN otherwise. A sum of x itself could overflow.
        zeros = [op.ReduceSum(op.Sub(g, g), keepdims=0) for g in gradients.values()]
        zeros = [op.cast(zero, ir.DataType.FLOAT) for zero in zeros]
        total = zeros[0] if len(zeros) == 1 else op.Sum(*zeros)
        self.finite = op.Equal(total, 0.0)
        """Boolean scalar: all gradients are finite."""

    def steps_done(self, step: ir.Value) -> ir.Value:
        """Return the number of this step without the skipped ones, which Adam must not count."""
        return self.op.Sub(step, self.op.cast(self.slots[SKIPPED], step.dtype))

    def keep(self, old: Mapping[str, ir.Value], new: Mapping[str, ir.Value]) -> dict[str, ir.Value]:
        """Return the new values, or the old ones if this step is skipped."""
        return {n: self.op.Where(self.finite, v, old[n]) for n, v in new.items()}

    def new_state(self) -> dict[str, ir.Value]:
        """Return the state of the scaler after this step."""
        op, p = self.op, self.precision
        scale, good_steps, skipped = (self.slots[n] for n in (SCALE, GOOD_STEPS, SKIPPED))
        good_steps = op.Add(good_steps, 1.0)
        grows = op.GreaterOrEqual(good_steps, float(p.growth_interval))
        larger = op.Mul(scale, p.growth_factor)
        fits = op.Less(larger, float(np.finfo(np.float32).max))
        grown = op.Where(op.And(grows, fits), larger, scale)
        return {
            SCALE: op.Where(self.finite, grown, op.Mul(scale, p.backoff_factor)),
            GOOD_STEPS: op.Where(op.And(self.finite, op.Not(grows)), good_steps, 0.0),
            SKIPPED: op.Where(self.finite, skipped, op.Add(skipped, 1.0)),
        }


def to_scalar(op: OpBuilder, value: ir.Value) -> ir.Value:
    """Return the element of a tensor of shape [1] as a scalar."""
    return op.Reshape(value, op.const([]))


def unscale(
    op: OpBuilder,
    gradients: Mapping[str, ir.Value],
    scale: ir.Value,
    factor: ir.Value | None = None,
) -> dict[str, ir.Value]:
    """Return gradients times ``factor / scale``; ``factor`` is a scalar, 1 by default."""
    numerator = op.const(1.0, ir.DataType.FLOAT) if factor is None else factor
    inverse = op.Div(numerator, to_scalar(op, scale))
    return {n: op.Mul(g, op.cast(inverse, g.dtype)) for n, g in gradients.items()}
