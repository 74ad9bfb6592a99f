"""Rewrites of loops over time, in which recurrent layers run.

- `hoist_from_scans` (CUDA): elementwise operators that need no state leave the loop.
- `unroll_scans` (CUDA): a loop of a known number of steps becomes copies of its body. onnxruntime
  runs the body of a Scan from the host, node by node, and cannot capture it as a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain import thresholds as T
from onnxtrain.expand.control_flow import RECURRENT, int_per_value, unroll
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder, replace_value
from onnxtrain.graph.nodes import is_op, nodes, subgraphs_of

_ELEMENTWISE = ("Add", "Mul", "Neg", "Sub")
_Stack = tuple[ir.Value, int]
"""The values of all steps, and the direction in which the loop reads them."""


def hoist_from_scans(model: ir.Model, op: OpBuilder) -> int:
    """Compute what depends on the slices of a step only for all steps at once; return how many.

        before:  Scan(s, ys) { ... Mul(ds, Sub(1, Mul(y, y))) ... }
        after:   Scan(s, Sub(1, Mul(ys, ys))) { ... Mul(ds, d) ... }

    In gradients these are the derivatives of the activations. In the layers of ``expand``, whose
    gates are bounded, factors are then gathered: ``Mul(Mul(ds, a), b)`` becomes ``Mul(ds, ab)``,
    and ``Concat(Mul(dc, a), Mul(ds, b))`` becomes ``Mul(Concat(dc, ds), Concat(a, b))``.
    """
    return sum(_Hoist(op, node).run() for node in nodes(model.graph, "Scan"))


class _Hoist:
    """Moves operators out of the body of a Scan.

    Attributes:
        stacks: values of the body that are known for all steps.
        factored: other values of the body, as the Concat of some values times a stack.
    """

    def __init__(self, op: OpBuilder, node: ir.Node) -> None:
        self.op, self.node = op, node
        self.body = node.attributes["body"].as_graph()
        self.stacks: dict[ir.Value, _Stack] = {}
        self.factored: dict[ir.Value, tuple[list[ir.Value], _Stack]] = {}
        op.position = node
        first = len(node.inputs) - node.attributes["num_scan_inputs"].as_int()
        scans = node.inputs[first:]
        axes, turns = (
            int_per_value(node, f"scan_input_{n}", scans) for n in ("axes", "directions")
        )
        inner = self.body.inputs[first:]
        for x, outer, axis, turn in zip(inner, scans, axes, turns, strict=True):
            if outer is not None and not axis and S.is_float(outer):
                self.stacks[x] = outer, turn

    def run(self) -> int:
        """Return how many operators left the body."""
        moved = [n for n in nodes(self.body, *_ELEMENTWISE, "Split") if self._hoist(n)]
        if self.node.meta.get(RECURRENT):
            self._factor()
        for n in moved:
            for y in n.outputs:
                uses = [u for u in y.uses() if u.node not in moved]
                if uses or y in self.body.outputs:
                    replace_value(y, self._slice(y, self.stacks[y]), uses)
        self.body.remove(reversed(moved), safe=True)
        return len(moved)

    def _hoist(self, n: ir.Node) -> bool:
        """Compute a node outside for all steps, if its inputs are known there."""
        known = [x for x in n.inputs if x in self.stacks]
        others = [x for x in n.inputs if x not in self.stacks]
        if not known or not self._alike(known):
            return False
        attributes = {k: a.value for k, a in n.attributes.items()}
        if is_op(n, "Split"):
            rank = len(S.dims_of(known[0]) or ())
            if any(S.constant_of(x) is None for x in others if x is not None):
                return False
            attributes["axis"] = attributes.get("axis", 0) % rank + 1
        elif any(x is None or _is_not_scalar(x) for x in others) or not S.same_shape(
            n.outputs[0], known[0]
        ):
            return False  # a constant of higher rank would add axes to each slice
        outer = [self.stacks[x][0] if x in self.stacks else self._outside(x) for x in n.inputs]
        made = self.op.emit(n.op_type, *outer, _outputs=len(n.outputs), **attributes)
        turn = self.stacks[known[0]][1]
        for y, stack in zip(n.outputs, _outputs(made), strict=True):
            self.stacks[y] = stack, turn
        return True

    def _outside(self, x: ir.Value | None) -> ir.Value | None:
        """Return a constant of the body as one of the graph around it."""
        array = None if x is None else S.constant_of(x)
        return x if x is None or array is None else self.op.const(array, x.dtype)

    def _alike(self, values: Sequence[ir.Value]) -> bool:
        """Return whether values have equal shapes, and the loop reads them in one direction."""
        turns = {self.stacks[x][1] for x in values}
        return len(turns) == 1 and all(S.same_shape(x, values[0]) for x in values)

    def _factor(self) -> None:
        """Gather the factors of products and of their concatenations."""
        absorbed: set[ir.Value] = set()
        for n in nodes(self.body, "Concat", "Mul"):
            y = n.outputs[0]
            if y in self.stacks or any(x is None for x in n.inputs):
                continue
            inputs = [x for x in n.inputs if x is not None]
            product = is_op(n, "Mul")
            found = self._product(*inputs) if product else self._concatenation(n, inputs)
            if found is not None:
                self.factored[y] = found
                absorbed.update(x for x in inputs if x in self.factored and self._read_once(x))
        for y, (bases, stack) in self.factored.items():
            n = y.producer()
            assert n is not None
            if y in absorbed or not absorbed.intersection(n.inputs):
                continue
            inside = OpBuilder(
                self.body, self.op.prefix, target=self.op.target, before=n, parent=self.op
            )
            joined = bases[0] if len(bases) == 1 else inside.Concat(*bases, axis=-1)
            new = inside.Mul(joined, self._slice(y, stack))
            new.type = y.type
            replace_value(y, new, list(y.uses()))

    def _read_once(self, x: ir.Value) -> bool:
        return len(x.uses()) == 1 and x not in self.body.outputs

    def _product(self, a: ir.Value, b: ir.Value) -> tuple[list[ir.Value], _Stack] | None:
        """Factor a Mul of which one operand is known for all steps."""
        x, s = (a, b) if b in self.stacks else (b, a)
        if s not in self.stacks or not S.same_shape(x, s):
            return None
        stack, turn = self.stacks[s]
        if x not in self.factored or not self._read_once(x) or self.factored[x][1][1] != turn:
            return [x], (stack, turn)
        bases, (inner, _) = self.factored[x]
        return bases, (self.op.Mul(inner, stack), turn)

    def _concatenation(
        self, n: ir.Node, inputs: Sequence[ir.Value]
    ) -> tuple[list[ir.Value], _Stack] | None:
        """Factor a Concat of the last axis whose operands all have factors."""
        rank = len(S.dims_of(inputs[0]) or ())
        last = n.attributes["axis"].as_int() % max(rank, 1) == rank - 1
        if not last or any(x not in self.factored or not self._read_once(x) for x in inputs):
            return None
        parts = [self.factored[x] for x in inputs]
        turns = {turn for _, (_, turn) in parts}
        if len(turns) > 1:
            return None
        stack = self.op.Concat(*(s for _, (s, _) in parts), axis=-1)
        return [x for bases, _ in parts for x in bases], (stack, turns.pop())

    def _slice(self, like: ir.Value, stack: _Stack) -> ir.Value:
        """Return a new input of the body: the slice of a stack."""
        node = self.node
        scans = node.inputs[-node.attributes["num_scan_inputs"].as_int() :]
        for name, value in (("axes", 0), ("directions", stack[1])):
            key = f"scan_input_{name}"
            node.attributes[key] = ir.AttrInt64s(key, [*int_per_value(node, key, scans), value])
        node.attributes["num_scan_inputs"] = ir.AttrInt64("num_scan_inputs", len(scans) + 1)
        node.resize_inputs(len(node.inputs) + 1)
        node.replace_input_with(len(node.inputs) - 1, stack[0])
        name = self.op.names.fresh(f"{like.name}.slice")
        inner = ir.Value(name=name, type=like.type, shape=like.shape)
        self.body.inputs.append(inner)
        return inner


def _is_not_scalar(x: ir.Value) -> bool:
    array = S.constant_of(x)
    return array is None or array.size != 1


def unroll_scans(model: ir.Model, op: OpBuilder) -> int:
    """Replace Scan nodes by a copy of their body for each step; return how many.

        before:  s, ys = Scan(s0, xs)
        after:   s1, y1 = body(s0, xs[0]);  s2, y2 = body(s1, xs[1]);  ...  ys = Concat(y1, y2 ...)

    The backward loop reads values of the forward loop step by step: without the Concat.
    """
    parts: dict[ir.Value, Sequence[ir.Value]] = {}
    return sum(_unroll(op, node, parts) for node in nodes(model.graph, "Scan"))


def _unroll(op: OpBuilder, node: ir.Node, parts: dict[ir.Value, Sequence[ir.Value]]) -> int:
    body = node.attributes["body"].as_graph()
    inputs = [x for x in node.inputs if x is not None]
    if len(inputs) < len(node.inputs) or any(any(subgraphs_of(n)) for n in body):
        return 0
    op.position = node

    def split(x: ir.Value, axis: int, steps: int) -> Sequence[ir.Value]:
        return parts[x] if x in parts and not axis else _split(op, x, axis, steps)

    unrolled = unroll(op, node, inputs, split, most_nodes=T.UNROLLED_LOOP_NODES)
    if unrolled is None:
        return 0
    results = list(unrolled.states)
    for pieces, axis in unrolled.stacks:
        stacked = _join(op, [op.Unsqueeze(p, [axis]) for p in pieces], axis)
        results.append(stacked)
        if not axis:
            parts[stacked] = pieces
    for old, new in zip(node.outputs, results, strict=False):
        if new.type is None:
            new.type = old.type
        replace_value(old, new, list(old.uses()))
    op.graph.remove(node, safe=True)
    return 1


def _split(op: OpBuilder, x: ir.Value, axis: int, steps: int) -> list[ir.Value]:
    """Return the slices of a value along an axis, by few Split nodes that can be captured."""
    size = T.CUDA_GRAPH_CONCAT_INPUTS
    chunks = [x]
    if steps > size:
        sizes = [min(size, steps - start) for start in range(0, steps, size)]
        chunks = _outputs(op.Split(x, op.const(sizes), axis=axis, _outputs=len(sizes)))
    slices = []
    for chunk in chunks:
        count = op.dims(chunk)[axis]
        assert isinstance(count, int)
        split = op.Split(chunk, op.const([1] * count), axis=axis, _outputs=count)
        slices += [op.Squeeze(s, [axis]) for s in _outputs(split)]
    return slices


def _join(op: OpBuilder, pieces: Sequence[ir.Value], axis: int) -> ir.Value:
    """Concatenate values, at most as many at once as can be captured."""
    size = T.CUDA_GRAPH_CONCAT_INPUTS
    while len(pieces) > 1:
        groups = [pieces[i : i + size] for i in range(0, len(pieces), size)]
        pieces = [op.Concat(*g, axis=axis) if len(g) > 1 else g[0] for g in groups]
    return pieces[0]


def _outputs(results: ir.Value | Sequence[ir.Value]) -> list[ir.Value]:
    return [results] if isinstance(results, ir.Value) else list(results)
