"""Labels and indices that are out of range: an error that names the row.

:func:`explain_label_error` runs when a batch fails: it reads the number of classes of the loss, or
of rows of an embedding table, from the graph, and finds the first label or index outside of it.
:func:`explain_sequences` does this for label sequences of CTC that cannot be aligned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.errors import LabelError, OnnxTrainError
from onnxtrain.runtime import session as runtime
from onnxtrain.training.data import Batch

if TYPE_CHECKING:
    from onnxtrain.training.trainer import Trainer

_PASS_THROUGH = (
    "Cast",
    "Concat",
    "Expand",
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


class LabelClasses(NamedTuple):
    """The labels that a target may contain."""

    size: int
    ignored: frozenset[int]


def explain_label_error(
    trainer: Trainer,
    error: OnnxTrainError,
    feeds: Mapping[str, np.ndarray],
    batch: Batch | None = None,
) -> OnnxTrainError:
    """Return an error that names the wrong label or index of a batch, if one is the cause.

    Args:
        trainer: ran the batch.
        error: onnxruntime's error, which is returned if all are in range.
        feeds: the arrays of the batch.
        batch: knows where its rows come from.
    """
    if trainer.manifest.model("eval") is None:
        return error
    model, batch = runtime.load_graph(trainer.artifacts.source("eval")), batch or Batch({})
    given = [t for t in trainer.batch_specs if t.name in feeds]
    targets = {t.name: feeds[t.name] for t in given if t.role == "target"}
    inputs = {t.name: feeds[t.name] for t in given if t.role == "input"}
    problem = (
        _sequence_problem(model, targets, batch)
        or label_problem(model, targets, batch)
        or _index_problem(model, inputs, batch)
    )
    return error if problem is None else LabelError(problem)


def explain_sequences(
    trainer: Trainer, feeds: Mapping[str, np.ndarray], batch: Batch
) -> str | None:
    """Return why the label sequences of a batch have an infinite CTC loss, if they have one."""
    if trainer.manifest.model("eval") is None or not feeds.keys() >= _SEQUENCE_TARGETS:
        return None
    model = runtime.load_graph(trainer.artifacts.source("eval"))
    return _sequence_problem(model, feeds, batch)


_SEQUENCE_TARGETS = {"labels", "input_lengths", "target_lengths"}


def _sequence_problem(
    model: onnx.ModelProto, targets: Mapping[str, np.ndarray], batch: Batch
) -> str | None:
    """Return the message for the first label sequence of a batch that CTC cannot align."""
    if not targets.keys() >= _SEQUENCE_TARGETS:
        return None
    known = label_classes(model, "labels")
    padded = targets["labels"]
    for row, labels in enumerate(padded):
        time, count = (int(targets[n][row]) for n in ("input_lengths", "target_lengths"))
        where = batch.places([row])
        if count > len(labels):
            return (
                f"'target_lengths' has {count} in {where}; 'labels' has {len(labels)} columns\n"
                "hint: pad 'labels' to the longest sequence"
            )
        labels = labels[:count]
        if known is not None:
            wrong = (labels < 0) | (labels >= known.size) | np.isin(labels, [*known.ignored])
            if wrong.any():
                blank = ", ".join(map(str, sorted(known.ignored)))
                return (
                    f"'labels' has {int(labels[wrong][0])} in {where}; the model has {known.size} "
                    f"classes, of which {blank} is the blank\n"
                    "hint: leave out the blank between labels; CTC(blank=...) sets its class"
                )
        repeats = int((labels[1:] == labels[:-1]).sum())
        if time < count + repeats:
            between = f" and a blank between {repeats} equal neighbors" if repeats else ""
            return (
                f"{count} labels{between} need {count + repeats} time steps, "
                f"'input_lengths' has {time} in {where}\n"
                "hint: remove these rows; CTC(zero_infinity=True) skips them"
            )
    return None


def label_problem(
    model: onnx.ModelProto, targets: Mapping[str, np.ndarray], batch: Batch
) -> str | None:
    """Return the message for the first label of a batch that is not a class, if there is one.

    Args:
        model: computes the loss.
        targets: arrays by name.
        batch: knows where its rows come from.
    """
    for name, labels in targets.items():
        if labels.dtype.kind not in "iu" or not labels.ndim:
            continue
        known = label_classes(model, name)
        if known is None:
            continue
        bad = (labels < 0) | (labels >= known.size)
        for ignored in known.ignored:
            bad &= labels != ignored
        if bad.any():
            index = tuple(int(i) for i in np.argwhere(bad)[0])
            value, where = int(labels[index]), batch.places(index[:1])
            many = f" (and {int(bad.sum()) - 1} more of the batch)" if bad.sum() > 1 else ""
            return (
                f"{name!r} has {value} in {where}{many}; the model has {known.size} classes: "
                f"0 to {known.size - 1}\n"
                f"hint: {_label_hint(labels, known)}"
            )
    return None


def _index_problem(
    model: onnx.ModelProto, inputs: Mapping[str, np.ndarray], batch: Batch
) -> str | None:
    """Return the message for the first index of an input that its table does not have."""
    for name, indices in inputs.items():
        if indices.dtype.kind not in "iu" or not indices.ndim:
            continue
        for table, size in _tables(model.graph, name):
            bad = (indices < -size) | (indices >= size)
            if not bad.any():
                continue
            index = tuple(int(i) for i in np.argwhere(bad)[0])
            many = f" (and {int(bad.sum()) - 1} more of the batch)" if bad.sum() > 1 else ""
            hint = (
                f"map other values into this range, such as np.minimum({name}, {size - 1}), or "
                "export the model with a larger table"
            )
            if indices.max() == size and indices.min() >= 1:
                hint = "indices count from 0; subtract 1"
            return (
                f"{name!r} has {int(indices[index])} in {batch.places(index[:1])}{many}; "
                f"{table!r} has {size} rows: 0 to {size - 1}\nhint: {hint}"
            )
    return None


def _tables(graph: onnx.GraphProto, name: str) -> Iterator[tuple[str, int]]:
    """Return the tables that an input indexes, with their numbers of rows."""
    names, constants = {name}, {t.name: t for t in graph.initializer}
    for node in graph.node:
        if node.input[:1] and node.input[0] in names and node.op_type in _PASS_THROUGH:
            names.update(node.output)
        elif node.op_type == "Gather" and node.input[1] in names:
            axis, table = next((a.i for a in node.attribute if a.name == "axis"), 0), node.input[0]
            constant = constants.get(table)
            size = constant.dims[axis] if constant else _static_size(graph, table, axis)
            if size is not None:
                yield table, size


def _label_hint(labels: np.ndarray, known: LabelClasses) -> str:
    if labels.max() == known.size and labels.min() >= 1:
        return "labels count from 0; subtract 1"
    ignored = ", ".join(map(str, sorted(known.ignored)))
    return f"rows with label {ignored} are ignored" if ignored else "labels count from 0"


def label_classes(model: onnx.ModelProto, name: str) -> LabelClasses | None:
    """Return the classes that the target ``name`` chooses from, if a loss determines them."""
    constants = {t.name: t for t in model.graph.initializer}
    return _classes_in(model.graph, {name}, constants)


def _classes_in(
    graph: onnx.GraphProto, labels: set[str], constants: Mapping[str, onnx.TensorProto]
) -> LabelClasses | None:
    """Return the classes of labels in a graph, or in the body of a Scan.

    Args:
        graph: the graph.
        labels: names of values that are labels; grows with values computed from them.
        constants: initializers of the model.
    """
    count, ignored = None, set[int]()
    for node in graph.node:
        given = {i for i, x in enumerate(node.input) if x in labels}
        if not given:
            continue
        if given & ({1, 2} if node.op_type == "Where" else {0}) and node.op_type in _PASS_THROUGH:
            labels.update(node.output)
        elif node.op_type == "Equal":
            ignored.update(_scalar_constants(constants, (x for x in node.input if x not in labels)))
        elif node.op_type == "Scan":
            body = next(a.g for a in node.attribute if a.name == "body")
            inner = _classes_in(body, {body.input[i].name for i in given}, constants)
            if inner is not None:
                count, ignored = inner.size, ignored | inner.ignored
        elif 1 in given and node.op_type == "Gather" and node.input[0] in constants:
            count = count or constants[node.input[0]].dims[0]  # one weight per class
        elif 1 in given and node.op_type in (*_LOSSES, "GatherElements"):
            attributes = {a.name: a.i for a in node.attribute}
            axis = 1 if node.op_type in _LOSSES else attributes.get("axis", 0)
            count = count or _static_size(graph, node.input[0], axis)
            if "ignore_index" in attributes:
                ignored.add(attributes["ignore_index"])
    return None if count is None else LabelClasses(count, frozenset(ignored))


def _scalar_constants(
    constants: Mapping[str, onnx.TensorProto], names: Iterator[str]
) -> Iterator[int]:
    for name in names:
        tensor = constants.get(name)
        if tensor is not None and not tensor.dims and not tensor.external_data:
            yield int(ir.serde.deserialize_tensor(tensor).numpy())


def _static_size(graph: onnx.GraphProto, name: str, axis: int) -> int | None:
    for value in (*graph.value_info, *graph.input, *graph.output):
        if value.name == name:
            dims: Any = value.type.tensor_type.shape.dim
            if -len(dims) <= axis < len(dims) and dims[axis].HasField("dim_value"):
                return dims[axis].dim_value
    return None
