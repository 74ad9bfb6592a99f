"""A scale of channels that a convolution's gradient comes with, moved to the weights.

``dX`` and ``dW`` are linear in each channel of ``dy``: with ``dy = gain * z``, one number per
output channel, ``dX`` is that of ``z`` with the weight ``gain * W``, and ``dW`` is ``gain`` times
that of ``z``. Weights are often much smaller than what they are applied to, and the gradient of a
batch normalisation ends with such a scale.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import onnx_ir as ir

from onnxtrain import thresholds as T
from onnxtrain.autodiff.variants import Choice, Choices, Form, Forms, chosen
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.nodes import is_op
from onnxtrain.graph.shapes import dims as D

Apart = tuple[ir.Value, ir.Value, ir.Value | None]


def scale_apart(op: OpBuilder, dy: ir.Value, w: ir.Value) -> Apart:
    """Return ``z``, the weight for ``dX``, and the gain, which is ``None`` where none is apart."""
    return chosen(op, Scaled(dy, w), SCALE_FORMS, SCALE_CHOICES)(op, dy, w)


def rescaled(op: OpBuilder, gradient: ir.Value, gain: ir.Value | None) -> ir.Value:
    """Return the gradient of a weight or a bias, with the gain that was left out."""
    if gain is None:
        return gradient
    fits = op.rank(gradient) == op.rank(gain)
    return op.Mul(gradient, gain if fits else op.Reshape(gain, [-1]))


class Scaled(NamedTuple):
    """A gradient, and the weight that it meets."""

    dy: ir.Value
    w: ir.Value


def _gain(dy: ir.Value) -> ir.Value | None:
    """Return what scales the channels of a gradient, ``[channels, 1, ...]``."""
    scale = dy.producer()
    if scale is None or not is_op(scale, "Mul"):
        return None
    gain, have = scale.inputs[1], D.numbers(S.dims_of(dy) or (None,))
    sizes = None if gain is None else D.numbers(S.dims_of(gain) or (None,))
    if have is None or sizes is None or len(have) < 3:
        return None
    return gain if list(sizes) == [have[1], *[1] * (len(have) - 2)] else None


def _larger_than_weight(v: Scaled) -> bool:
    if _gain(v.dy) is None:
        return False
    sizes, weight = D.numbers(S.dims_of(v.dy) or (None,)), D.numbers(S.dims_of(v.w) or (None,))
    assert sizes is not None
    return weight is not None and math.prod(sizes) >= T.SCALED_PER_WEIGHT * math.prod(weight)


def _in_weights(op: OpBuilder, dy: ir.Value, w: ir.Value) -> Apart:
    scale, gain = dy.producer(), _gain(dy)
    assert scale is not None
    assert gain is not None
    z = scale.inputs[0]
    assert z is not None
    of_outputs = op.Reshape(gain, [-1, *[1] * (op.rank(w) - 1)])
    return z, op.Mul(w, of_outputs), of_outputs


def _as_it_is(op: OpBuilder, dy: ir.Value, w: ir.Value) -> Apart:
    return dy, w, None


SCALE_FORMS: Forms[Scaled] = {
    "in weights": Form(_in_weights, _larger_than_weight),
    "as it is": Form(_as_it_is),
}
SCALE_CHOICES: Choices[Scaled] = [
    Choice("in weights", prefers="scale-in-weights"),
    Choice("as it is"),
]
