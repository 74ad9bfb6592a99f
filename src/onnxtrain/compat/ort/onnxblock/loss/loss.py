"""The library's losses as blocks: they add an input for targets and the nodes of the loss."""

from __future__ import annotations

from typing import Any

import onnx

from onnxtrain import losses
from onnxtrain.compat.ort.errors import OrtError
from onnxtrain.compat.ort.onnxblock.blocks import Block
from onnxtrain.compat.ort.onnxblock.model import active, add_input, exists, splice, type_of


class _Loss(Block):
    """What the losses share: a reduction, and the emission of the nodes."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        if reduction not in ("mean", "sum", "none"):
            raise OrtError(f"Reduction {reduction} not supported.")
        self._reduction = reduction

    def _emit(self, loss: losses.Loss, prediction: str, target: str) -> str:
        accessor = active()
        name = splice(accessor, "loss", [prediction, target], loss.build, [accessor.fresh("loss")])
        assert isinstance(name, tuple | str)
        name = name if isinstance(name, str) else name[0]
        if self._reduction == "none":
            accessor.unreduced.add(name)
        return name


class _ElementLoss(_Loss):
    """A loss whose target has the type of the prediction."""

    def _loss(self) -> losses.Loss:
        raise NotImplementedError

    def build(self, loss_input_name: str, target_name: str = "target") -> str:
        """Return the name of the loss; adds an input for targets unless a value has its name."""
        if not exists(self.base, target_name):
            add_input(self.base, target_name, type_of(self.base, loss_input_name))
        return self._emit(self._loss(), loss_input_name, target_name)


class MSELoss(_ElementLoss):
    """``(x - t)^2``."""

    def _loss(self) -> losses.Loss:
        return losses.MSE(reduction=self._reduction)


class L1Loss(_ElementLoss):
    """``|x - t|``."""

    def _loss(self) -> losses.Loss:
        return losses.L1(reduction=self._reduction)


class BCEWithLogitsLoss(_ElementLoss):
    """Binary cross entropy of logits, stable for logits of any size.

    Args:
        weight: an array that each element's loss is multiplied with.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        pos_weight: an array of weights of the positive answer.
    """

    def __init__(self, weight: Any = None, reduction: str = "mean", pos_weight: Any = None) -> None:
        super().__init__(reduction)
        self._weight, self._pos_weight = weight, pos_weight

    def _loss(self) -> losses.Loss:
        return losses.BCEWithLogits(
            weight=self._weight, reduction=self._reduction, pos_weight=self._pos_weight
        )


class CrossEntropyLoss(_Loss):
    """Cross entropy of logits with class indices.

    The labels that the block adds have the shape of the scores without the last axis, where the
    classes are then. Labels that are there already may also leave out axis 1, as in torch.

    Args:
        weight: an array with one number per class.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        ignore_index: a label that does not count.
    """

    def __init__(
        self, weight: Any = None, reduction: str = "mean", ignore_index: int | None = None
    ) -> None:
        super().__init__(reduction)
        self._weight, self._ignore_index = weight, ignore_index

    def build(self, scores_input_name: str, labels_name: str = "labels") -> str:
        """Return the name of the loss; the labels input is added unless a value has its name."""
        scores = _sizes(type_of(self.base, scores_input_name), scores_input_name)
        if exists(self.base, labels_name):
            labels = _sizes(type_of(self.base, labels_name), labels_name)
        else:
            kind = onnx.TypeProto()
            kind.CopyFrom(type_of(self.base, scores_input_name))
            kind.tensor_type.elem_type = onnx.TensorProto.INT64
            del kind.tensor_type.shape.dim[-1]
            add_input(self.base, labels_name, kind)
            labels = scores[:-1]
        loss = losses.CrossEntropy(
            weight=self._weight,
            reduction=self._reduction,
            ignore_index=self._ignore_index,
            axis=_class_axis(scores, labels, scores_input_name, labels_name),
        )
        return self._emit(loss, scores_input_name, labels_name)


_Size = int | str | None


def _sizes(kind: onnx.TypeProto, name: str) -> tuple[_Size, ...]:
    if not kind.tensor_type.HasField("shape"):
        raise OrtError(f"The shape of {name} is not known\nhint: infer shapes before adding a loss")
    return tuple(d.dim_value or d.dim_param or None for d in kind.tensor_type.shape.dim)


def _class_axis(
    scores: tuple[_Size, ...], labels: tuple[_Size, ...], scores_name: str, labels_name: str
) -> int:
    """Return the axis that the labels lack: the last one, or axis 1 as in torch."""
    if len(scores) < 3:
        return len(scores) - 1
    said = f"{scores_name} {list(scores)} and {labels_name} {list(labels)}"
    if len(labels) != len(scores) - 1:
        raise OrtError(f"Labels must have one axis less than the scores: {said}")
    choices = {len(scores) - 1: scores[:-1], 1: (scores[0], *scores[2:])}
    fitting = [axis for axis, sizes in choices.items() if _may_equal(sizes, labels)]
    if len(fitting) > 1:  # a size of the same name is a better sign than one that is not known
        fitting = [axis for axis in fitting if choices[axis] == labels] or fitting
    if len(fitting) != 1:
        why = "both on axis 1 and on the last one" if fitting else "on no axis"
        raise OrtError(
            f"The classes could be {why}: {said}\n"
            "hint: add labels as a graph input with the sizes of the scores, less the class axis"
        )
    return fitting[0]


def _may_equal(a: tuple[_Size, ...], b: tuple[_Size, ...]) -> bool:
    return not any(
        isinstance(x, int) and isinstance(y, int) and x != y for x, y in zip(a, b, strict=True)
    )
