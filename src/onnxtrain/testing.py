"""Gradient checks for custom rules: ``check_rule`` compares a rule with finite differences."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.autodiff.gradients import vjp
from onnxtrain.autodiff.rule_registry import NO_GRADIENT, RULES, USER_RULES, ZERO_GRADIENT
from onnxtrain.errors import OnnxTrainError

_MAX_ELEMENTS = 4096  # each element costs two runs of the operator
Forward = Callable[..., Any]


def check_rule(
    op: str,
    *inputs: Any,
    attributes: Mapping[str, Any] | None = None,
    forward: Forward | None = None,
    outputs: int = 1,
    step: float = 1e-5,
    tolerance: float = 1e-5,
    seed: int = 0,
) -> None:
    """Compare the gradient rule of an operator with finite differences, in float64.

    Args:
        op: ``"MyDomain::MyOp"``, or the name of a standard operator.
        inputs: inputs of the node. Gradients of float inputs are compared; others are constants.
            ``None`` omits an optional input. Keep floats away from kinks.
        attributes: attributes of the node.
        forward: a function that computes the operator: from arrays and attributes to an array or a
            tuple of arrays. Standard operators do not need it, unless the reference evaluator of
            onnx rounds them (Erf).
        outputs: number of outputs of the node.
        step: step size of the differences.
        tolerance: largest error, relative to the largest element of the gradient.
        seed: seed for random gradients of the outputs.

    Raises:
        AssertionError: the rule is wrong; the message has the input and the error.
        OnnxTrainError: the operator has no rule, or cannot be compared.

    >>> check_rule("Tanh", np.linspace(-2, 2, 5))
    """
    key = op.removeprefix("::").removeprefix("ai.onnx::")
    if not any(key in table for table in (USER_RULES, RULES, ZERO_GRADIENT, NO_GRADIENT)):
        raise OnnxTrainError(
            f"no gradient rule for {op}\nhint: register one with onnxtrain.register_vjp({op!r})"
        )
    arrays = [None if x is None else _as_float64(np.asarray(x)) for x in inputs]
    wrt = [i for i, a in enumerate(arrays) if a is not None and a.dtype.kind == "f"]
    if not wrt or sum(arrays[i].size for i in wrt) > _MAX_ELEMENTS:  # type: ignore[union-attr]
        raise OnnxTrainError(f"{op}: inputs must have between 1 and {_MAX_ELEMENTS} float elements")
    node = _Node(key, dict(attributes or {}), forward, outputs)
    values = node.run(arrays)
    rng = np.random.default_rng(seed)
    weights = [rng.standard_normal(y.shape) if y.dtype.kind == "f" else None for y in values]
    if all(w is None for w in weights):
        raise OnnxTrainError(f"{op}: no output is a float")
    ours = node.gradients(arrays, wrt, values, weights)
    for index, gradient in zip(wrt, ours, strict=True):
        numeric = _differences(node, arrays, index, weights, step)
        _compare(f"{op}, input {index}", gradient, numeric, tolerance)


def _as_float64(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64) if array.dtype.kind == "f" else array


class _Node:
    """One node, computed by the reference evaluator of onnx or by a function."""

    def __init__(
        self, key: str, attributes: dict[str, Any], forward: Forward | None, outputs: int
    ) -> None:
        self.domain, _, self.op = key.rpartition("::")
        self.attributes, self.forward, self.count = attributes, forward, outputs
        if self.domain and forward is None:
            raise OnnxTrainError(
                f"{key} is not a standard operator\n"
                "hint: pass its computation, forward=lambda x: ..."
            )

    def run(self, arrays: Sequence[np.ndarray | None]) -> list[np.ndarray]:
        """Return the outputs."""
        if self.forward is not None:
            result = self.forward(*arrays, **self.attributes)
            values = list(result) if isinstance(result, tuple | list) else [result]
        else:
            names = [f"y{i}" for i in range(self.count)]
            values = list(_evaluate(self.model(arrays, None), names, self._feeds(arrays), []))
        if len(values) != self.count:
            raise OnnxTrainError(f"{self.op} returns {len(values)} outputs, expected {self.count}")
        return [np.asarray(v) for v in values]

    def _feeds(self, arrays: Sequence[np.ndarray | None]) -> dict[str, np.ndarray]:
        floats = enumerate(arrays)
        return {f"x{i}": a for i, a in floats if a is not None and a.dtype.kind == "f"}

    def model(
        self, arrays: Sequence[np.ndarray | None], values: Sequence[np.ndarray] | None
    ) -> onnx.ModelProto:
        """Return a model of this node; ``values`` determine dtypes and shapes of its outputs."""
        inputs: list[ir.Value | None] = []
        constants: list[ir.Value] = []
        for i, array in enumerate(arrays):
            if array is None:
                inputs.append(None)
                continue
            tensor = ir.Tensor(array, name=f"x{i}")
            value = ir.Value(name=f"x{i}", type=ir.TensorType(tensor.dtype), shape=tensor.shape)
            if array.dtype.kind != "f":
                value.const_value = tensor
                constants.append(value)
            inputs.append(value)
        attributes = [ir.convenience.convert_attribute(n, v) for n, v in self.attributes.items()]
        node = ir.Node(self.domain, self.op, inputs, attributes, num_outputs=self.count)
        for i, y in enumerate(node.outputs):
            y.name = f"y{i}"
            if values is not None:
                y.type = ir.TensorType(ir.DataType.from_numpy(values[i].dtype))
                y.shape = ir.Shape(values[i].shape)
        free = [v for v in inputs if v is not None and v.const_value is None]
        opsets = {"": 21} | ({self.domain: 1} if self.domain else {})
        graph = ir.Graph(
            free,
            node.outputs,
            nodes=[node],
            initializers=constants,
            opset_imports=opsets,
            name="rule",
        )
        return ir.to_proto(ir.Model(graph, ir_version=10))

    def gradients(
        self,
        arrays: Sequence[np.ndarray | None],
        wrt: Sequence[int],
        values: Sequence[np.ndarray],
        weights: Sequence[np.ndarray | None],
    ) -> list[np.ndarray]:
        """Return the gradients that the rule computes."""
        floats = [f"y{i}" for i, w in enumerate(weights) if w is not None]
        result = vjp(self.model(arrays, values), [f"x{i}" for i in wrt], floats)
        given = {f"y{i}_grad": w for i, w in enumerate(weights) if w is not None}
        wanted = [f"x{i}_grad" for i in wrt]
        return _evaluate(result, wanted, {**self._feeds(arrays), **given}, self._own())

    def _own(self) -> list[Any]:
        if self.forward is None:
            return []
        from onnx.reference.op_run import OpRun

        forward = self.forward

        def run(_: Any, *inputs: Any, **attributes: Any) -> tuple[Any, ...]:
            result = forward(*inputs, **attributes)
            return tuple(result) if isinstance(result, tuple | list) else (result,)

        return [type(self.op, (OpRun,), {"op_domain": self.domain, "_run": run})]


def _evaluate(
    model: onnx.ModelProto, names: list[str], feeds: Mapping[str, np.ndarray], own: list[Any]
) -> list[np.ndarray]:
    from onnx.reference import ReferenceEvaluator

    there = {v.name for v in model.graph.input}
    given = {n: a for n, a in feeds.items() if n in there}
    return [np.asarray(y) for y in ReferenceEvaluator(model, new_ops=own).run(names, given)]


def _differences(
    node: _Node,
    arrays: Sequence[np.ndarray | None],
    index: int,
    weights: Sequence[np.ndarray | None],
    step: float,
) -> np.ndarray:
    """Return the gradient of the weighted sum of outputs, by central differences."""
    middle = arrays[index]
    assert middle is not None
    gradient = np.zeros_like(middle)

    def total(element: tuple[int, ...], by: float) -> float:
        moved = middle.copy()
        moved[element] += by
        changed = [moved if i == index else a for i, a in enumerate(arrays)]
        pairs = zip(node.run(changed), weights, strict=True)
        return float(sum((y * w).sum() for y, w in pairs if w is not None))

    for element in itertools.product(*map(range, middle.shape)):
        gradient[element] = (total(element, step) - total(element, -step)) / (2 * step)
    return gradient


def _compare(what: str, ours: np.ndarray, numeric: np.ndarray, tolerance: float) -> None:
    if ours.shape != numeric.shape:
        raise AssertionError(
            f"{what}: the rule returns shape {ours.shape}, expected {numeric.shape}"
        )
    off = float(np.abs(ours - numeric).max(initial=0.0))
    limit = tolerance * max(1.0, float(np.abs(numeric).max(initial=0.0)))
    if not off <= limit:  # a NaN is wrong as well
        index = np.unravel_index(np.argmax(np.abs(ours - numeric)), ours.shape)
        at = tuple(int(i) for i in index)
        raise AssertionError(
            f"{what}: the gradient is off by {off:.3g} (limit {limit:.3g}): at {at} the rule "
            f"returns {ours[at]:.6g}, finite differences {numeric[at]:.6g}"
        )


__all__ = ["check_rule"]
