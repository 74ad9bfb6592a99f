"""The base class of optimizers, parameter groups, gradient clipping and weight averaging.

:meth:`Optimizer.apply` emits the nodes of one step. A subclass in ``optimizers.py`` only gives the
chain of transforms (``transforms.py``) that turns a gradient into an update.

>>> Optimizer(groups=(ParamGroup("*.bias", weight_decay=0.1),)).group_of("fc.bias").weight_decay
0.1
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import onnx_ir as ir

from onnxtrain.errors import PrepareError
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.optim import quantized_state
from onnxtrain.optim import transforms as T
from onnxtrain.optim.transforms import Slot, Transform, Update
from onnxtrain.registry import Registry

_UPDATE_METHODS = ("apply", "chain", "chain_of", "slots", "subtract_update")


@dataclasses.dataclass(frozen=True)
class ParamGroup:
    """Settings for parameters whose names match a glob; ``None`` keeps the optimizer's setting."""

    pattern: str
    weight_decay: float | None = None
    lr_factor: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimizer:
    """Base of all optimizers: a learning rate, and groups of parameters (the first match wins)."""

    elementwise: ClassVar[bool] = False
    """Whether the update of an element depends on no other element, so that tensors can be joined
    to vectors. A subclass that overrides the update does not inherit it: its formula may mix
    elements."""

    lr: float = 1e-3
    weight_decay: float = 0.0
    groups: Sequence[ParamGroup] = ()
    proximal: float = 0.0
    """Add ``proximal * (p - anchor)`` to each gradient, as FedProx does. The slot ``anchor`` holds
    the initial parameter until a caller changes it."""
    ewc: float = 0.0
    """Add ``ewc * fisher * (p - anchor)`` to each gradient, elastic weight consolidation. The slot
    ``fisher`` is zero until :meth:`onnxtrain.Trainer.consolidate` sets both slots."""
    state_bits: int = 32
    """8 stores the moments of large parameters in a byte per element, see ``quantized_state``."""

    def __init_subclass__(cls) -> None:
        """Reset ``elementwise`` in a class that overrides the update and does not set it."""
        super().__init_subclass__()
        own = vars(cls)
        if "elementwise" not in own and not own.keys().isdisjoint(_UPDATE_METHODS):
            cls.elementwise = False

    def __post_init__(self) -> None:
        lr: Any = self.lr  # parsed from a string, it can have any type
        if isinstance(lr, bool) or not isinstance(lr, numbers.Real) or not math.isfinite(lr):
            raise PrepareError(f"lr must be a finite number: {self.lr!r}")
        if self.lr < 0.0:
            raise PrepareError(f"lr must not be negative: {self.lr}")
        if self.state_bits not in (8, 32):
            raise PrepareError(f"state_bits must be 8 or 32: {self.state_bits}")
        if self.state_bits == 8:
            # State in blocks does not join: a block has elements of one parameter.
            object.__setattr__(self, "elementwise", False)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if (
                field.name in ("eps", "weight_decay", "momentum", "proximal", "ewc")
                and isinstance(value, float)
                and value < 0
            ):
                raise PrepareError(f"{field.name} must not be negative: {value}")
        for beta in getattr(self, "betas", ()):
            if not 0.0 <= beta < 1.0:
                raise PrepareError(f"betas must be in [0, 1): {getattr(self, 'betas', ())}")

    def chain(self, weight_decay: float) -> tuple[Transform, ...]:
        """Return the transforms that turn a gradient into an update."""
        raise NotImplementedError

    def chain_of(self, name: str, weight_decay: float) -> tuple[Transform, ...]:
        """Return the chain of one parameter, for optimizers that choose it by name."""
        return self.chain(weight_decay)

    def links(self, name: str) -> tuple[Transform, ...]:
        """Return the chain of a parameter, preceded by the pull towards anchors."""
        decay = self.group_of(name).weight_decay or 0.0
        return T.chain(T.add_proximal(self.proximal, self.ewc), *self.chain_of(name, decay))

    def group_of(self, name: str) -> ParamGroup:
        """Return the settings of a parameter."""
        for group in self.groups:
            if fnmatch.fnmatchcase(name, group.pattern):
                decay = self.weight_decay if group.weight_decay is None else group.weight_decay
                return dataclasses.replace(group, weight_decay=decay)
        return ParamGroup(name, self.weight_decay)

    def is_plain_sgd(self, name: str) -> bool:
        """Return whether the update of a parameter is just ``lr * gradient``."""
        cls = type(self)
        emitted = (cls.apply, cls.subtract_update) == (Optimizer.apply, Optimizer.subtract_update)
        return emitted and not self.links(name)

    def slots(self, name: str, dims: Sequence[int], dtype: ir.DataType) -> list[Slot]:
        """Return the state tensors of a parameter, as they are stored."""
        stored = list[Slot]()
        for slot in self._slots(name, dims, dtype):
            stored += quantized_state.stored(slot) if self._quantizes(slot) else [slot]
        return stored

    def _slots(self, name: str, dims: Sequence[int], dtype: ir.DataType) -> list[Slot]:
        return [s for t in self.links(name) for s in t.slots(tuple(dims), dtype)]

    def _quantizes(self, slot: Slot) -> bool:
        return self.state_bits == 8 and quantized_state.fits(slot)

    def apply(
        self,
        op: OpBuilder,
        parameters: Mapping[str, ir.Value],
        gradients: Mapping[str, ir.Value],
        state: Mapping[str, ir.Value],
        lr: ir.Value,
        step: ir.Value,
    ) -> tuple[dict[str, ir.Value], dict[str, ir.Value]]:
        """Emit one step; return the new parameters and the new state, by the same names.

        Args:
            op: builder of the graph.
            parameters: by name.
            gradients: by the name of the parameter.
            state: by ``<parameter>.<slot>``.
            lr: float32[1].
            step: int64[1] or int32[1], counting from 1.
        """
        new_parameters: dict[str, ir.Value] = {}
        new_state: dict[str, ir.Value] = {}
        shared: T.Scalars = {}
        for name, p in parameters.items():
            group = self.group_of(name)
            decay = group.weight_decay or 0.0
            assert p.dtype is not None
            rate = _shared_scalar(op, shared, "lr", lr, p.dtype)
            if group.lr_factor != 1.0:
                key = (f"lr_factor/{p.dtype}", group.lr_factor)
                if key not in shared:
                    shared[key] = op.Mul(rate, group.lr_factor)
                rate = shared[key]
            dims = op.static(p) or ()
            slots = self._slots(name, dims, p.dtype)
            old = {s.name: self._read(op, s, name, state) for s in slots}
            u = Update(
                op,
                p,
                gradients[name],
                old,
                rate,
                _shared_scalar(op, shared, "step", step, p.dtype),
                shared,
            )
            for link in self.links(name):
                link.update(u)
            new_parameters[name] = self.subtract_update(u, decay)
            for slot in slots:
                new = {slot.name: u.new_state[slot.name]}
                if self._quantizes(slot):
                    new = quantized_state.quantize(op, slot, u.new_state[slot.name])
                new_state.update({f"{name}.{n}": v for n, v in new.items()})
        return new_parameters, new_state

    def _read(
        self, op: OpBuilder, slot: Slot, name: str, state: Mapping[str, ir.Value]
    ) -> ir.Value:
        """Return the value of a slot, dequantized if it is stored in 8 bits."""
        if not self._quantizes(slot):
            return state[f"{name}.{slot.name}"]
        parts = [state[f"{name}.{s.name}"] for s in quantized_state.stored(slot)]
        return quantized_state.dequantize(op, slot, *parts)

    def subtract_update(self, u: Update, weight_decay: float) -> ir.Value:
        """Return the new parameter."""
        return u.op.Sub(u.parameter, u.op.Mul(u.gradient, u.rate()))


