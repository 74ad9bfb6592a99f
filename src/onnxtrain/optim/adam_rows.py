"""Adam for many parameters at once, in few operators: averages, decay and copies are one product.

The rows ``m, v, p, g, g * g`` of a matrix, multiplied with a matrix of constants, give the new
``m`` and ``v``, and ``p`` with its decay. Divided by the corrections of their biases (1 for the
last two) they are what the update is made of.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from onnxtrain.graph.builder import OpBuilder
from onnxtrain.optim.base import Optimizer
from onnxtrain.optim.optimizers import Adam, AdamW
from onnxtrain.optim.packing import Pack

SLOTS = ("exp_avg", "exp_avg_sq")

_FAR = 50.0  # the hyperbolic tangent of this is 1


@dataclasses.dataclass(frozen=True)
class Rows:
    """What a step gives: the vector of parameters, and that of the moments, ``m`` before ``v``."""

    parameter: ir.Value
    moments: ir.Value


def is_plain_adam(optimizer: Optimizer) -> bool:
    """Return whether the update is that of torch's AdamW, or of Adam without decay."""
    if type(optimizer) is AdamW:
        plain = optimizer.correct_bias and optimizer.form == "torch"
    elif type(optimizer) is Adam:
        plain = not optimizer.weight_decay and not any(g.weight_decay for g in optimizer.groups)
    else:
        return False
    return plain and not optimizer.amsgrad and not optimizer.proximal and all(optimizer.betas)


def adam_rows(
    optimizer: Optimizer,
    pack: Pack,
    op: OpBuilder,
    parameters: Mapping[str, ir.Value],
    gradients: Mapping[str, ir.Value],
    state: Mapping[str, ir.Value],
    lr: ir.Value,
    step: ir.Value,
    biases: dict[tuple[float, float], ir.Value],
) -> Rows:
    """Emit the update of a pack.

    Args:
        optimizer: one that :func:`is_plain_adam` takes.
        pack: the parameters that are joined.
        op: where the nodes go.
        parameters: by name.
        gradients: by the name of the parameter.
        state: by ``<parameter>.<slot>``.
        lr: float32[1].
        step: the number of this step, from 1.
        biases: corrections that were emitted already; filled.
    """
    assert isinstance(optimizer, Adam | AdamW)
    group, size = optimizer.group_of(pack.name), sum(pack.sizes)
    g = pack.join(op, gradients)
    moments = [state[f"{n}.{slot}"] for slot in SLOTS for n in pack.members]
    parts = [*moments, *(parameters[n] for n in pack.members), g, op.Mul(g, g)]
    flat = op.Concat(*(op.Reshape(x, [-1]) for x in parts), axis=0)
    mixing = op.const(_mixing(optimizer.betas, group.weight_decay or 0.0), ir.DataType.FLOAT)
    mixed = op.MatMul(mixing, op.Reshape(flat, [5, size]))
    if optimizer.betas not in biases:
        biases[optimizer.betas] = _corrections(op, optimizer.betas, step)
    even = op.Reshape(op.Div(mixed, biases[optimizer.betas]), [-1])
    m, v, decay, p = op.Split(even, op.const([size] * 4), axis=0, _outputs=4)
    change = op.Div(m, op.Add(op.Sqrt(v), optimizer.eps))
    if group.weight_decay:
        change = op.Add(change, decay)
    rate = lr if group.lr_factor == 1.0 else op.Mul(lr, group.lr_factor)
    new = op.Sub(p, op.Mul(change, rate))
    return Rows(new, op.Reshape(mixed, [-1]))


def _mixing(betas: tuple[float, float], decay: float) -> np.ndarray:
    """Return the matrix that makes new rows: ``m, v, decay * p, p``."""
    b1, b2 = betas
    return np.array(
        [
            [b1, 0, 0, 1 - b1, 0],
            [0, b2, 0, 0, 1 - b2],
            [0, 0, decay, 0, 0],
            [0, 0, 1, 0, 0],
        ]
    )


def _corrections(op: OpBuilder, betas: tuple[float, float], step: ir.Value) -> ir.Value:
    """Return ``1 - beta**step`` of both averages, without cancellation, and 1 twice: ``[4, 1]``.

    With ``t = tanh(-step * ln(beta) / 2)`` it is ``t / (t / 2 + 1 / 2)``.
    """
    halves = np.array([[-math.log(betas[0]) / 2], [-math.log(betas[1]) / 2], [_FAR], [_FAR]])
    t = op.Tanh(op.Mul(op.Cast(step, to=ir.DataType.FLOAT), op.const(halves, ir.DataType.FLOAT)))
    return op.Div(t, op.HardSigmoid(t, alpha=0.5, beta=0.5))


__all__ = ["SLOTS", "Rows", "adam_rows", "is_plain_adam"]
