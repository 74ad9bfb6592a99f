"""Optimizers by name."""

from __future__ import annotations

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
from onnxtrain.options import make

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
    """Return the optimizer that a name, or a name with options, stands for.

    >>> resolve("sgd").lr
    0.001
    >>> resolve("adamw:lr=0.01,weight_decay=0").lr
    0.01
    """
    if isinstance(optimizer, Optimizer):
        return optimizer
    return make(OPTIMIZERS, str(optimizer), "optimizer", {})
