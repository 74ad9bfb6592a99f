"""Optimizers with the argument names, defaults and arithmetic of ``torch.optim``.

Each class is a chain of transforms (``transforms.py``). To add one, decorate a frozen dataclass
with ``@OPTIMIZERS.named("name")`` and return its transforms from :meth:`Optimizer.chain`; set
``elementwise = True`` if no element of a parameter affects the update of another.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import PrepareError
from onnxtrain.optim import transforms as T
from onnxtrain.optim.optimizer import OPTIMIZERS, Optimizer
from onnxtrain.optim.transforms import Slot, Transform, Update


@OPTIMIZERS.named("sgd")
@dataclasses.dataclass(frozen=True, kw_only=True)
class SGD(Optimizer):
    """Gradient descent with momentum, Nesterov momentum, dampening and weight decay."""

    elementwise = True

    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and (self.momentum <= 0 or self.dampening != 0):
            raise PrepareError("nesterov requires momentum > 0 and dampening = 0")

    def chain(self, weight_decay: float) -> tuple[Transform, ...]:
        """Add weight decay, then momentum."""
        return T.chain(
            T.add_weight_decay(weight_decay),
            T.momentum(self.momentum, self.dampening, self.nesterov),
        )


@OPTIMIZERS.named("adam")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Adam(Optimizer):
    """Adam; weight decay is added to the gradient (L2 regularization)."""

    elementwise = True

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    amsgrad: bool = False

    def chain(self, weight_decay: float) -> tuple[Transform, ...]:
        """Add weight decay, then scale by Adam."""
        return T.chain(
            T.add_weight_decay(weight_decay),
            T.scale_by_adam(*self.betas, self.eps, amsgrad=self.amsgrad),
        )


@OPTIMIZERS.named("adamw")
@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamW(Optimizer):
    """Adam with decoupled weight decay.

    ``form="torch"`` computes ``torch.optim.AdamW``. ``form="hf"`` computes AdamW as Hugging Face
    and onnxruntime-training do: eps is added before the bias correction, and the updated weights
    decay.
    """

    elementwise = True

    weight_decay: float = 1e-2
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    amsgrad: bool = False
    correct_bias: bool = True
    form: str = "torch"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.form not in ("torch", "hf"):
            raise PrepareError(f"AdamW: unknown form: {self.form!r}\nhint: 'torch' or 'hf'")

    def chain(self, weight_decay: float) -> tuple[Transform, ...]:
        """Decay the weights, then scale by Adam."""
        torch_like = self.form == "torch"
        return T.chain(
            T.decay_weights(weight_decay) if torch_like else None,
            T.scale_by_adam(
                *self.betas,
                self.eps,
                correct=self.correct_bias,
                late_eps=torch_like,
                amsgrad=self.amsgrad,
            ),
        )

    def subtract_update(self, u: Update, weight_decay: float) -> ir.Value:
        """Subtract the update; with ``form="hf"``, decay the result."""
        new = super().subtract_update(u, weight_decay)
        if self.form == "torch" or not weight_decay:
            return new
        u.parameter = new
        decay = T.decay_weights(weight_decay)
        assert decay is not None
        decay.update(u)
        return u.parameter


@OPTIMIZERS.named("lamb")
@dataclasses.dataclass(frozen=True, kw_only=True)
class LAMB(Optimizer):
    """Adam with decoupled weight decay; each update is scaled to the norm of its parameter."""

    weight_decay: float = 1e-2
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6

    def chain(self, weight_decay: float) -> tuple[Transform, ...]:
        """Scale by Adam, add weight decay, scale by the trust ratio."""
        return T.chain(
            T.scale_by_adam(*self.betas, self.eps),
            T.add_weight_decay(weight_decay),
            T.scale_by_trust_ratio(),
        )


@OPTIMIZERS.named("adagrad")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Adagrad(Optimizer):
    """Divide the gradient by the root of the sum of squared gradients."""

    elementwise = True

    lr: float = 1e-2
    lr_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10

    def chain(self, weight_decay: float) -> tuple[Transform, ...]:
        """Decay, then the scaling."""

        def update(u: Update) -> None:
            op = u.op
            total = op.Add(u.state["sum"], op.Mul(u.gradient, u.gradient))
            u.new_state["sum"] = total
            u.gradient = op.Div(u.gradient, op.Add(op.Sqrt(total), self.eps))
            if self.lr_decay:
                slower = u.scalar(
                    "lr_decay",
                    self.lr_decay,
                    lambda: op.Add(op.Mul(op.Sub(u.step, 1.0), self.lr_decay), 1.0),
                )
                u.gradient = op.Div(u.gradient, slower)

        scale = Transform(update, T.like("sum", init=self.initial_accumulator_value))
        return T.chain(T.add_weight_decay(weight_decay), scale)


@OPTIMIZERS.named("rmsprop")
@dataclasses.dataclass(frozen=True, kw_only=True)
class RMSprop(Optimizer):
    """Divide the gradient by the root of its running mean square."""

    elementwise = True

    lr: float = 1e-2
    alpha: float = 0.99
    eps: float = 1e-8
    momentum: float = 0.0
    centered: bool = False

    def chain(self, weight_decay: float) -> tuple[Transform, ...]:
        """Add weight decay, scale, add momentum."""

        def update(u: Update) -> None:
            op = u.op
            square = T.average(
                op, u.state["square_avg"], op.Mul(u.gradient, u.gradient), self.alpha
            )
            u.new_state["square_avg"] = square
            if self.centered:
                mean = T.average(op, u.state["grad_avg"], u.gradient, self.alpha)
                u.new_state["grad_avg"] = mean
                square = op.Sub(square, op.Mul(mean, mean))
            u.gradient = op.Div(u.gradient, op.Add(op.Sqrt(square), self.eps))

        names = ["square_avg", *(["grad_avg"] if self.centered else [])]
        return T.chain(
            T.add_weight_decay(weight_decay),
            Transform(update, T.like(*names)),
            T.momentum(self.momentum),
        )


@OPTIMIZERS.named("adadelta")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Adadelta(Optimizer):
    """Scale by the ratio of the running root mean squares of updates and gradients."""

    elementwise = True

    lr: float = 1.0
    rho: float = 0.9
    eps: float = 1e-6

    def chain(self, weight_decay: float) -> tuple[Transform, ...]:
        """Decay, then the scaling."""

        def update(u: Update) -> None:
            op = u.op
            square = T.average(op, u.state["square_avg"], op.Mul(u.gradient, u.gradient), self.rho)
            ratio = op.Div(
                op.Sqrt(op.Add(u.state["acc_delta"], self.eps)), op.Sqrt(op.Add(square, self.eps))
            )
            delta = op.Mul(u.gradient, ratio)
            u.new_state["square_avg"] = square
            u.new_state["acc_delta"] = T.average(
                op, u.state["acc_delta"], op.Mul(delta, delta), self.rho
            )
            u.gradient = delta

        return T.chain(
            T.add_weight_decay(weight_decay), Transform(update, T.like("square_avg", "acc_delta"))
        )


@OPTIMIZERS.named("lion")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Lion(Optimizer):
    """Step by the sign of an average of momentum and gradient, with decoupled weight decay."""

    elementwise = True

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)

    def chain(self, weight_decay: float) -> tuple[Transform, ...]:
        """Decay the weights, then take the sign."""

        def update(u: Update) -> None:
            direction = T.average(u.op, u.state["exp_avg"], u.gradient, self.betas[0])
            u.new_state["exp_avg"] = T.average(u.op, u.state["exp_avg"], u.gradient, self.betas[1])
            u.gradient = u.op.sign(direction)

        return T.chain(T.decay_weights(weight_decay), Transform(update, T.like("exp_avg")))


@OPTIMIZERS.named("adafactor")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Adafactor(Optimizer):
    """Scale like Adam, with mean squares stored as a row factor times a column factor.

    ``eps`` is (eps1, eps2) as in torch; eps1 defaults to the machine epsilon of the dtype.
    """

    lr: float = 1e-2
    beta2_decay: float = -0.8
    eps: tuple[float | None, float] = (None, 1e-3)
    d: float = 1.0

    def chain(self, weight_decay: float) -> tuple[Transform, ...]:
        """Decay the weights, then scale by the factored mean squares and the relative step."""
        return T.chain(T.decay_weights(weight_decay), Transform(self._scale, _factored_slots))

    def _scale(self, u: Update) -> None:
        op, g = u.op, u.gradient
        assert g.dtype is not None
        eps1 = self.eps[0] if self.eps[0] is not None else float(np.finfo(g.dtype.numpy()).eps)
        weight = u.scalar(
            "one_minus_beta2", self.beta2_decay, lambda: op.Pow(u.step, self.beta2_decay)
        )

        def update_average(slot: str, new: ir.Value) -> ir.Value:
            old = u.state[slot]
            u.new_state[slot] = op.Add(old, op.Mul(op.Sub(new, old), weight))
            return u.new_state[slot]

        square = op.Mul(g, g)
        if "row_var" in u.state:
            row = update_average("row_var", op.ReduceMean(square, [-1], keepdims=1))
            column = update_average("col_var", op.ReduceMean(square, [-2], keepdims=1))
            floor = op.Clip(op.ReduceMean(row, [-2], keepdims=1), op.const(eps1, g.dtype))
            variance = op.Div(op.MatMul(row, column), floor)
        else:
            variance = update_average("variance", square)
        update = op.Div(g, op.Sqrt(op.Clip(variance, op.const(eps1 * eps1, g.dtype))))
        size = math.prod(op.static(u.parameter) or ()) ** 0.5
        norm = op.Div(op.Sqrt(op.ReduceSum(op.Mul(update, update), keepdims=0)), size * self.d)
        update = op.Div(update, op.Clip(norm, op.const(1.0, g.dtype)))
        # The step is relative to the root mean square of the parameter; lr only bounds it.
        rms = op.Div(op.Sqrt(op.ReduceSum(op.Mul(u.parameter, u.parameter), keepdims=0)), size)
        relative = op.Clip(rms, op.const(self.eps[1], g.dtype))
        bound = u.scalar(
            f"adafactor/{u.lr.name}",
            0.0,
            lambda: op.Min(u.lr, op.Reciprocal(op.Sqrt(u.step))),
        )
        u.gradient = op.Mul(update, op.Mul(relative, bound))

    def subtract_update(self, u: Update, weight_decay: float) -> ir.Value:
        """Subtract the update; ``_scale`` has applied the step size."""
        return u.op.Sub(u.parameter, u.gradient)


def _factored_slots(dims: tuple[int, ...], dtype: ir.DataType) -> list[Slot]:
    if len(dims) < 2:
        return [Slot("variance", dims, dtype)]
    return [
        Slot("row_var", (*dims[:-1], 1), dtype),
        Slot("col_var", (*dims[:-2], 1, dims[-1]), dtype),
    ]
