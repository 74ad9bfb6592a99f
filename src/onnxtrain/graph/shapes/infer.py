"""Shape inference over a whole graph, keeping what the exporter knew."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from onnxtrain.errors import PrepareError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.captured_values import subgraphs_of
from onnxtrain.graph.nodes import is_op
from onnxtrain.graph.shapes import dims as D
from onnxtrain.graph.shapes.dims import Dim
from onnxtrain.graph.shapes.negative_sizes import mark_branches

Rewrite = Callable[[ir.Node], bool]
"""Replaces a node whose inputs are typed by nodes that are typed too; tells whether it did."""


def infer_shapes(graph: ir.Graph, opset: int, rewrite: Rewrite | None = None) -> None:
    """Set type and shape of every value; unify the exporter's symbols with inferred sizes.

    An exporter may call a size ``s7`` where inference finds ``2*batch``: the inferred form wins,
    and the exporter's name is replaced by it from there on. ``rewrite`` is asked about each node
    in front of its inference, so that operators nobody can infer are replaced on the way.
    """
    _Inference(opset, rewrite).run(graph)


def invented(d: Dim) -> bool:
    """Return whether a size is a name that onnx gave it because it knew nothing."""
    return isinstance(d, str) and d.startswith("unk__")


class _Inference:
    def __init__(self, opset: int, rewrite: Rewrite | None = None) -> None:
        self.opset = opset
        self.rewrite = rewrite
        self.alias: dict[str, Dim] = {}
        self.inputs: set[str] = set()

    def run(self, graph: ir.Graph) -> None:
        for x in graph.inputs:
            for d in S.dims_of(x) or ():
                self.inputs |= D.symbols(d)
        for x in graph.initializers.values():
            if x.const_value is not None and x.shape is None:
                x.shape = ir.Shape(x.const_value.shape.numpy())
                x.type = ir.TensorType(x.const_value.dtype)
        for node in list(graph):
            if self.rewrite is None or not self.rewrite(node):
                self._node(node)

    def _node(self, node: ir.Node) -> None:
        declared = [(y.type, S.dims_of(y)) for y in node.outputs]
        self._enter_bodies(node)
        S.infer_node(node, node.version or self.opset)
        for y, (type_, dims) in zip(node.outputs, declared, strict=True):
            if y.type is None:
                y.type = type_
            self._merge(y, dims)

    def _merge(self, y: ir.Value, declared: tuple[Dim, ...] | None) -> None:
        if declared is None:
            return
        declared = tuple(D.substitute(d, self.alias) for d in declared)
        inferred = S.dims_of(y)
        if inferred is None:
            S.set_dims(y, declared)
            return
        if len(inferred) != len(declared):
            return
        merged: list[Dim] = []
        for i, (a, b) in enumerate(zip(inferred, declared, strict=True)):
            # Inference knew nothing, and gave a name of ours or of onnx's.
            own = a == D.symbol(f"{y.name}.{i}") or invented(a)
            if own and b is not None:
                merged.append(b)
                continue
            merged.append(a)
            if isinstance(b, str) and b != a and b.isidentifier() and b not in self.inputs:
                self.alias.setdefault(b, a)
        S.set_dims(y, merged)

    def _enter_bodies(self, node: ir.Node) -> None:
        mark_branches(node)
        if is_op(node, "Loop", "Scan"):
            try:
                self._type_body_inputs(node)
            except S.UNFIT as error:
                raise PrepareError(S.unfit(node, error)) from error
        if is_op(node, "Loop"):
            self._loop_body(node)
            return
        for body in subgraphs_of(node):
            self.run(body)

    def _loop_body(self, node: ir.Node) -> None:
        """Find which carried values keep their shape, by assuming it and looking at the result."""
        body = node.attributes["body"].as_graph()
        if self.rewrite is not None:  # before sizes are assumed that may turn out to change
            self.run(body)
        declared = [(y, y.shape) for n in body.all_nodes() for y in n.outputs]
        inner = body.inputs[2:]
        before = [x.shape for x in inner]
        for x, outer in zip(inner, node.inputs[2:], strict=False):
            dims = None if outer is None else S.dims_of(outer)
            known = S.dims_of(x)
            if dims is not None and (known is None or len(known) == len(dims)):
                S.set_dims(x, dims)
        for _ in range(len(inner) + 1):
            self.run(body)
            changing = [
                i
                for i, (x, y) in enumerate(zip(inner, body.outputs[1:], strict=False))
                if S.dims_of(x) != S.dims_of(y) and x.shape is not before[i]
            ]
            if not changing:
                return
            for y, shape in declared:
                y.shape = shape
            for i in changing:
                inner[i].shape = before[i]

    def _type_body_inputs(self, node: ir.Node) -> None:
        body = node.attributes["body"].as_graph()
        if node.op_type == "Loop":
            carried = zip(body.inputs[2:], node.inputs[2:], strict=False)
            kinds = (ir.DataType.INT64, ir.DataType.BOOL)
            for inner, kind in zip(body.inputs[:2], kinds, strict=True):
                inner.type = inner.type or ir.TensorType(kind)
                if inner.shape is None:
                    inner.shape = ir.Shape([])
        else:
            scans = node.attributes["num_scan_inputs"].as_int()
            n = len(node.inputs) - scans
            carried = zip(body.inputs[:n], node.inputs[:n], strict=False)
            given = node.attributes.get("scan_input_axes")
            axes = list(given.as_ints()) if given is not None else [0] * scans
            for inner, outer, axis in zip(body.inputs[n:], node.inputs[n:], axes, strict=True):
                dims = None if outer is None else S.dims_of(outer)
                if outer is not None:
                    inner.type = outer.type or inner.type
                if dims is not None:
                    axis %= len(dims)
                    S.set_dims(inner, [d for i, d in enumerate(dims) if i != axis])
        for inner, outer in carried:
            if outer is None:
                continue
            inner.type = inner.type or outer.type
            if inner.shape is None and node.op_type == "Scan":
                inner.shape = outer.shape
