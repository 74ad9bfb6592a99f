"""Gradient transformations that optimizers are chained from, as in optax.

A transform turns a gradient into an update. It declares its state tensors (``slots``) and emits
nodes (``update``). After the last transform, the optimizer subtracts ``lr * update`` from the
parameter.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import onnx_ir as ir

from onnxtrain.graph.builder import OpBuilder

Scalars = dict[tuple[str, float], ir.Value]

ANCHOR = "anchor"
"""The slot of the proximal term: the value that it pulls a parameter towards."""
FISHER = "fisher"
"""The slot of elastic weight consolidation: how much each element matters for earlier tasks."""


@dataclasses.dataclass(frozen=True)
class Slot:
    """One state tensor of a parameter, stored as ``<parameter>.<name>``."""

    name: str
    dims: tuple[int, ...]
    dtype: ir.DataType
    init: float = 0.0

    @property
    def nonnegative(self) -> bool:
        """Whether the slot holds averages of squares, which are never negative."""
        return self.name in ("exp_avg_sq", "max_exp_avg_sq")


@dataclasses.dataclass
class Update:
    """One parameter and its gradient on the way through a chain of transforms."""

    op: OpBuilder
    parameter: ir.Value
    gradient: ir.Value
    """Starts as the gradient and ends as the update, which is subtracted times ``lr``."""
    state: dict[str, ir.Value]
    lr: ir.Value
    """A scalar of the parameter's dtype, multiplied by the ``lr_factor`` of the group."""
    step: ir.Value
    """The number of this step, from 1, a scalar of the parameter's dtype."""
    shared: Scalars
    """Scalars that all parameters of a dtype share, emitted once."""
    new_state: dict[str, ir.Value] = dataclasses.field(default_factory=dict[str, ir.Value])
    factor: ir.Value | None = None
    """A pending factor of ``gradient``; it is merged into ``lr`` where possible, which saves one
    pass over the tensor."""

    def apply_pending_scale(self) -> None:
        """Multiply the gradient by the pending factor, for transforms that depend on its scale."""
        if self.factor is not None:
            self.gradient, self.factor = self.op.Mul(self.gradient, self.factor), None

    def rate(self) -> ir.Value:
        """Return ``lr`` times the pending factor."""
        if self.factor is None:
            return self.lr
        pending, lr = self.factor, self.lr
        return self.scalar(f"rate/{pending.name}/{lr.name}", 0.0, lambda: self.op.Mul(lr, pending))

    def scalar(self, name: str, number: float, make: Callable[[], ir.Value]) -> ir.Value:
        """Return a scalar that is emitted once for all parameters of a dtype."""
        key = (f"{name}/{self.parameter.dtype}", number)
        if key not in self.shared:
            self.shared[key] = make()
        return self.shared[key]


@dataclasses.dataclass(frozen=True)
class Transform:
    """A link of a chain: its state tensors and the nodes it emits."""

    update: Callable[[Update], None]
    slots: Callable[[tuple[int, ...], ir.DataType], Sequence[Slot]] = lambda dims, dtype: ()


def chain(*transforms: Transform | None) -> tuple[Transform, ...]:
    """Return the transforms in order, without ``None``."""
    return tuple(t for t in transforms if t is not None)


def like(*names: str, init: float = 0.0) -> Callable[[tuple[int, ...], ir.DataType], list[Slot]]:
    """Return state tensors of the parameter's own shape."""
    return lambda dims, dtype: [Slot(name, dims, dtype, init) for name in names]


def one_minus_power(u: Update, beta: float) -> ir.Value:
    """Return ``1 - beta**step`` without cancellation in float32.

    With ``x = -step * ln(beta)`` it is ``1 - exp(-x) = 2 t / (1 + t)``, ``t = tanh(x / 2)``.
    """

    def make() -> ir.Value:
        if beta == 0.0:
            return u.op.const(1.0, u.parameter.dtype)
        t = u.op.Tanh(u.op.Mul(u.step, -math.log(beta) / 2))
        return u.op.Div(u.op.Mul(t, 2.0), u.op.Add(t, 1.0))

    return u.scalar("one_minus_power", beta, make)


def average(op: OpBuilder, old: ir.Value, new: ir.Value, beta: float) -> ir.Value:
    """Return ``beta * old + (1 - beta) * new``."""
    return op.Add(op.Mul(old, beta), op.Mul(new, 1.0 - beta))


def add_weight_decay(rate: float) -> Transform | None:
    """Add ``rate * parameter`` to the gradient (L2 regularization)."""

    def update(u: Update) -> None:
        u.apply_pending_scale()
        u.gradient = u.op.Add(u.gradient, u.op.Mul(u.parameter, rate))

    return Transform(update) if rate else None


