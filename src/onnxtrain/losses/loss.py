"""The base class of losses, and the shape checks and reductions that losses share.

A loss declares the inputs that it adds to a model (:meth:`Loss.targets`) and emits its nodes
(:meth:`Loss.build`, or only :meth:`Loss.per_element`, which ``build`` then reduces).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import PrepareError, ShapeError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.shapes import dims as D
from onnxtrain.graph.shapes.dims import Dim
from onnxtrain.losses.logits import Reads
from onnxtrain.registry import Registry

FLOAT, INT64 = ir.DataType.FLOAT, ir.DataType.INT64


@dataclasses.dataclass(frozen=True)
class TargetSpec:
    """An input that a loss adds to a model."""

    name: str
    dtype: ir.DataType
    dims: tuple[Dim, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loss:
    """Base of all losses, with the argument names and defaults of ``torch.nn``.

    ``reduction`` is ``"mean"``, ``"sum"``, or ``"none"`` for one loss per element.
    """

    reduction: str = "mean"

    predictions: ClassVar[int] = 1
    """Number of arguments that are outputs of the model; the others are targets."""
    reductions: ClassVar[tuple[str, ...]] = ("none", "mean", "sum")
    reads: ClassVar[Reads] = Reads.VALUES
    """What the prediction has to be; a model that ends in Softmax or Sigmoid has logits before."""

    def __post_init__(self) -> None:
        if self.reduction not in self.reductions:
            raise PrepareError(
                f"{type(self).__name__}: unknown reduction: {self.reduction!r}\n"
                f"hint: use one of {', '.join(self.reductions)}"
            )

    def targets(self, prediction: ir.Value) -> list[TargetSpec]:
        """Return the arguments after the prediction; by default one tensor of the same shape."""
        return [target_like("target", prediction)]

    def normalized_axis(self, prediction: ir.Value) -> int | None:
        """Return the class axis of a prediction, ``None`` if the loss has none."""
        return None

    def build(self, op: OpBuilder, prediction: ir.Value, *targets: ir.Value) -> ir.Value:
        """Emit the loss; return a scalar, or with ``reduction="none"`` one loss per element."""
        return self.reduce(op, self.per_element(op, prediction, *targets))

    def per_element(self, op: OpBuilder, prediction: ir.Value, *targets: ir.Value) -> ir.Value:
        """Emit the loss of every element."""
        raise NotImplementedError(f"{type(self).__name__} defines neither build nor per_element")

    def reduce(self, op: OpBuilder, each: ir.Value) -> ir.Value:
        """Emit the mean or the sum."""
        return reduce(op, each, self.reduction)


LOSSES: Registry[Loss] = Registry("loss")
"""Losses by name; ``@LOSSES.named("mse")`` adds one."""


def reduce(op: OpBuilder, x: ir.Value, how: str) -> ir.Value:
    """Return the mean or the sum of all elements, or the elements for ``"none"``."""
    if how == "none" or op.rank(x) == 0:
        return x
    return op.ReduceMean(x, keepdims=0) if how == "mean" else op.ReduceSum(x, keepdims=0)


def target_like(name: str, prediction: ir.Value) -> TargetSpec:
    """Return a target of the shape and dtype of a prediction."""
    return TargetSpec(name, _dtype(prediction), _dims(prediction))


def labels_for(name: str, prediction: ir.Value, axis: int) -> TargetSpec:
    """Return a target of class indices for a prediction with its classes on ``axis``."""
    dims = _dims(prediction)
    return TargetSpec(name, INT64, tuple(d for i, d in enumerate(dims) if i != axis))


def rows_of(name: str, prediction: ir.Value, dtype: ir.DataType | None = None) -> TargetSpec:
    """Return a target with one value for each row of a prediction ``[..., D]``."""
    return TargetSpec(name, dtype or _dtype(prediction), _dims(prediction)[:-1])


def _dims(x: ir.Value) -> tuple[Dim, ...]:
    S.rank_of(x)
    return S.dims_of(x) or ()


def _dtype(x: ir.Value) -> ir.DataType:
    assert x.dtype is not None
    return x.dtype


def check_rank(loss: Any, x: ir.Value, ranks: Sequence[int], layout: str) -> int:
    """Return the rank of a prediction; raise a ``ShapeError`` that names the expected layout."""
    rank = S.rank_of(x)
    if rank not in ranks:
        raise ShapeError(
            f"{type(loss).__name__} does not accept {S.describe_value(x)}\n"
            f"hint: it expects {layout}"
        )
    return rank


def check_same_rank(loss: Any, x: ir.Value, target: ir.Value) -> None:
    """Raise ShapeError for a target that would be broadcast: that is almost always a mistake."""
    have, want = S.dims_of(target), S.dims_of(x)
    if have is not None and want is not None and D.shapes_differ(have, want):
        raise ShapeError(
            f"{type(loss).__name__}: target and prediction have different shapes: "
            f"{S.describe_value(target)} and {S.describe_value(x)}\n"
            "hint: reshape one of them; a loss does not broadcast"
        )


def as_tuples(values: Any) -> Any:
    """Return an array or nested list as tuples, so that losses can be compared and hashed."""
    if values is None:
        return None
    plain = np.asarray(values, np.float64).tolist()

    def tuples(v: Any) -> Any:
        return tuple(tuples(i) for i in v) if isinstance(v, list) else v

    return tuples(plain)


def class_weights(
    loss: Any, op: OpBuilder, weight: Sequence[float] | None, x: ir.Value, axis: int
) -> ir.Value | None:
    """Return the class weights as a constant; raise ShapeError if their number is wrong."""
    if weight is None:
        return None
    classes = S.dims_of(x)[axis] if S.dims_of(x) else None  # pyright: ignore[reportOptionalSubscript]
    if np.ndim(weight) != 1 or (isinstance(classes, int) and len(weight) != classes):
        raise ShapeError(
            f"{type(loss).__name__}: {np.shape(weight)} weights for {classes} classes of "
            f"{S.describe_value(x)}\nhint: give one weight per class"
        )
    return op.const(np.asarray(weight), x.dtype)
