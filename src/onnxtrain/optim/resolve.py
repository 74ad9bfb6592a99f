"""Optimizers by name."""

from __future__ import annotations

from onnxtrain.errors import PrepareError
from onnxtrain.optim.optimizers import (
    LAMB,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    AdamW,
    Lion,
    Optimizer,
    RMSprop,
)

OPTIMIZERS: dict[str, type[Optimizer]] = {
    "sgd": SGD,
    "adam": Adam,
    "adamw": AdamW,
    "lamb": LAMB,
    "adagrad": Adagrad,
    "rmsprop": RMSprop,
    "adadelta": Adadelta,
    "lion": Lion,
    "adafactor": Adafactor,
}


def resolve(optimizer: str | Optimizer) -> Optimizer:
    """Give the optimizer that a name stands for, with its default settings.

    >>> resolve("sgd").lr
    0.001
    """
    if isinstance(optimizer, Optimizer):
        return optimizer
    found = OPTIMIZERS.get(str(optimizer).lower())
    if found is None:
        raise PrepareError(
            f"no such optimizer: {optimizer!r}\nhint: one of {', '.join(OPTIMIZERS)}"
        )
    return found()