def add_proximal(rate: float, ewc: float = 0.0) -> Transform | None:
    """Add ``(rate + ewc * fisher) * (p - anchor)`` to the gradient.

    It is the gradient of ``rate / 2 * ||p - anchor||²`` and of elastic weight consolidation, the
    same distance weighted by the diagonal of the Fisher information. Anchor and Fisher information
    are state that the step does not change.
    """
    names = (ANCHOR, FISHER) if ewc else (ANCHOR,)

    def update(u: Update) -> None:
        u.apply_pending_scale()
        u.new_state.update({name: u.op.Identity(u.state[name]) for name in names})
        distance = u.op.Sub(u.parameter, u.state[ANCHOR])
        if rate:
            u.gradient = u.op.Add(u.gradient, u.op.Mul(distance, rate))
        if ewc:
            pull = u.op.Mul(u.op.Mul(u.state[FISHER], ewc), distance)
            u.gradient = u.op.Add(u.gradient, pull)

    return Transform(update, like(*names)) if rate or ewc else None


def decay_weights(rate: float) -> Transform | None:
    """Multiply the parameter by ``1 - lr * rate`` (decoupled weight decay)."""

    def update(u: Update) -> None:
        factor = u.scalar(f"decay/{u.lr.name}", rate, lambda: u.op.Sub(1.0, u.op.Mul(u.lr, rate)))
        u.parameter = u.op.Mul(u.parameter, factor)

    return Transform(update) if rate else None


def momentum(factor: float, dampening: float = 0.0, nesterov: bool = False) -> Transform | None:
    """Accumulate gradients: ``b = factor * b + (1 - dampening) * g``, and ``b = g`` in step 1."""

    def update(u: Update) -> None:
        op, g, old = u.op, u.gradient, u.state["momentum_buffer"]
        if dampening:
            weight = u.scalar(
                "dampening",
                dampening,
                lambda: op.Where(
                    op.Greater(u.step, 1.5), op.const(1.0 - dampening, u.gradient.dtype), 1.0
                ),
            )
            new = op.Add(op.Mul(old, factor), op.Mul(g, weight))
        else:
            new = op.Add(op.Mul(old, factor), g)
        u.new_state["momentum_buffer"] = new
        u.gradient = op.Add(g, op.Mul(new, factor)) if nesterov else new

    return Transform(update, like("momentum_buffer")) if factor else None


def adam_averages(u: Update, beta1: float, beta2: float) -> tuple[ir.Value, ir.Value]:
    """Update and return the running mean and mean square of the gradient."""
    op = u.op
    m = average(op, u.state["exp_avg"], u.gradient, beta1)
    v = average(op, u.state["exp_avg_sq"], op.Mul(u.gradient, u.gradient), beta2)
    u.new_state.update(exp_avg=m, exp_avg_sq=v)
    return m, v


def scale_by_adam(
    beta1: float,
    beta2: float,
    eps: float,
    *,
    correct: bool = True,
    late_eps: bool = True,
    amsgrad: bool = False,
) -> Transform:
    """Divide the running mean of gradients by the root of their running mean square.

    Args:
        beta1: decay of the mean.
        beta2: decay of the mean square.
        eps: added to the denominator.
        correct: correct the bias of the averages, which start at zero.
        late_eps: add ``eps`` after the bias correction, as torch does, and not before it.
        amsgrad: divide by the maximum of the mean squares so far.
    """

    def update(u: Update) -> None:
        op = u.op
        m, v = adam_averages(u, beta1, beta2)
        if amsgrad:
            v = op.Max(u.state["max_exp_avg_sq"], v)
            u.new_state["max_exp_avg_sq"] = v
        root = op.Sqrt(v)
        if not correct:
            u.gradient = op.Div(m, op.Add(root, eps))
            return
        # m / bias1 / (root / bias2 + eps) = m / (root + bias2 * eps) * (bias2 / bias1): scalars are
        # combined first, which saves two passes over the tensors.
        bias1 = one_minus_power(u, beta1)
        bias2 = u.scalar("root_bias2", beta2, lambda: op.Sqrt(one_minus_power(u, beta2)))
        small = eps
        if late_eps:
            small = u.scalar(f"eps/{eps}", beta2, lambda: op.Mul(bias2, eps))
        u.gradient = op.Div(m, op.Add(root, small))
        u.factor = u.scalar(f"bias/{beta1}", beta2, lambda: op.Div(bias2, bias1))

    names = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if amsgrad else [])]
    return Transform(update, like(*names))


def scale_by_trust_ratio() -> Transform:
    """Scale the update to the norm of the parameter, layer by layer (LAMB)."""

    def update(u: Update) -> None:
        u.apply_pending_scale()
        op = u.op
        norm_p, norm_u = (
            op.Sqrt(op.ReduceSum(op.Mul(x, x), keepdims=0)) for x in (u.parameter, u.gradient)
        )
        usable = op.And(op.Greater(norm_p, 0.0), op.Greater(norm_u, 0.0))
        safe = op.Where(usable, norm_u, 1.0)
        u.gradient = op.Mul(u.gradient, op.Where(usable, op.Div(norm_p, safe), 1.0))

    return Transform(update)
