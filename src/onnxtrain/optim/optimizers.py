"""Optimizers with the argument names, defaults and arithmetic of ``torch.optim``.

Each class is a chain of transforms (``transforms.py``). To add one, decorate a frozen dataclass
with ``@OPTIMIZERS.named("name")`` and return its transforms from :meth:`Optimizer.chain`; set
``elementwise = True`` if no element of a parameter affects the update of another.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Sequence

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


@OPTIMIZERS.named("nadam")
@dataclasses.dataclass(frozen=True, kw_only=True)
class NAdam(Optimizer):
    """Adam with Nesterov momentum, whose factor grows with the steps."""

    lr: float = 2e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    momentum_decay: float = 4e-3
    decoupled_weight_decay: bool = False

    def chain(self, weight_decay: float) -> tuple[Transform, ...]:
        """Add weight decay, then scale by Nesterov Adam."""
        decay = T.decay_weights if self.decoupled_weight_decay else T.add_weight_decay
        return T.chain(decay(weight_decay), Transform(self._scale, _nadam_slots))

    def _scale(self, u: Update) -> None:
        op, (beta1, beta2) = u.op, self.betas
        m, v = T.adam_averages(u, beta1, beta2)

        def mu(ahead: int) -> ir.Value:
            """Return the momentum factor of this step, or of the next."""
            decay = self.momentum_decay * math.log(0.96)
            power = op.Exp(op.Mul(op.Add(u.step, float(ahead)), decay))
            return op.Mul(op.Sub(1.0, op.Mul(power, 0.5)), beta1)

        now = u.scalar("nadam/mu", self.momentum_decay, lambda: mu(0))
        ahead = u.scalar("nadam/mu_next", self.momentum_decay, lambda: mu(1))
        product = op.Mul(u.state["mu_product"], now)
        u.new_state["mu_product"] = product
        weight_g = op.Div(op.Sub(1.0, now), op.Sub(1.0, product))
        weight_m = op.Div(ahead, op.Sub(1.0, op.Mul(product, ahead)))
        root = op.Sqrt(op.Div(v, T.one_minus_power(u, beta2)))
        update = op.Add(op.Mul(u.gradient, weight_g), op.Mul(m, weight_m))
        u.gradient = op.Div(update, op.Add(root, self.eps))


def _nadam_slots(dims: tuple[int, ...], dtype: ir.DataType) -> list[Slot]:
    return [*T.like("exp_avg", "exp_avg_sq")(dims, dtype), Slot("mu_product", (), dtype, 1.0)]


@OPTIMIZERS.named("radam")
@dataclasses.dataclass(frozen=True, kw_only=True)
class RAdam(Optimizer):
    """Adam that divides by the mean square only once its variance is bounded."""

    elementwise = True

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    decoupled_weight_decay: bool = False

    def chain(self, weight_decay: float) -> tuple[Transform, ...]:
        """Add weight decay, then scale by rectified Adam."""
        decay = T.decay_weights if self.decoupled_weight_decay else T.add_weight_decay
        return T.chain(decay(weight_decay), Transform(self._scale, T.like("exp_avg", "exp_avg_sq")))

    def _scale(self, u: Update) -> None:
        op, (beta1, beta2) = u.op, self.betas
        m, v = T.adam_averages(u, beta1, beta2)
        mean = op.Div(m, T.one_minus_power(u, beta1))
        limit = (1.0 + beta2) / (1.0 - beta2)
        if limit <= 5.0:  # the variance is never bounded
            u.gradient = mean
            return
        rho = u.scalar("radam/rho", beta2, lambda: _sma_length(u, beta2))
        rectified = u.scalar("radam/rectified", beta2, lambda: op.Greater(rho, 5.0))

        def factor() -> ir.Value:
            """Return the rectification term times the root of the bias correction."""
            scale = limit / ((limit - 4.0) * (limit - 2.0))
            excess = op.Mul(op.Sub(rho, 4.0), op.Sub(rho, 2.0))
            square = op.Div(op.Mul(excess, scale), rho)
            root = op.Sqrt(op.Where(rectified, square, 1.0))
            return op.Mul(root, op.Sqrt(T.one_minus_power(u, beta2)))

        adaptive = op.Div(u.scalar("radam/factor", beta2, factor), op.Add(op.Sqrt(v), self.eps))
        u.gradient = op.Mul(mean, op.Where(rectified, adaptive, 1.0))


def _sma_length(u: Update, beta2: float) -> ir.Value:
    """Return RAdam's ``rho = (1 + b) / (1 - b) - 2 t b^t / (1 - b^t)`` for ``b = beta2``.

    Both terms are near 2,000 in the first steps. With ``x = -t ln(b)``, ``rho`` is a constant plus
    ``-2 / ln(b) * (1 - x / (exp(x) - 1))``, and below 1 the bracket is a series.
    """
    op, rate = u.op, -math.log(beta2)
    x = op.Mul(u.step, rate)
    square = op.Mul(x, x)
    series = op.const(-1.0 / 1209600, x.dtype)
    for coefficient in (1.0 / 30240, -1.0 / 720, 1.0 / 12):
        series = op.Add(op.Mul(series, square), -coefficient)
    series = op.Add(op.Mul(series, square), op.Mul(x, 0.5))
    direct = op.Sub(1.0, op.Div(x, op.Sub(op.Exp(x), 1.0)))
    bracket = op.Where(op.Less(x, 1.0), series, direct)
    constant = (1.0 + beta2) / (1.0 - beta2) - 2.0 / rate
    return op.Add(op.Mul(bracket, 2.0 / rate), constant)


@OPTIMIZERS.named("adamax")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Adamax(Optimizer):
    """Divide the running mean of gradients by the decayed maximum of their absolute values."""

    elementwise = True

    lr: float = 2e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def chain(self, weight_decay: float) -> tuple[Transform, ...]:
        """Add weight decay, then scale."""

        def update(u: Update) -> None:
            op, (beta1, beta2) = u.op, self.betas
            m = T.average(op, u.state["exp_avg"], u.gradient, beta1)
            largest = op.Max(
                op.Mul(u.state["exp_inf"], beta2), op.Add(op.Abs(u.gradient), self.eps)
            )
            u.new_state.update(exp_avg=m, exp_inf=largest)
            u.gradient = op.Div(m, largest)
            u.factor = u.scalar("adamax", beta1, lambda: op.Reciprocal(T.one_minus_power(u, beta1)))

        return T.chain(
            T.add_weight_decay(weight_decay), Transform(update, T.like("exp_avg", "exp_inf"))
        )


@OPTIMIZERS.named("asgd")
@dataclasses.dataclass(frozen=True, kw_only=True)
class ASGD(Optimizer):
    """Gradient descent with a decaying step; the slot ``ax`` averages parameters from step t0.

    Step t has the size ``lr / (1 + lambd * lr * (t - 1))^alpha``.
    """

    elementwise = True

    lr: float = 1e-2
    lambd: float = 1e-4
    alpha: float = 0.75
    t0: float = 1e6

    def chain(self, weight_decay: float) -> tuple[Transform, ...]:
        """Add weight decay and scale the step; :meth:`subtract_update` averages."""

        def update(u: Update) -> None:
            op = u.op

            def rate() -> ir.Value:
                decay = op.Mul(op.Mul(op.Sub(u.step, 1.0), u.lr), self.lambd)
                return op.Div(u.lr, op.Pow(op.Add(decay, 1.0), self.alpha))

            u.lr = u.scalar(f"asgd/{u.lr.name}", self.lambd, rate)
            decay = T.decay_weights(self.lambd)
            if decay is not None:
                decay.update(u)

        return T.chain(T.add_weight_decay(weight_decay), Transform(update, T.like("ax")))

    def subtract_update(self, u: Update, weight_decay: float) -> ir.Value:
        """Subtract the update and average the result."""
        op, new = u.op, super().subtract_update(u, weight_decay)

        def weight() -> ir.Value:
            return op.Reciprocal(op.Max(op.Sub(u.step, 1.0 + self.t0), 1.0))

        old = u.state["ax"]
        part = u.scalar("asgd/mu", self.t0, weight)
        u.new_state["ax"] = op.Add(old, op.Mul(op.Sub(new, old), part))
        return new


@OPTIMIZERS.named("rprop")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Rprop(Optimizer):
    """Step by the sign of the gradient; each element has a step size of its own.

    ``lr`` is the step size that all elements start with; schedules do not change it. For batches
    that hold the whole data set.
    """

    elementwise = True

    lr: float = 1e-2
    etas: tuple[float, float] = (0.5, 1.2)
    step_sizes: tuple[float, float] = (1e-6, 50.0)

    def chain(self, weight_decay: float) -> tuple[Transform, ...]:
        """Grow the step sizes where the sign stays, and shrink them where it changes."""

        def update(u: Update) -> None:
            op, (shrink, grow) = u.op, self.etas
            same = op.Mul(u.gradient, u.state["prev"])
            changed = op.Less(same, 0.0)
            factor = op.Where(changed, shrink, op.Where(op.Greater(same, 0.0), grow, 1.0))
            size = op.Clip(op.Mul(u.state["step_size"], factor), *self.step_sizes)
            gradient = op.Where(changed, 0.0, u.gradient)
            u.new_state.update(prev=gradient, step_size=size)
            u.gradient = op.Mul(op.sign(gradient), size)

        def slots(dims: tuple[int, ...], dtype: ir.DataType) -> list[Slot]:
            return [Slot("prev", dims, dtype), Slot("step_size", dims, dtype, self.lr)]

        return T.chain(T.add_weight_decay(weight_decay), Transform(update, slots))

    def subtract_update(self, u: Update, weight_decay: float) -> ir.Value:
        """Subtract the update, which has the step sizes."""
        return u.op.Sub(u.parameter, u.gradient)


@OPTIMIZERS.named("muon")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Muon(Optimizer):
    """Orthogonalize the momentum of matrices; all other parameters follow AdamW.

    Newton-Schulz iterations compute the orthogonalization, in the dtype of the parameter (torch's
    Muon computes them in bfloat16). ``adamw`` names matrices that follow AdamW as well: embeddings
    and the output layer usually do. With ``adjust_lr_fn="match_rms_adamw"`` one ``lr`` suits both.
    """

    weight_decay: float = 0.1
    momentum: float = 0.95
    nesterov: bool = True
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315)
    eps: float = 1e-7
    ns_steps: int = 5
    adjust_lr_fn: str = "original"
    adamw: Sequence[str] = ()
    betas: tuple[float, float] = (0.9, 0.999)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.adjust_lr_fn not in ("original", "match_rms_adamw"):
            raise PrepareError(
                f"Muon: unknown adjust_lr_fn: {self.adjust_lr_fn!r}\n"
                "hint: 'original' or 'match_rms_adamw'"
            )
        if not 0 <= self.ns_steps < 100:
            raise PrepareError(f"Muon: ns_steps must be in [0, 100): {self.ns_steps}")

    def chain(self, weight_decay: float) -> tuple[Transform, ...]:
        """Decay the weights; orthogonalize the momentum of a matrix, scale the rest by Adam."""
        adam = T.scale_by_adam(*self.betas, 1e-8)

        def update(u: Update) -> None:
            (self._orthogonalize if len(u.parameter.shape or ()) == 2 else adam.update)(u)

        def slots(dims: tuple[int, ...], dtype: ir.DataType) -> Sequence[Slot]:
            return (T.like("momentum_buffer") if len(dims) == 2 else adam.slots)(dims, dtype)

        return T.chain(T.decay_weights(weight_decay), Transform(update, slots))

    def chain_of(self, name: str, weight_decay: float) -> tuple[Transform, ...]:
        """Return AdamW's chain for the parameters that ``adamw`` names."""
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in self.adamw):
            return AdamW(betas=self.betas).chain(weight_decay)
        return self.chain(weight_decay)

    def _orthogonalize(self, u: Update) -> None:
        op, g, (a, b, c) = u.op, u.gradient, self.ns_coefficients
        dims = op.static(u.parameter)
        assert dims is not None
        rows, columns = dims
        buffer = T.average(op, u.state["momentum_buffer"], g, self.momentum)
        u.new_state["momentum_buffer"] = buffer
        x = T.average(op, buffer, g, self.momentum) if self.nesterov else buffer
        if rows > columns:
            x = op.Transpose(x, perm=[1, 0])
        norm = op.Sqrt(op.ReduceSum(op.Mul(x, x), keepdims=0))
        x = op.Div(x, op.Max(norm, op.const(self.eps, g.dtype)))
        for _ in range(self.ns_steps):
            gram = op.MatMul(x, op.Transpose(x, perm=[1, 0]))
            polynomial = op.Add(op.Mul(gram, b), op.Mul(op.MatMul(gram, gram), c))
            x = op.Add(op.Mul(x, a), op.MatMul(polynomial, x))
        if rows > columns:
            x = op.Transpose(x, perm=[1, 0])
        if self.adjust_lr_fn == "original":
            ratio = max(1.0, rows / columns) ** 0.5
        else:
            ratio = 0.2 * max(rows, columns) ** 0.5
        u.gradient = op.Mul(x, ratio) if ratio != 1.0 else x


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
