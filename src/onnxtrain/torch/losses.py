"""Losses of ``torch.nn`` as losses of onnxtrain, with the same options."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from onnxtrain.errors import PrepareError
from onnxtrain.losses import LOSSES, Loss

_BY_CLASS = {f"{LOSSES[name].__name__}Loss": LOSSES[name] for name in LOSSES}
_ATTRIBUTES_OF_MODULES = set(nn.Module().__dict__) | {"weight", "pos_weight"}


def from_torch_loss(loss: nn.Module) -> Loss:
    """Return the loss of onnxtrain that equals a loss module of torch.

    >>> from_torch_loss(nn.CrossEntropyLoss(label_smoothing=0.1)).label_smoothing
    0.1

    Raises:
        PrepareError: onnxtrain has no such loss, or not with these options. Any module still works
            as a model of the loss: ``build(..., loss=from_torch(loss, (output, target)))``.
    """
    name = type(loss).__name__
    kind = _BY_CLASS.get(name) if type(loss).__module__.startswith("torch.nn.") else None
    if kind is None:
        known = ", ".join(sorted(n for n in _BY_CLASS if hasattr(nn, n)))
        raise PrepareError(
            f"no loss equals {name} (known: {known})\n"
            "hint: export it and pass the model as the loss: from_torch(loss, (output, target), "
            "input_names=[OUTPUT, 'target']), with OUTPUT the name of the model's output"
        )
    fields = {f.name for f in dataclasses.fields(kind)}
    given: dict[str, Any] = {n: v for n, v in vars(loss).items() if not n.startswith("_")}
    given |= {n: v for n, v in loss.named_buffers() if v is not None}
    plain = type(loss)()
    options: dict[str, Any] = {}
    for option, value in given.items():
        if option in fields:
            options[option] = value.tolist() if isinstance(value, torch.Tensor) else value
        elif option not in _ATTRIBUTES_OF_MODULES and value != getattr(plain, option, None):
            raise PrepareError(
                f"{kind.__name__} has no option {option!r}, which {name} sets to {value!r}\n"
                "hint: export the loss with from_torch and pass the model as the loss"
            )
    return kind(**options)
