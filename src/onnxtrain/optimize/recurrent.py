"""Rewrites of loops over time, in which recurrent layers run.

- `hoist_from_scans` (CUDA): elementwise operators that need no state leave the loop.
- `unroll_scans` (CUDA): a loop of a known number of steps becomes copies of its body. onnxruntime
  runs the body of a Scan from the host, node by node, and cannot capture it as a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain import thresholds as T
from onnxtrain.expand.control_flow import int_per_value, unroll
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder, replace_value
from onnxtrain.graph.nodes import nodes, subgraphs_of

_ELEMENTWISE = ("Add", "Mul", "Neg", "Sub")


def hoist_from_scans(model: ir.Model, op: OpBuilder) -> int:
    """Compute what depends on the slices of a step only for all steps at once; return how many.

        before:  Scan(s, ys) { ... Mul(ds, Sub(1, Mul(y, y))) ... }
        after:   Scan(s, Sub(1, Mul(ys, ys))) { ... Mul(ds, d) ... }

    In gradients these are the derivatives of the activations.
    """
    return sum(_hoist(op, node) for node in nodes(model.graph, "Scan"))


def _hoist(op: OpBuilder, node: ir.Node) -> int:
    body = node.attributes["body"].as_graph()
    first = len(node.inputs) - node.attributes["num_scan_inputs"].as_int()
    scans = node.inputs[first:]
    axes, turns = (int_per_value(node, f"scan_input_{n}", scans) for n in ("axes", "directions"))
    op.position = node
    stacks: dict[ir.Value, tuple[ir.Value, int]] = {}
    """Values of the body that are known for all steps, and the direction of the loop over them."""
    for inner, x, axis, turn in zip(body.inputs[first:], scans, axes, turns, strict=True):
        if x is not None and not axis and S.is_float(x):
            stacks[inner] = x, turn
    moved = []
    for n in nodes(body, *_ELEMENTWISE):
        known = [x for x in n.inputs if x in stacks]
        others = [x for x in n.inputs if x not in stacks]
        same = known and all(
            S.same_shape(x, known[0]) and stacks[x][1] == stacks[known[0]][1] for x in known
        )
        if not same or any(x is None or _is_not_scalar(x) for x in others):
            continue
        outer = [stacks[x][0] if x in stacks else x for x in n.inputs]
        stacks[n.outputs[0]] = op.emit(n.op_type, *outer), stacks[known[0]][1]
        moved.append(n)
    for n in moved:
        y = n.outputs[0]
        uses = [u for u in y.uses() if u.node not in moved]
        if uses or y in body.outputs:
            _add_scan_input(node, body, y, uses, *stacks[y])
    body.remove(reversed(moved), safe=True)
    return len(moved)


def _is_not_scalar(x: ir.Value) -> bool:
    array = S.constant_of(x)
    return array is None or array.size != 1


def _add_scan_input(
    node: ir.Node,
    body: ir.Graph,
    y: ir.Value,
    uses: Sequence[tuple[ir.Node, int]],
    stack: ir.Value,
    turn: int,
) -> None:
    """Replace a value of the body by a slice of a stack."""
    scans = node.inputs[-node.attributes["num_scan_inputs"].as_int() :]
    for name, value in (("axes", 0), ("directions", turn)):
        key = f"scan_input_{name}"
        node.attributes[key] = ir.AttrInt64s(key, [*int_per_value(node, key, scans), value])
    node.attributes["num_scan_inputs"] = ir.AttrInt64("num_scan_inputs", len(scans) + 1)
    node.resize_inputs(len(node.inputs) + 1)
    node.replace_input_with(len(node.inputs) - 1, stack)
    inner = ir.Value(name=f"{y.name}.slice", type=y.type, shape=y.shape)
    body.inputs.append(inner)
    replace_value(y, inner, list(uses))


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
