"""Everything that can be a loss, brought to a few kinds."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

import onnx
import onnx_ir as ir

from onnxtrain.errors import PrepareError
from onnxtrain.losses.base import LOSSES, Loss
from onnxtrain.named import parse_options, unknown


@dataclasses.dataclass(frozen=True)
class LossTerm:
    """A loss on certain outputs, as a term of a sum.

    Args:
        loss: anything that is a loss, except a list.
        output: which output or inner value of the model it looks at; several names for a loss with
            several predictions (anchor, positive, negative). The only float output unless given.
        weight: the factor of this term.
        target: names for the inputs that the loss adds. A name that the model's inputs or another
            term have stands for that input: an autoencoder's target is its own input.
        reduce: ``"mean"`` or ``"sum"`` of a loss that gives one number per element.
    """

    loss: Any
    output: str | Sequence[str] | None = None
    weight: float = 1.0
    target: str | Sequence[str] | None = None
    reduce: str | None = None

    def __post_init__(self) -> None:
        if self.reduce not in (None, "mean", "sum"):
            raise PrepareError(f"reduce is 'mean' or 'sum', not {self.reduce!r}")

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names in ``output``."""
        return _names(self.output)

    @property
    def target_names(self) -> tuple[str, ...]:
        """The names in ``target``."""
        return _names(self.target)


def _names(given: str | Sequence[str] | None) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given or ())


LossLike = (
    str
    | os.PathLike[str]
    | bytes
    | onnx.ModelProto
    | ir.Model
    | Loss
    | type[Loss]
    | Callable[..., ir.Value]
    | LossTerm
    | Sequence[Any]
)
"""A name, a loss object, an output's name, a function over the builder, a model, or a list."""


@dataclasses.dataclass(frozen=True)
class Existing:
    """A scalar that the model computes already."""

    value: ir.Value


@dataclasses.dataclass(frozen=True)
class FromModel:
    """A loss that another model computes."""

    source: Any


def resolve(loss: LossLike, model: ir.Model | None = None) -> tuple[LossTerm, ...]:
    """Return the terms of a loss, each with a Loss, Existing, FromModel or function in it.

    >>> resolve("mse")[0].loss
    MSE(reduction='mean')
    >>> resolve("cross_entropy:label_smoothing=0.1,axis=-1")[0].loss.label_smoothing
    0.1
    """
    if isinstance(loss, list | tuple):
        if not loss:
            raise PrepareError("the list of losses is empty\nhint: give at least one")
        return tuple(term for one in loss for term in resolve(one, model))
    term = loss if isinstance(loss, LossTerm) else LossTerm(loss)
    if isinstance(term.loss, list | tuple | LossTerm):
        raise PrepareError("a LossTerm holds one loss\nhint: give a list of LossTerm instead")
    return (dataclasses.replace(term, loss=_kind(term.loss, model)),)


def looked_at(loss: LossLike, model: ir.Model) -> frozenset[str]:
    """Return the names of outputs and inner values that the terms of a loss name."""
    return frozenset(name for term in resolve(loss, model) for name in term.outputs)


def _kind(loss: Any, model: ir.Model | None) -> Any:
    if isinstance(loss, Loss | Existing | FromModel):
        return loss
    if isinstance(loss, type) and issubclass(loss, Loss):
        return loss()
    if isinstance(loss, str) and not loss.endswith(".onnx"):
        return _named(loss, model)
    if isinstance(loss, str | os.PathLike | bytes | onnx.ModelProto | ir.Model):
        return FromModel(loss)
    if callable(loss):
        return loss
    raise PrepareError(
        f"not a loss: {type(loss).__name__}\n"
        "hint: give a name, a loss object, a function over the builder, or a model"
    )


def _named(name: str, model: ir.Model | None) -> Any:
    outputs = {} if model is None else {y.name or "": y for y in model.graph.outputs}
    if name in outputs:  # the model's own word for it wins over ours
        return Existing(outputs[name])
    if LOSSES.find(parse_options(name)[0]) is not None:
        return LOSSES.make(name)
    raise unknown(name, [*LOSSES, *outputs], "loss or output")
