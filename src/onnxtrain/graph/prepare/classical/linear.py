"""Linear models: coefficients and intercepts become a weight and a bias of Gemm."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain.graph.prepare.classical.rewrite import Writer, classical


@classical("LinearRegressor")
def linear_regressor(op: Writer) -> Sequence[ir.Value] | None:
    """``X @ coefficients^T + intercepts``."""
    targets = op.attribute("targets", 1)
    return _regression(op, op.floats("coefficients"), op.floats("intercepts"), targets)


@classical("SVMRegressor")
def svm_regressor(op: Writer) -> Sequence[ir.Value] | None:
    """With a linear kernel, the support vectors add up to one weight."""
    vectors, coefficients = op.floats("support_vectors"), op.floats("coefficients")
    if _kernel(op) != "LINEAR" or op.attribute("one_class", 0):
        return None
    supports = op.attribute("n_supports", 0)
    if supports:
        coefficients = (coefficients[None, :] @ vectors.reshape(supports, -1)).reshape(-1)
    return _regression(op, coefficients, op.floats("rho")[:1], 1)


def _regression(
    op: Writer, weight: np.ndarray, bias: np.ndarray, targets: int
) -> Sequence[ir.Value] | None:
    if _text(op, "post_transform", "NONE") != "NONE" or not weight.size:
        return None
    bias = bias if bias.size else np.zeros(targets, np.float32)
    return [_gemm(op, weight.reshape(targets, -1), bias)]


@classical("LinearClassifier")
def linear_classifier(op: Writer) -> Sequence[ir.Value] | None:
    """The label of the largest score, and the scores, which a function may end."""
    labels = op.attribute("classlabels_ints") or _strings(op, "classlabels_strings")
    weight, bias = op.floats("coefficients"), op.floats("intercepts")
    transform = _text(op, "post_transform", "NONE")
    rows = bias.size if bias.size else len(labels)
    if transform not in ("NONE", "LOGISTIC", "SOFTMAX") or not weight.size or not labels:
        return None
    bias = bias if bias.size else np.zeros(rows, np.float32)
    scores = _gemm(op, weight.reshape(rows, -1), bias)
    if rows == 1 and len(labels) == 2:
        return _two_labels(op, scores, labels)
    if rows != len(labels):
        return None
    at = op.op("ArgMax", scores, axis=1, keepdims=0)
    label = op.op("Gather", _labels(op, labels), at, axis=0)
    if transform == "LOGISTIC":
        scores = op.op("Sigmoid", scores)
    elif transform == "SOFTMAX":
        scores = op.op("Softmax", scores, axis=1)
    return [label, _columns(scores, rows)]


def _two_labels(op: Writer, score: ir.Value, labels: list) -> Sequence[ir.Value]:
    """One score that tells two labels apart: runtimes give ``1 - score`` beside it."""
    positive = op.op("Greater", score, op.constant([0.0]))
    at = op.op("Cast", positive, to=int(ir.DataType.INT64))
    flat = op.op("Reshape", at, op.constant([-1], np.int64))
    label = op.op("Gather", _labels(op, labels), flat, axis=0)
    if _text(op, "post_transform", "NONE") == "LOGISTIC":
        score = op.op("Sigmoid", score)
    other = op.op("Sub", op.constant([1.0]), score)
    return [label, _columns(op.op("Concat", other, score, axis=1), 2)]


@classical("SVMClassifier")
def svm_classifier(op: Writer) -> Sequence[ir.Value] | None:
    """With a linear kernel, a hyperplane for each two labels: its support vectors add up."""
    labels = op.attribute("classlabels_ints") or _strings(op, "classlabels_strings")
    counts = op.attribute("vectors_per_class", [])
    plain = _text(op, "post_transform", "NONE") == "NONE" and not op.attribute("prob_a")
    coefficients, classes = op.floats("coefficients"), len(labels)
    fits = classes > 1 and len(counts) == classes and sum(counts) > 0
    if _kernel(op) != "LINEAR" or not plain or not fits:
        return None
    if coefficients.size != (classes - 1) * sum(counts) or (coefficients >= 0).all():
        return None
    vectors = op.floats("support_vectors").reshape(sum(counts), -1)
    pairs = [(i, j) for i in range(classes) for j in range(i + 1, classes)]
    rho = op.floats("rho")
    planes = _planes(coefficients.reshape(classes - 1, -1), vectors, counts, pairs)
    scores = _gemm(op, planes, rho if rho.size == len(pairs) else np.repeat(rho[:1], len(pairs)))
    # A positive score of a pair is a vote for the first of the two.
    positive = op.op("Greater", scores, op.constant([0.0]))
    votes = op.op("Cast", positive, to=int(ir.DataType.FLOAT))
    first, second = (np.eye(classes)[[pair[k] for pair in pairs]] for k in (0, 1))
    against = op.op("Sub", op.constant([1.0]), votes)
    total = op.op(
        "Add",
        op.op("MatMul", votes, op.constant(first)),
        op.op("MatMul", against, op.constant(second)),
    )
    at = op.op("ArgMax", total, axis=1, keepdims=0)
    label = op.op("Gather", _labels(op, labels), at, axis=0)
    if classes == 2:
        scores = op.op("Concat", op.op("Neg", scores), scores, axis=1)
    return [label, _columns(scores, max(len(pairs), 2))]


def _planes(
    coefficients: np.ndarray, vectors: np.ndarray, counts: list[int], pairs: list[tuple[int, int]]
) -> np.ndarray:
    """Return the normal of the plane between each two classes."""
    ends = np.cumsum([0, *counts])
    rows = []
    for i, j in pairs:
        of_i, of_j = slice(ends[i], ends[i + 1]), slice(ends[j], ends[j + 1])
        own, other = coefficients[j - 1, of_i], coefficients[i, of_j]
        rows.append(own @ vectors[of_i] + other @ vectors[of_j])
    return np.asarray(rows, np.float32)


def _gemm(op: Writer, weight: np.ndarray, bias: np.ndarray) -> ir.Value:
    w, b = op.weight("coefficients", weight), op.weight("intercepts", bias)
    return _columns(op.op("Gemm", op.float_input(), w, b, transB=1), len(weight))


def _columns(scores: ir.Value, count: int) -> ir.Value:
    """Return a value with its type and rank recorded."""
    scores.type, scores.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([None, count])
    return scores


def _labels(op: Writer, labels: list) -> ir.Value:
    return op.constant(labels, str if isinstance(labels[0], str) else np.int64)


def _kernel(op: Writer) -> str:
    return _text(op, "kernel_type", "LINEAR")


def _strings(op: Writer, name: str) -> list[str]:
    return [s.decode() if isinstance(s, bytes) else s for s in op.attribute(name, [])]


def _text(op: Writer, name: str, default: str) -> str:
    value = op.attribute(name, default)
    return value.decode() if isinstance(value, bytes) else value