OPTIMIZERS: Registry[Optimizer] = Registry("optimizer")
"""Optimizers by name; ``@OPTIMIZERS.named("sgd")`` adds one."""


def resolve(optimizer: str | Optimizer) -> Optimizer:
    """Return the optimizer of a name, or of a name with options.

    >>> resolve("sgd").lr
    0.001
    >>> resolve("adamw:lr=0.01,weight_decay=0").lr
    0.01
    """
    if isinstance(optimizer, Optimizer):
        return optimizer
    if not isinstance(optimizer, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        name = getattr(optimizer, "__name__", type(optimizer).__name__)
        own = OPTIMIZERS.find(name)
        example = f"onnxtrain.optim.{own.__name__}(lr=0.001)" if own is not None else "'adamw'"
        raise PrepareError(
            f"not an optimizer of onnxtrain: {name}\n"
            f"hint: optimizer={example}; the names are {', '.join(OPTIMIZERS)}"
        )
    return OPTIMIZERS.make(optimizer)


def _shared_scalar(
    op: OpBuilder, shared: T.Scalars, name: str, value: ir.Value, dtype: ir.DataType | None
) -> ir.Value:
    key = (f"{name}/{dtype}", 0.0)
    if key not in shared:
        shared[key] = op.cast(op.Reshape(value, op.const([])), dtype)
    return shared[key]


@dataclasses.dataclass(frozen=True)
class Clip:
    """Gradient clipping, by the global norm of all gradients or by value."""

    norm: float | None = None
    value: float | None = None

    @classmethod
    def of(cls, clip: float | Clip | None) -> Clip:
        """Return the limits; a number is the maximum global norm.

        Raises:
            PrepareError: if a limit is not positive.
        """
        limits = clip if isinstance(clip, Clip) else cls(None if clip is None else float(clip))
        for limit in (limits.norm, limits.value):
            if limit is not None and not limit > 0:
                raise PrepareError(f"clip must be positive: {limit}")
        return limits


def global_norm(op: OpBuilder, gradients: Mapping[str, ir.Value]) -> ir.Value:
    """Return the norm of the concatenation of all gradients, a float32 scalar."""
    squares = [
        op.cast(op.ReduceSum(op.Mul(g, g), keepdims=0), ir.DataType.FLOAT)
        for g in gradients.values()
    ]
    total = squares[0]
    for square in squares[1:]:
        total = op.Add(total, square)
    return op.Sqrt(total)


def clip_by_global_norm(
    op: OpBuilder, gradients: Mapping[str, ir.Value], max_norm: float, norm: ir.Value | None = None
) -> dict[str, ir.Value]:
    """Scale all gradients so that their global norm is at most ``max_norm``, as torch does."""
    norm = global_norm(op, gradients) if norm is None else norm
    factor = op.Div(max_norm, op.Add(norm, 1e-6))
    factor = op.Where(op.Less(factor, 1.0), factor, 1.0)
    return {name: op.Mul(g, op.cast(factor, g.dtype)) for name, g in gradients.items()}


def clip_by_value(
    op: OpBuilder, gradients: Mapping[str, ir.Value], limit: float
) -> dict[str, ir.Value]:
    """Clamp every element of every gradient to ``[-limit, limit]``."""
    return {name: op.Clip(g, -limit, limit) for name, g in gradients.items()}


def moving_average(
    op: OpBuilder,
    averages: Mapping[str, ir.Value],
    parameters: Mapping[str, ir.Value],
    decay: float,
) -> dict[str, ir.Value]:
    """Return ``decay * average + (1 - decay) * parameter`` for each parameter."""
    return {
        name: op.Add(op.Mul(averages[name], decay), op.Mul(p, 1.0 - decay))
        for name, p in parameters.items()
    }
