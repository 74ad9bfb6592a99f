"""Memory for time: activations of chosen blocks are computed again in the backward pass.

Nodes of a block are copied, and the backward pass reads the copies, so that the runtime frees the
first results at once. Two things must hold on every runtime, whatever it makes of the graph:

* The copies must not be merged with the originals again. onnxruntime shares equal expressions, so
  the copies start from ``Where(late, x, x)``: that is ``x`` bit for bit, NaN and infinity included,
  but no optimizer can know without looking at both branches.
* They must not run early, or nothing is saved. ``late`` is a boolean made of numbers of the
  backward pass: of the gradients that arrive at the block's outputs, and of all that the backward
  pass of the following block ends with, or else a runtime might leave the gradients of all weights
  for the end. Its value is of no importance, and may come from a NaN.

Only one input of the nodes that a block starts with is treated so, the smallest: often a vector of
weights, so the trick costs next to nothing. Random operators are never copied, nor is what does not
depend on the batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import onnx_ir as ir

from onnxtrain.autodiff.differentiate import differentiate, reached_from
from onnxtrain.autodiff.kept_values import kept_values
from onnxtrain.autodiff.recompute_blocks import find_blocks
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.captured_values import subgraphs_of
from onnxtrain.graph.nodes import is_standard
from onnxtrain.graph.shapes.dims import Dim
from onnxtrain.graph.simplify import RANDOM

Block = Sequence[ir.Node]

# Inputs after the first one of these say how to compute, and some runtimes read them on the host.
_FIRST_ONLY = frozenset({"Clip", "Expand", "Pad", "Range", "Resize", "Slice", "Tile"})
_SHAPES = ("Shape", "Size")
_SYMBOL = 64  # what a symbolic size counts as when inputs are compared


def differentiate_again(
    op: OpBuilder,
    cotangents: Mapping[ir.Value, ir.Value],
    wrt: Sequence[ir.Value],
    *,
    recompute: str | Sequence[str],
    batch: Iterable[ir.Value],
) -> dict[ir.Value, ir.Value | None]:
    """Append the reverse sweep as ``differentiate`` does, with blocks that are computed again.

    Args:
        op: a builder over the graph.
        cotangents: as for ``differentiate``.
        wrt: likewise.
        recompute: as for ``find_blocks``; nothing if it is empty.
        batch: the inputs that differ from batch to batch.
    """
    if not recompute:
        return differentiate(op, cotangents, wrt)
    nodes = list(op.graph)
    live = reached_from(nodes, wrt)
    again = Recomputation(op, find_blocks(nodes, recompute, live), batch)
    watched = [y for outputs in again.outputs for y in outputs if y in live]
    grads = differentiate(op, cotangents, [*wrt, *watched])
    again.apply(grads)
    return grads


def outputs_of(block: Block) -> list[ir.Value]:
    """Return the values of a block that others read: they are kept."""
    inside = set(block)
    return [y for node in block for y in node.outputs if _leaves(y, inside)]


def _leaves(y: ir.Value, inside: set[ir.Node]) -> bool:
    return y.is_graph_output() or any(
        use.node not in inside and use.node.op_type not in _SHAPES for use in y.uses()
    )


class Recomputation:
    """Blocks of a forward pass to be computed again; made before the reverse sweep is there.

    Args:
        op: a builder over the graph, which holds the forward pass alone.
        blocks: disjoint sets of nodes, each in order.
        batch: the inputs that differ from batch to batch.
    """

    def __init__(self, op: OpBuilder, blocks: Sequence[Block], batch: Iterable[ir.Value]) -> None:
        self.op = op
        self.forward = list(op.graph)
        self.order = {node: i for i, node in enumerate(self.forward)}
        self.moving = _reached(self.forward, batch)
        whole = _closed(self.forward, blocks)
        self.blocks = sorted((b for b in whole if b), key=lambda b: self.order[b[0]])
        self.outputs = [outputs_of(b) for b in self.blocks]

    def apply(self, gradients: Mapping[ir.Value, ir.Value | None]) -> int:
        """Copy nodes for the reverse sweep that was appended meanwhile; return how many.

        Args:
            gradients: of parameters and of the outputs of the blocks, as far as there are any.
        """
        backward = [n for n in self.op.graph if n not in self.order]
        # The reverse sweep may have asked nodes for more outputs.
        inside = [
            {y for n in b for y in n.outputs if y.name} - set(outs)
            for b, outs in zip(self.blocks, self.outputs, strict=True)
        ]
        _share_shapes(self.op, self.forward, backward, set().union(*inside))
        useful = _ancestors([g for g in gradients.values() if g is not None])
        copied, waiting = 0, []
        for block, outputs, inner in reversed(
            list(zip(self.blocks, self.outputs, inside, strict=True))
        ):
            arriving = [g for y in outputs if (g := gradients.get(y)) is not None]
            if not arriving:
                continue
            sources = [*arriving, *waiting]
            earlier = _ancestors(sources)
            users = [
                (use.node, use.idx)
                for y in inner
                for use in y.uses()
                if use.node in useful and use.node not in self.order and use.node not in earlier
            ]
            if not users:
                continue
            wanted = {x for node, i in users if (x := node.inputs[i]) is not None}
            keep = kept_values(block, wanted, inner, lambda n: _may_copy(n, self.moving))
            copies = self._copy(block, wanted - keep, inner, keep, sources)
            users.sort(key=lambda use: (use[0].name or "", use[1]))
            for node, i in users:
                x = node.inputs[i]
                if x in copies:
                    node.replace_input_with(i, copies[x])
            copied += len({y.producer() for y in copies.values()})
            ends = [g for x in self._own(block, gradients) if (g := gradients[x]) is not None]
            last = [*(node for node, _ in users), *(g.producer() for g in ends)]
            waiting = _last([n for n in last if n is not None], earlier)
        self.op.graph.sort()
        return copied

    def _own(self, block: Block, values: Iterable[ir.Value]) -> list[ir.Value]:
        """Return those of some values that only this block reads: parameters of its own."""
        inside = set(block)

        def only_here(x: ir.Value) -> bool:
            readers = [use.node for use in x.uses() if use.node in self.order]
            return all(
                n in inside or all(y not in self.moving and only_here(y) for y in n.outputs)
                for n in readers
            )

        return [x for x in values if x.producer() is None and only_here(x)]

    def _copy(
        self,
        block: Block,
        wanted: set[ir.Value],
        inner: set[ir.Value],
        keep: set[ir.Value],
        sources: Sequence[ir.Value],
    ) -> dict[ir.Value, ir.Value]:
        """Append copies of the nodes that make the wanted values; return what stands for what."""
        needed = set(wanted)
        chosen: list[ir.Node] = []
        for node in reversed(block):
            if any(y in needed for y in node.outputs) and _may_copy(node, self.moving):
                chosen.append(node)
                needed.update(x for x in node.inputs if x in inner and x not in keep)
        gates: dict[ir.Value, ir.Value] = {}
        copies: dict[ir.Value, ir.Value] = {}
        late: list[ir.Value] = []

        def held_back(x: ir.Value | None) -> ir.Value:
            assert x is not None
            if not late:
                late.append(_late(self.op, sources))
            if x not in gates:
                gates[x] = self.op.Where(late[0], x, x)
            return gates[x]

        for node in reversed(chosen):
            inputs = [x if x is None else copies.get(x, x) for x in node.inputs]
            if not any(x in copies for x in node.inputs if x is not None):
                at = _smallest(node)
                if at is None:
                    continue  # nothing to hold it back with: its results are kept
                inputs[at] = held_back(inputs[at])
            first_only = node.op_type == "BatchNormalization"
            if first_only:  # onnxruntime writes statistics over these: let them be of its own
                inputs[3:] = [held_back(x) for x in inputs[3:]]
            copy = ir.Node(
                node.domain,
                node.op_type,
                inputs,
                attributes=node.attributes.values(),
                num_outputs=len(node.outputs),
                version=node.version,
            )
            self.op.append(copy)
            for old, new in zip(node.outputs, copy.outputs, strict=False):
                if not old.name:
                    new.name = ""
                    continue
                new.type, new.shape = old.type, old.shape
                if old is node.outputs[0] or not first_only:
                    copies[old] = new
        copies |= {x: gate for x, gate in gates.items() if x in keep}
        return {old: new for old, new in copies.items() if old in inner}


def _closed(nodes: Sequence[ir.Node], blocks: Sequence[Block]) -> list[list[ir.Node]]:
    """Return the blocks with what lies between their nodes.

    A gradient that arrives at an output then never comes from inside the block.
    """
    taken = {node for block in blocks for node in block}
    closed = []
    for block in blocks:
        after, before = set(block), set(block)
        for node in nodes:
            if any(x.producer() in after for x in node.inputs if x is not None):
                after.add(node)
        for node in reversed(nodes):
            if any(use.node in before for y in node.outputs for use in y.uses()):
                before.add(node)
        own, between = set(block), (after & before) - taken
        taken |= between
        closed.append([n for n in nodes if n in own or n in between])
    return closed


def _may_copy(node: ir.Node, moving: set[ir.Value]) -> bool:
    return (
        is_standard(node)
        and node.op_type not in RANDOM
        and not any(True for _ in subgraphs_of(node))
        and any(x in moving for x in node.inputs if x is not None)
        and any(y.dtype != ir.DataType.INT64 for y in node.outputs)
    )


def _reached(nodes: Sequence[ir.Node], values: Iterable[ir.Value]) -> set[ir.Value]:
    reached = set(values)
    for node in nodes:
        if node.op_type not in _SHAPES and any(x in reached for x in node.inputs):
            reached.update(node.outputs)
    return reached


def _smallest(node: ir.Node) -> int | None:
    """Return the place of the smallest float input that takes part in the arithmetic."""
    sizes = {
        i: _size(x)
        for i, x in enumerate(node.inputs)
        if x is not None
        and x.dtype == ir.DataType.FLOAT
        and (i == 0 or node.op_type not in _FIRST_ONLY)
        and (i < 3 or node.op_type != "BatchNormalization")
    }
    return min(sizes, key=lambda i: (sizes[i], i)) if sizes else None


def _size(x: ir.Value) -> float:
    dims = S.dims_of(x)
    if dims is None:
        return math.inf
    return math.prod(d if isinstance(d, int) else _SYMBOL for d in dims)


def _late(op: OpBuilder, sources: Sequence[ir.Value]) -> ir.Value:
    """Return a boolean scalar that is there only when all of some values are."""
    corners: dict[int, list[ir.Value]] = {}  # an element of each, by rank: one node for most
    for x in sources:
        rank = len(S.dims_of(x) or ()) or 1
        line = x if S.dims_of(x) else op.Reshape(x, [-1])
        corner = op.Slice(line, [0] * rank, [1] * rank, list(range(rank)))
        corners.setdefault(rank, []).append(op.cast(corner, ir.DataType.FLOAT))
    groups = [op.Reshape(_joined(op, values), [-1]) for values in corners.values()]
    return op.Cast(op.ReduceSum(_joined(op, groups), keepdims=0), to=ir.DataType.BOOL)


def _joined(op: OpBuilder, values: Sequence[ir.Value]) -> ir.Value:
    return values[0] if len(values) == 1 else op.Concat(*values, axis=0)


def _ancestors(values: Iterable[ir.Value], stop: set[ir.Node] | None = None) -> set[ir.Node]:
    ancestors: set[ir.Node] = set()
    stop = stop or set()
    pending = [y.producer() for y in values]
    while pending:
        node = pending.pop()
        if node is None or node in ancestors or node in stop:
            continue
        ancestors.add(node)
        pending += [x.producer() for x in node.inputs if x is not None]
    return ancestors


def _last(nodes: Sequence[ir.Node], earlier: set[ir.Node]) -> list[ir.Value]:
    """Return a float result of each node that no other of them depends on."""
    unique = list(dict.fromkeys(nodes))
    before: set[ir.Node] = set()
    for node in unique:
        before |= _ancestors([x for x in node.inputs if x is not None], earlier | before)
    return [
        y
        for n in unique
        if n not in before
        for y in n.outputs[:1]
        if y.dtype in (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
    ]


def _share_shapes(
    op: OpBuilder,
    forward: Sequence[ir.Node],
    backward: Sequence[ir.Node],
    hidden: set[ir.Value],
) -> None:
    """Ask values that are kept for their shape, where an earlier one has the same."""
    kept: dict[tuple[Dim, ...], ir.Value] = {}

    def see(values: Iterable[ir.Value]) -> None:
        for x in values:
            dims = S.dims_of(x)
            if x not in hidden and dims is not None and None not in dims:
                kept.setdefault(dims, x)

    see(op.graph.inputs)
    for node in (*forward, *backward):
        x = node.inputs[0] if node.op_type in _SHAPES else None
        if x is not None and x in hidden and (dims := S.dims_of(x)) in kept:
            node.replace_input_with(0, kept[dims])
        see(node.outputs)
