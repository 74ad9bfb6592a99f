"""Labels that are not among the classes of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.errors import LabelError, OnnxTrainError
from onnxtrain.training.layouts import model_of

if TYPE_CHECKING:
    from onnxtrain.training.trainer import Trainer

_PASSED_ON = (
    "Cast",
    "Concat",
    "Flatten",
    "Identity",
    "Pad",
    "Reshape",
    "Slice",
    "Squeeze",
    "Transpose",
    "Unsqueeze",
    "Where",
)
_LOSSES = ("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss")


class Classes(NamedTuple):
    """What a target may hold."""

    size: int
    ignored: frozenset[int]


def explained(
    trainer: Trainer,
    error: OnnxTrainError,
    feeds: Mapping[str, np.ndarray],
    rows: np.ndarray | None = None,
) -> OnnxTrainError:
    """Return the error of a batch in the batch's own words, where labels are the cause.

    Args:
        trainer: that took the batch.
        error: of the runtime.
        feeds: the batch.
        rows: the numbers that the rows of the batch have in the data.
    """
    if trainer.manifest.model("eval") is None:
        return error
    targets = {t.name: feeds[t.name] for t in trainer.batch_specs if t.role == "target"}
    problem = label_problem(model_of(trainer.artifacts.source("eval")), targets, rows)
    return error if problem is None else LabelError(problem)


def label_problem(
    model: onnx.ModelProto, batch: Mapping[str, np.ndarray], rows: np.ndarray | None = None
) -> str | None:
    """Say which label of a batch is not among the classes, if one is not.

    Args:
        model: that computes the loss.
        batch: arrays by input.
        rows: the numbers that the rows of the batch have in the data.
    """
    for name, labels in batch.items():
        if labels.dtype.kind not in "iu" or not labels.ndim:
            continue
        known = classes_of(model, name)
        if known is None:
            continue
        bad = (labels < 0) | (labels >= known.size)
        for ignored in known.ignored:
            bad &= labels != ignored
        if bad.any():
            place = tuple(int(i) for i in np.argwhere(bad)[0])
            value, row = int(labels[place]), place[0]
            where = f"row {row} of the batch" if rows is None else f"row {int(rows[row])}"
            many = f" (and {int(bad.sum()) - 1} more of the batch)" if bad.sum() > 1 else ""
            return (
                f"{name!r} has {value} in {where}{many}; the model has {known.size} classes: "
                f"0 to {known.size - 1}\n"
                f"hint: {_advice(labels, known)}"
            )
    return None


def _advice(labels: np.ndarray, known: Classes) -> str:
    if labels.max() == known.size and labels.min() >= 1:
        return "labels count from 0; subtract 1"
    ignored = ", ".join(map(str, sorted(known.ignored)))
    return f"rows with label {ignored} do not count" if ignored else "labels count from 0"


def classes_of(model: onnx.ModelProto, name: str) -> Classes | None:
    """Return how many classes the labels called ``name`` choose from, if a loss tells."""
    constants = {t.name: t for t in model.graph.initializer}
    return _classes_in(model.graph, {name}, constants)


def _classes_in(
    graph: onnx.GraphProto, labels: set[str], constants: Mapping[str, onnx.TensorProto]
) -> Classes | None:
    """Return what a graph, or a loop in it, does with labels."""
    count, ignored = None, set[int]()
    for node in graph.node:
        given = {i for i, x in enumerate(node.input) if x in labels}
        if not given:
            continue
        if given & ({1, 2} if node.op_type == "Where" else {0}) and node.op_type in _PASSED_ON:
            labels.update(node.output)
        elif node.op_type == "Equal":
            ignored.update(_numbers(constants, (x for x in node.input if x not in labels)))
        elif node.op_type == "Scan":
            body = next(a.g for a in node.attribute if a.name == "body")
            inner = _classes_in(body, {body.input[i].name for i in given}, constants)
            if inner is not None:
                count, ignored = inner.size, ignored | inner.ignored
        elif 1 in given and node.op_type in (*_LOSSES, "GatherElements"):
            attributes = {a.name: a.i for a in node.attribute}
            axis = 1 if node.op_type in _LOSSES else attributes.get("axis", 0)
            count = count or _size(graph, node.input[0], axis)
            if "ignore_index" in attributes:
                ignored.add(attributes["ignore_index"])
    return None if count is None else Classes(count, frozenset(ignored))


def _numbers(constants: Mapping[str, onnx.TensorProto], names: Iterator[str]) -> Iterator[int]:
    for name in names:
        tensor = constants.get(name)
        if tensor is not None and not tensor.dims and not tensor.external_data:
            yield int(ir.serde.deserialize_tensor(tensor).numpy())


def _size(graph: onnx.GraphProto, name: str, axis: int) -> int | None:
    for value in (*graph.value_info, *graph.input, *graph.output):
        if value.name == name:
            dims: Any = value.type.tensor_type.shape.dim
            if -len(dims) <= axis < len(dims) and dims[axis].HasField("dim_value"):
                return dims[axis].dim_value
    return None
