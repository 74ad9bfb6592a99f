"""The table of rewritings, and what they write with: plain nodes at the file's own opset."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

DOMAIN = "ai.onnx.ml"
_AXES_AS_INPUT = 13  # the opset at which ReduceSum takes its axes as an input


class Writer:
    """Puts nodes in the place of one node; its numbers become initializers of the graph."""

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
        """Return a Constant: a setting that does not train."""
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
        """Return a new initializer that holds what training may change."""
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
        """Return the sums along the last axis, which stays."""
        if self.opset < _AXES_AS_INPUT:
            return self.op("ReduceSum", x, axes=[-1], keepdims=1)
        return self.op("ReduceSum", x, self.constant([-1], np.int64), keepdims=1)

    def _free(self, wanted: str) -> str:
        name, n = wanted, 2
        while name in self._taken:
            name, n = f"{wanted}.{n}", n + 1
        self._taken.add(name)
        return name


Rewriting = Callable[[Writer], Sequence[ir.Value] | None]
REWRITINGS: dict[str, Rewriting] = {}


def classical(*op_types: str) -> Callable[[Rewriting], Rewriting]:
    """Register what replaces an operator; it returns its outputs, ``None`` to leave it alone."""

    def register(function: Rewriting) -> Rewriting:
        REWRITINGS.update(dict.fromkeys(op_types, function))
        return function

    return register


def rewrite_classical(model: ir.Model) -> list[str]:
    """Rewrite the ``ai.onnx.ml`` nodes that have a form in standard operators, in place."""
    graph = model.graph
    chosen = [n for n in graph if n.domain == DOMAIN and n.op_type in REWRITINGS]
    if not chosen:
        return []
    taken: set[str | None] = {y.name for n in graph.all_nodes() for y in n.outputs}
    taken |= {x.name for x in graph.inputs} | set(graph.initializers)
    done: dict[str, int] = {}
    for node in chosen:
        outputs = REWRITINGS[node.op_type](Writer(model, node, taken))
        if outputs is None:
            continue
        _replace(graph, node, outputs)
        done[node.op_type] = done.get(node.op_type, 0) + 1
    if not any(n.domain == DOMAIN for n in graph.all_nodes()):
        model.opset_imports.pop(DOMAIN, None)
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
