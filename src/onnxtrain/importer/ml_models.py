"""Convert ai.onnx.ml operators to standard operators, at the opset of the file.

Linear models: coefficients and intercepts become the weight and bias of a Gemm, so they can train.
Preprocessing: scaling, binarization, imputation and normalization become elementwise operators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

ML_DOMAIN = "ai.onnx.ml"
_AXES_AS_INPUT = 13  # the opset at which ReduceSum takes its axes as an input


class NodeRewriter:
    """Builder for the nodes that replace one node; its weights become initializers."""

    def __init__(self, model: ir.Model, node: ir.Node, taken: set[str | None]) -> None:
        self.graph, self.node, self._taken = model.graph, node, taken
        self.opset = model.opset_imports.get("", 1)
        self.stem = node.name or next((y.name for y in node.outputs if y.name), "") or node.op_type

    def attribute(self, name: str, default: Any = None) -> Any:
        """Return an attribute of the node as a Python value."""
        attribute = self.node.attributes.get(name)
        if attribute is None:
            return default
        value = attribute.value
        return list(value) if isinstance(value, tuple | list) else value

    def floats(self, name: str) -> np.ndarray:
        """Return an attribute that lists floats, empty if it is absent."""
        return np.asarray(self.attribute(name, []), np.float32)

    def op(self, op_type: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
        """Return the output of a new standard node."""
        node = ir.node(op_type, list(inputs), attributes=attributes or None)
        node.outputs[0].name = self._free(f"{self.stem}.{op_type}")
        self.graph.insert_before(self.node, node)
        return node.outputs[0]

    def constant(self, array: Any, dtype: Any = np.float32) -> ir.Value:
        """Return the output of a Constant node, which does not train."""
        name = self._free(f"{self.stem}.constant")
        array = np.asarray(array, object if dtype is str else dtype)
        tensor = (
            ir.StringTensor([s.encode() for s in array.reshape(-1)], shape=ir.Shape(array.shape))
            if dtype is str
            else ir.Tensor(array, name=name)
        )
        attributes = {"value": ir.AttrTensor("value", tensor)}
        node = ir.node("Constant", [], attributes=attributes)
        node.outputs[0].name = name
        self.graph.insert_before(self.node, node)
        return node.outputs[0]

    def weight(self, name: str, array: np.ndarray) -> ir.Value:
        """Return a new initializer, which training may update."""
        name = self._free(f"{self.stem}.{name}")
        own = np.ascontiguousarray(array, np.float32)
        value = ir.Value(
            name=name,
            type=ir.TensorType(ir.DataType.FLOAT),
            shape=ir.Shape(own.shape),
            const_value=ir.Tensor(own, name=name),
        )
        self.graph.register_initializer(value)
        return value

    def float_input(self, i: int = 0) -> ir.Value:
        """Return an input as float32."""
        x = self.node.inputs[i]
        assert x is not None
        if x.dtype == ir.DataType.FLOAT:
            return x
        return self.op("Cast", x, to=int(ir.DataType.FLOAT))

    def row_sums(self, x: ir.Value) -> ir.Value:
        """Return the sums along the last axis, which is kept with size 1."""
        if self.opset < _AXES_AS_INPUT:
            return self.op("ReduceSum", x, axes=[-1], keepdims=1)
        return self.op("ReduceSum", x, self.constant([-1], np.int64), keepdims=1)

    def _free(self, wanted: str) -> str:
        name, n = wanted, 2
        while name in self._taken:
            name, n = f"{wanted}.{n}", n + 1
        self._taken.add(name)
        return name


Rewrite = Callable[[NodeRewriter], Sequence[ir.Value] | None]
REWRITES: dict[str, Rewrite] = {}


def ml_operator(*op_types: str) -> Callable[[Rewrite], Rewrite]:
    """Register a rewrite; it returns the new outputs, or ``None`` to leave the node unchanged."""

    def register(function: Rewrite) -> Rewrite:
        REWRITES.update(dict.fromkeys(op_types, function))
        return function

    return register


def rewrite_ml_operators(model: ir.Model) -> list[str]:
    """Replace ``ai.onnx.ml`` nodes by standard operators where possible, in place."""
    graph = model.graph
    chosen = [n for n in graph if n.domain == ML_DOMAIN and n.op_type in REWRITES]
    if not chosen:
        return []
    taken: set[str | None] = {y.name for n in graph.all_nodes() for y in n.outputs}
    taken |= {x.name for x in graph.inputs} | set(graph.initializers)
    done: dict[str, int] = {}
    for node in chosen:
        outputs = REWRITES[node.op_type](NodeRewriter(model, node, taken))
        if outputs is None:
            continue
        _replace(graph, node, outputs)
        done[node.op_type] = done.get(node.op_type, 0) + 1
    if not any(n.domain == ML_DOMAIN for n in graph.all_nodes()):
        model.opset_imports.pop(ML_DOMAIN, None)
    return [f"{op}: {n} node(s) became tensors of standard operators" for op, n in done.items()]


def _replace(graph: ir.Graph, node: ir.Node, outputs: Sequence[ir.Value]) -> None:
    for old, new in zip(list(node.outputs), outputs, strict=False):
        if not old.name:
            continue
        last = ir.node("Identity", [new])
        graph.insert_before(node, last)
        value = last.outputs[0]
        value.name, value.type, value.shape = old.name, old.type or new.type, old.shape or new.shape
        old.name = f"{old.name}.replaced"
        old.replace_all_uses_with(value, replace_graph_outputs=True)
    graph.remove(node, safe=True)


@ml_operator("Scaler")
def scaler(op: NodeRewriter) -> Sequence[ir.Value]:
    """``(x - offset) * scale``."""
    x = op.float_input()
    offset, scale = op.floats("offset"), op.floats("scale")
    if offset.size:
        x = op.op("Sub", x, op.constant(offset))
    return [op.op("Mul", x, op.constant(scale))] if scale.size else [op.op("Identity", x)]


@ml_operator("Binarizer")
def binarizer(op: NodeRewriter) -> Sequence[ir.Value]:
    """``1 if x > threshold else 0``."""
    above = op.op("Greater", op.float_input(), op.constant([op.attribute("threshold", 0.0)]))
    return [op.op("Cast", above, to=int(ir.DataType.FLOAT))]


@ml_operator("Imputer")
def imputer(op: NodeRewriter) -> Sequence[ir.Value] | None:
    """``imputed if x == replaced (or NaN) else x``."""
    values = op.floats("imputed_value_floats")
    x = op.node.inputs[0]
    if not values.size or x is None or x.dtype != ir.DataType.FLOAT:
        return None
    missing = op.attribute("replaced_value_float", 0.0)
    if np.isnan(missing):
        return [op.op("Where", op.op("IsNaN", x), op.constant(values), x)]
    # Equal accepts floats since opset 11; most such files are older.
    at = op.constant([missing])
    other = op.op("Or", op.op("Less", x, at), op.op("Greater", x, at))
    return [op.op("Where", op.op("Or", other, op.op("IsNaN", x)), x, op.constant(values))]


@ml_operator("Normalizer")
def normalizer(op: NodeRewriter) -> Sequence[ir.Value] | None:
    """``x / norm(x)`` by row; rows of zeros are unchanged."""
    norm = op.attribute("norm", "MAX")
    norm = norm.decode() if isinstance(norm, bytes) else norm
    x = op.float_input()
    if norm not in ("L1", "L2"):
        return None
    total = op.row_sums(op.op("Abs", x) if norm == "L1" else op.op("Mul", x, x))
    used = op.op("Greater", total, op.constant([0.0]))
    safe = op.op("Where", used, total, op.constant([1.0]))
    return [op.op("Div", x, safe if norm == "L1" else op.op("Sqrt", safe))]


@ml_operator("LinearRegressor")
def linear_regressor(op: NodeRewriter) -> Sequence[ir.Value] | None:
    """``X @ coefficients^T + intercepts``."""
    targets = op.attribute("targets", 1)
    return _regression(op, op.floats("coefficients"), op.floats("intercepts"), targets)


@ml_operator("SVMRegressor")
def svm_regressor(op: NodeRewriter) -> Sequence[ir.Value] | None:
    """Linear kernel only: the weight is the weighted sum of the support vectors."""
    vectors, coefficients = op.floats("support_vectors"), op.floats("coefficients")
    if _kernel_type(op) != "LINEAR" or op.attribute("one_class", 0):
        return None
    supports = op.attribute("n_supports", 0)
    if supports:
        coefficients = (coefficients[None, :] @ vectors.reshape(supports, -1)).reshape(-1)
    return _regression(op, coefficients, op.floats("rho")[:1], 1)


def _regression(
    op: NodeRewriter, weight: np.ndarray, bias: np.ndarray, targets: int
) -> Sequence[ir.Value] | None:
    if _string(op, "post_transform", "NONE") != "NONE" or not weight.size:
        return None
    bias = bias if bias.size else np.zeros(targets, np.float32)
    return [_gemm(op, weight.reshape(targets, -1), bias)]


@ml_operator("LinearClassifier")
def linear_classifier(op: NodeRewriter) -> Sequence[ir.Value] | None:
    """``scores = post_transform(X @ coefficients^T + intercepts)`` and the label of the largest."""
    labels = op.attribute("classlabels_ints") or _strings(op, "classlabels_strings")
    weight, bias = op.floats("coefficients"), op.floats("intercepts")
    transform = _string(op, "post_transform", "NONE")
    rows = bias.size if bias.size else len(labels)
    if transform not in ("NONE", "LOGISTIC", "SOFTMAX") or not weight.size or not labels:
        return None
    bias = bias if bias.size else np.zeros(rows, np.float32)
    scores = _gemm(op, weight.reshape(rows, -1), bias)
    if rows == 1 and len(labels) == 2:
        return _binary_scores(op, scores, labels)
    if rows != len(labels):
        return None
    at = op.op("ArgMax", scores, axis=1, keepdims=0)
    label = op.op("Gather", _labels(op, labels), at, axis=0)
    if transform == "LOGISTIC":
        scores = op.op("Sigmoid", scores)
    elif transform == "SOFTMAX":
        scores = op.op("Softmax", scores, axis=1)
    return [label, _columns(scores, rows)]


def _binary_scores(op: NodeRewriter, score: ir.Value, labels: list) -> Sequence[ir.Value]:
    """Two labels with one score: runtimes return ``1 - score`` as the score of the other label."""
    positive = op.op("Greater", score, op.constant([0.0]))
    at = op.op("Cast", positive, to=int(ir.DataType.INT64))
    flat = op.op("Reshape", at, op.constant([-1], np.int64))
    label = op.op("Gather", _labels(op, labels), flat, axis=0)
    if _string(op, "post_transform", "NONE") == "LOGISTIC":
        score = op.op("Sigmoid", score)
    other = op.op("Sub", op.constant([1.0]), score)
    return [label, _columns(op.op("Concat", other, score, axis=1), 2)]


@ml_operator("SVMClassifier")
def svm_classifier(op: NodeRewriter) -> Sequence[ir.Value] | None:
    """Linear kernel only: one hyperplane per pair of labels, from summed support vectors."""
    labels = op.attribute("classlabels_ints") or _strings(op, "classlabels_strings")
    counts = op.attribute("vectors_per_class", [])
    plain = _string(op, "post_transform", "NONE") == "NONE" and not op.attribute("prob_a")
    coefficients, classes = op.floats("coefficients"), len(labels)
    fits = classes > 1 and len(counts) == classes and sum(counts) > 0
    if _kernel_type(op) != "LINEAR" or not plain or not fits:
        return None
    if coefficients.size != (classes - 1) * sum(counts) or (coefficients >= 0).all():
        return None
    vectors = op.floats("support_vectors").reshape(sum(counts), -1)
    pairs = [(i, j) for i in range(classes) for j in range(i + 1, classes)]
    rho = op.floats("rho")
    planes = _pairwise_normals(coefficients.reshape(classes - 1, -1), vectors, counts, pairs)
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


def _pairwise_normals(
    coefficients: np.ndarray, vectors: np.ndarray, counts: list[int], pairs: list[tuple[int, int]]
) -> np.ndarray:
    """Return the normal of the hyperplane between each pair of classes."""
    ends = np.cumsum([0, *counts])
    rows = []
    for i, j in pairs:
        of_i, of_j = slice(ends[i], ends[i + 1]), slice(ends[j], ends[j + 1])
        own, other = coefficients[j - 1, of_i], coefficients[i, of_j]
        rows.append(own @ vectors[of_i] + other @ vectors[of_j])
    return np.asarray(rows, np.float32)


def _gemm(op: NodeRewriter, weight: np.ndarray, bias: np.ndarray) -> ir.Value:
    w, b = op.weight("coefficients", weight), op.weight("intercepts", bias)
    return _columns(op.op("Gemm", op.float_input(), w, b, transB=1), len(weight))


def _columns(scores: ir.Value, count: int) -> ir.Value:
    """Return a value with its type and rank recorded."""
    scores.type, scores.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([None, count])
    return scores


def _labels(op: NodeRewriter, labels: list) -> ir.Value:
    return op.constant(labels, str if isinstance(labels[0], str) else np.int64)


def _kernel_type(op: NodeRewriter) -> str:
    return _string(op, "kernel_type", "LINEAR")


def _strings(op: NodeRewriter, name: str) -> list[str]:
    return [s.decode() if isinstance(s, bytes) else s for s in op.attribute(name, [])]


def _string(op: NodeRewriter, name: str, default: str) -> str:
    value = op.attribute(name, default)
    return value.decode() if isinstance(value, bytes) else value
