"""Where values go: which depend on inputs, which enter and leave bodies, what made them."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from onnxtrain.graph.captured_values import captured, subgraphs_of
from onnxtrain.graph.nodes import is_op, key_of
from onnxtrain.graph.roles import table as T

_ON_INPUT = T.MOVES | T.ARITHMETIC | {"Concat", "Clip", "Resize", "Gather", "Unsqueeze"}


class Flow:
    """What the roles of tensors need to know of a graph."""

    def __init__(self, graph: ir.Graph) -> None:
        self._fixed: set[ir.Value] = set()  # depends on no input
        self._on_input: set[ir.Value] = set()  # an input, moved and scaled at most
        self._leaves: dict[ir.Value, list[ir.Value]] = {}  # result of a body -> outputs of its node
        self._results = set(graph.outputs)
        self._on_input.update(x for x in graph.inputs if x.name not in graph.initializers)
        self._visit(graph)

    def is_static(self, node: ir.Node) -> bool:
        """Return whether a node works on constants alone."""
        return all(y in self._fixed for y in node.outputs)

    def is_result(self, value: ir.Value) -> bool:
        """Return whether a value is an output of the whole graph."""
        return value in self._results

    def is_on_input(self, node: ir.Node) -> bool:
        """Return whether what a node combines with a constant is an input, scaled at most."""
        return any(x in self._on_input for x in node.inputs if x is not None)

    def enters_as(self, node: ir.Node, i: int) -> list[ir.Value]:
        """Return what an input of Loop or Scan is called in the body."""
        (body,) = subgraphs_of(node)
        return [body.inputs[i]] if i < len(body.inputs) else []

    def leaves_as(self, value: ir.Value) -> list[ir.Value]:
        """Return what the result of a body is called outside."""
        return self._leaves.get(value, [])

    def behind_moves(self, value: ir.Value) -> ir.Node | None:
        """Return the node that made a value, apart from what only moved it."""
        node = value.producer()
        while node is not None and key_of(node) in T.MOVES and node.inputs[0] is not None:
            node = node.inputs[0].producer()
        return node

    def product_before(self, node: ir.Node) -> ir.Node | None:
        """Return the product that a node adds to, if any."""
        products = (self._product_of(x) for x in node.inputs if x is not None)
        return next((p for p in products if p is not None), None)

    def has_one_feature(self, node: ir.Node) -> bool:
        """Return whether a node adds to a product that has one column or channel."""
        for x in node.inputs:
            product = None if x is None else self._product_of(x)
            if product is None or len(product.inputs) < 2:
                continue
            w = product.inputs[1]
            dims = None if w is None or w.const_value is None else w.const_value.shape.numpy()
            at = {"Conv": 0, "FusedConv": 0, "ConvTranspose": 1}.get(product.op_type, -1)
            if dims and dims[at] == 1:
                return True
        return False

    def becomes_angles(self, node: ir.Node) -> bool:
        """Return whether a result is read by both Sin and Cos, and by nothing else."""
        readers: set[str] = set()
        pending, seen = list(node.outputs), set(node.outputs)
        while pending:
            for reader, _ in pending.pop().uses():
                key = key_of(reader)
                if key in T.MOVES or key == "Concat":
                    new = [y for y in reader.outputs if y not in seen]
                    seen.update(new)
                    pending.extend(new)
                else:
                    readers.add(key)
        return readers == {"Sin", "Cos"}

    def scales_integers(self, node: ir.Node) -> bool:
        """Return whether a node brings the result of an integer product back to floats."""
        makers = [self.behind_moves(x) for x in node.inputs if x is not None]
        return any(
            is_op(m, "DynamicQuantizeLinear", "MatMulInteger", "ConvInteger")
            for m in makers
            if m is not None
        )

    def _product_of(self, value: ir.Value) -> ir.Node | None:
        node = self.behind_moves(value)
        return node if node is not None and key_of(node) in T.PRODUCTS else None

    def _visit(self, graph: ir.Graph) -> None:
        self._fixed.update(graph.initializers.values())
        for node in graph:
            for body in subgraphs_of(node):
                if is_op(node, "Scan"):
                    self._scan_inputs(node, body)
                self._visit(body)
                self._note_results(node, body)
            sources = [x for x in (*node.inputs, *captured(node)) if x is not None]
            random = key_of(node) in T.RANDOM or is_op(node, "Loop")
            if not random and all(x in self._fixed for x in sources):
                self._fixed.update(node.outputs)
            elif key_of(node) in _ON_INPUT and all(
                x in self._on_input or x in self._fixed for x in sources
            ):
                self._on_input.update(node.outputs)

    def _scan_inputs(self, node: ir.Node, body: ir.Graph) -> None:
        scanned = node.attributes["num_scan_inputs"].as_int()
        first = len(node.inputs) - scanned
        for inner, outer in zip(body.inputs[first:], node.inputs[first:], strict=False):
            if outer in self._fixed:
                self._fixed.add(inner)

    def _note_results(self, node: ir.Node, body: ir.Graph) -> None:
        skipped = 1 if is_op(node, "Loop") else 0
        for inner, outer in zip(body.outputs[skipped:], node.outputs, strict=False):
            self._leaves.setdefault(inner, []).append(outer)


def float_tensors(graph: ir.Graph) -> Iterator[ir.Value]:
    """Return the initializers and the outputs of Constant nodes, bodies included, in order."""
    yield from graph.initializers.values()
    for node in graph:
        if is_op(node, "Constant"):
            yield node.outputs[0]
        for body in subgraphs_of(node):
            yield from float_tensors(body)
