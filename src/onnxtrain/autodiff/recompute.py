"""Activation checkpointing: recompute activations of chosen blocks in the backward pass.

``find_blocks`` selects the blocks, ``Recomputation`` copies their nodes and redirects the backward
pass to the copies, so that the runtime frees the original activations early. Two conditions must
hold on every runtime, whatever graph optimizations it applies:

* The copies are not merged with the originals. onnxruntime shares equal subexpressions, so the
  copies start from ``Where(late, x, x)``. That equals ``x`` bit for bit, NaN and infinity included,
  but an optimizer cannot know it without comparing both branches.
* The copies do not run early, or no memory is saved. ``late`` is a boolean computed from values of
  the backward pass: the gradients of the block's outputs, and the last values that the backward
  pass of the following block computes. Without the latter, a runtime could delay the gradients of
  all weights to the end. The value of ``late`` does not matter and may come from a NaN.

Only the smallest input of the first nodes of a block is gated this way. It is often a vector of
weights, so the gate costs next to nothing. Random operators are never copied, and neither are nodes
that do not depend on the batch.

``values_to_save`` decides what a block stores: the fewest bytes from which the backward pass can
recompute the rest cheaply. Storing a value costs its bytes. Recomputing it costs a share of the
bytes that its node reads. So a mean or a matmul with a narrow matrix is stored, because the result
is small; a sum or an activation is recomputed. Nodes that must not run twice cost infinity.

This is a minimum cut of ``start -> computed -> available -> end``: an edge ``start -> computed``
for recomputing a value, ``computed -> available`` for storing it, ``available -> computed`` from
the inputs of a node to its results, and ``available -> end`` for values that backward reads. Of
several minimum cuts, the one nearest to ``end`` is taken, because it recomputes the least.
"""

from __future__ import annotations

import difflib
import fnmatch
import math
import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import onnx_ir as ir

from onnxtrain.autodiff.differentiate import differentiate, reachable_values
from onnxtrain.errors import PrepareError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.memory_usage import Sizes
from onnxtrain.graph.nodes import is_op, is_standard, subgraphs_of
from onnxtrain.graph.shapes.dims import Dim
from onnxtrain.graph.simplify import RANDOM_OPS

AUTO = "auto"
_SCOPES = "pkg.torch.onnx.name_scopes"


def copy_scopes(source: ir.Model, prepared: ir.Model) -> None:
    """Copy the module scopes that torch recorded from a model to its prepared form, in place."""
    known = {n.name: n.metadata_props.get(_SCOPES) for n in source.graph}
    for node in prepared.graph:
        if known.get(node.name):
            node.metadata_props[_SCOPES] = known[node.name] or ""


def find_blocks(
    nodes: Sequence[ir.Node], wanted: str | Sequence[str], live: set[ir.Value]
) -> list[list[ir.Node]]:
    """Return the blocks that ``recompute`` selects.

    Args:
        nodes: the forward pass up to the loss, in order.
        wanted: ``"auto"``, or globs of scopes, nodes and boundaries.
        live: the values that depend on parameters.

    Raises:
        PrepareError: a pattern matches nothing.
    """
    if wanted == AUTO:
        return _between(nodes, _boundaries(nodes, live))
    patterns = [wanted] if isinstance(wanted, str) else list(wanted)
    labels: dict[ir.Node, str] = {}
    matched: set[str] = set()
    for node in nodes:
        pattern_label = next(
            (
                (p, label)
                for label, names in _scopes(node)
                for p in patterns
                if _matches_pattern(p, names)
            ),
            None,
        )
        if pattern_label is not None:
            matched.add(pattern_label[0])
            labels[node] = pattern_label[1]
    blocks: dict[str, list[ir.Node]] = {}
    for node in nodes:
        if node in labels:
            blocks.setdefault(labels[node], []).append(node)
    rest = [p for p in patterns if p not in matched]
    cuts = [
        n
        for n in nodes
        if any(_matches_pattern(p, [y.name or ""]) for p in rest for y in n.outputs)
    ]
    for p in rest:
        if not any(_matches_pattern(p, [y.name or ""]) for n in cuts for y in n.outputs):
            raise PrepareError(_no_match_error(p, nodes))
    taken = {n for block in blocks.values() for n in block}
    between = [[n for n in block if n not in taken] for block in _between(nodes, cuts)]
    return [*blocks.values(), *between]


def _matches_pattern(pattern: str, names: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(n, pattern) for n in names)


def _scopes(node: ir.Node) -> Iterator[tuple[str, list[str]]]:
    """Yield the scopes of a node from the outermost to itself: a label and the names it matches.

    torch writes module names into the metadata of nodes. Older exporters write them into the names,
    as in ``/layers/layers.0/fc/MatMul``.
    """
    text = node.metadata_props.get(_SCOPES)
    if text is not None:
        for scope in re.findall(r"'([^']*)'", text)[:-1]:
            if scope:
                yield scope, [scope]
    else:
        parts = (node.name or "").strip("/").split("/")
        for i in range(1, len(parts)):
            path = "/".join(parts[:i])
            yield path, [path, parts[i - 1]]
    if node.name:
        yield node.name, [node.name]


def _between(nodes: Sequence[ir.Node], cuts: Sequence[ir.Node]) -> list[list[ir.Node]]:
    """Return the nodes before each cut. Nodes after the last one are used at once, so they stay."""
    ends, blocks, block = set(cuts), [], []
    for node in nodes:
        block.append(node)
        if node in ends:
            blocks.append(block)
            block = []
    return blocks


def _boundaries(nodes: Sequence[ir.Node], live: set[ir.Value]) -> list[ir.Node]:
    """Return evenly spaced nodes whose result is the only value that later nodes read.

    ``s`` blocks of a pass with ``w`` bytes of activations and boundaries of ``v`` bytes need
    ``s v + w / s`` bytes at a time. The minimum is at ``s = sqrt(w / v)``.
    """
    last: dict[ir.Value, int] = {}
    for i, node in enumerate(nodes):
        last.update((x, i) for x in node.inputs if x in live)
    crossing: set[ir.Value] = set()
    weights, candidates = [], []
    for i, node in enumerate(nodes):
        made = [y for y in node.outputs if y in live]
        weights.append(sum(_known_size(y) for y in made))
        crossing = {x for x in (*crossing, *made) if last.get(x, -1) > i}
        if len(crossing) == 1 and crossing <= set(made):
            candidates.append(i)
    if not candidates:
        return []
    size = sum(_known_size(y) for i in candidates for y in nodes[i].outputs) / len(candidates)
    total = sum(weights)
    share = total / max(math.sqrt(total / max(size, 1.0)), 2.0)
    chosen, so_far = [], 0.0
    at = iter(candidates)
    following = next(at)
    for i, weight in enumerate(weights):
        so_far += weight
        if i == following:
            if so_far >= share:
                chosen.append(nodes[i])
                so_far = 0.0
            following = next(at, -1)
    return chosen


def _known_size(x: ir.Value) -> float:
    dims = S.dims_of(x)
    return 0.0 if dims is None else math.prod(d if isinstance(d, int) else 1 for d in dims)


def _no_match_error(pattern: str, nodes: Sequence[ir.Node]) -> str:
    names = {n for node in nodes for _, scopes in _scopes(node) for n in scopes}
    names |= {y.name or "" for node in nodes for y in node.outputs}
    near = difflib.get_close_matches(pattern, sorted(names), n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}?" if near else '"auto" selects blocks automatically'
    return f"recompute: unknown scope, node or value: {pattern!r}\nhint: {hint}"


REREAD_COST = 16
"""Bytes to read again that cost as much as one byte to store."""
_UNKNOWN_DIM_SAVED_SIZE = 256  # assumed for a symbolic dimension
_LAYOUT_OPS = ("Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity")
_START, _END = 0, 1


def values_to_save(
    block: Sequence[ir.Node],
    wanted: Collection[ir.Value],
    inner: Collection[ir.Value],
    may_copy: Callable[[ir.Node], bool],
) -> set[ir.Value]:
    """Return the values of a block to store.

    Args:
        block: its nodes, in order.
        wanted: the values that the backward pass reads.
        inner: the values of the block that are not stored anyway.
        may_copy: whether a node may run twice.
    """
    sizes = Sizes(other=_UNKNOWN_DIM_SAVED_SIZE)
    values = _needed(block, wanted, inner)
    vertex = {y: 2 + 2 * i for i, y in enumerate(values)}
    flow = _FlowNetwork(2 + 2 * len(values))
    for y, computed in vertex.items():
        node = y.producer()
        assert node is not None
        sources = dict.fromkeys(x for x in node.inputs if x is not None)
        recompute_cost = math.inf
        if may_copy(node):
            recompute_cost = max((sizes(x) for x in sources), default=0) / REREAD_COST
        flow.edge(_START, computed, recompute_cost)
        flow.edge(computed, computed + 1, sizes(y) or 1)
        for x in sources:
            if x in vertex:
                flow.edge(vertex[x] + 1, computed, math.inf)
        if y in wanted:
            flow.edge(computed + 1, _END, math.inf)
    reaches_end = flow.before_end()
    chosen = [
        y
        for y, computed in vertex.items()
        if computed not in reaches_end and computed + 1 in reaches_end
    ]
    return {_before_views(y, vertex) for y in chosen}


def _before_views(y: ir.Value, inner: Collection[ir.Value]) -> ir.Value:
    """Return the value before layout changes, because both passes may read it in other layouts."""
    node = y.producer()
    x = node.inputs[0] if node is not None and is_op(node, *_LAYOUT_OPS) else None
    return y if x is None or x not in inner else _before_views(x, inner)


def _needed(
    block: Sequence[ir.Node], wanted: Collection[ir.Value], inner: Collection[ir.Value]
) -> list[ir.Value]:
    """Return the values from which ``wanted`` may have to be recomputed."""
    needed = {x for x in wanted if x in inner}
    chosen: list[ir.Value] = []
    for node in reversed(block):
        outputs = [y for y in node.outputs if y in needed]
        if outputs:
            chosen += outputs
            needed.update(x for x in node.inputs if x is not None and x in inner)
    return chosen[::-1]


class _FlowNetwork:
    """A flow network with numbered vertices; its maximum flow gives the minimum cut."""

    def __init__(self, places: int) -> None:
        self._edges: list[list[int]] = [[] for _ in range(places)]
        self._to: list[int] = []
        self._capacity: list[float] = []

    def edge(self, a: int, b: int, capacity: float) -> None:
        """Add an edge, and its reverse edge with the next number."""
        for x, y, r in ((a, b, capacity), (b, a, 0.0)):
            self._edges[x].append(len(self._to))
            self._to.append(y)
            self._capacity.append(r)

    def before_end(self) -> set[int]:
        """Return the vertices from which the end is reachable at maximum flow."""
        while path := self._path():
            amount = min(self._capacity[e] for e in path)
            for e in path:
                self._capacity[e] -= amount
                self._capacity[e ^ 1] += amount
        return set(self._steps(_END, back=True))

    def _path(self) -> list[int]:
        """Return a shortest augmenting path, as edges."""
        came = self._steps(_START, back=False)
        path, at = [], _END
        while at in came and at != _START:
            path.append(came[at])
            at = self._to[came[at] ^ 1]
        return path

    def _steps(self, first: int, *, back: bool) -> dict[int, int]:
        """Return the vertices reachable along residual edges, and the edge to each."""
        came, pending = {first: -1}, deque([first])
        while pending:
            at = pending.popleft()
            for e in self._edges[at]:
                if self._capacity[e ^ 1 if back else e] > 0 and self._to[e] not in came:
                    came[self._to[e]] = e
                    pending.append(self._to[e])
        return came


Block = Sequence[ir.Node]

# Further inputs of these are sizes, bounds or axes, and some runtimes read them on the host.
_ONLY_FIRST_INPUT_MATTERS = frozenset({"Clip", "Expand", "Pad", "Range", "Resize", "Slice", "Tile"})
_SHAPES = ("Shape", "Size")
_UNKNOWN_DIM_SIZE = 64  # assumed for a symbolic dimension when inputs are compared


def differentiate_with_recompute(
    op: OpBuilder,
    cotangents: Mapping[ir.Value, ir.Value],
    wrt: Sequence[ir.Value],
    *,
    recompute: str | Sequence[str],
    batch: Iterable[ir.Value],
) -> dict[ir.Value, ir.Value | None]:
    """Append the reverse sweep as ``differentiate`` does, and recompute blocks in it.

    Args:
        op: a builder over the graph.
        cotangents: as for ``differentiate``.
        wrt: as for ``differentiate``.
        recompute: as for ``find_blocks``; empty recomputes nothing.
        batch: the inputs that differ from batch to batch.
    """
    if not recompute:
        return differentiate(op, cotangents, wrt)
    nodes = list(op.graph)
    live = reachable_values(nodes, wrt)
    recomputation = Recomputation(op, find_blocks(nodes, recompute, live), batch)
    block_outputs = [y for outputs in recomputation.outputs for y in outputs if y in live]
    grads = differentiate(op, cotangents, [*wrt, *block_outputs])
    recomputation.apply(grads)
    return grads


def outputs_of(block: Block) -> list[ir.Value]:
    """Return the values of a block that other nodes read; they are stored."""
    inside = set(block)
    return [y for node in block for y in node.outputs if _leaves(y, inside)]


def _leaves(y: ir.Value, inside: set[ir.Node]) -> bool:
    return y.is_graph_output() or any(
        use.node not in inside and use.node.op_type not in _SHAPES for use in y.uses()
    )


class Recomputation:
    """Blocks of a forward pass to recompute; create it before the reverse sweep is appended.

    Args:
        op: a builder over the graph, which has only the forward pass.
        blocks: disjoint sets of nodes, each in order.
        batch: the inputs that differ from batch to batch.
    """

    def __init__(self, op: OpBuilder, blocks: Sequence[Block], batch: Iterable[ir.Value]) -> None:
        self.op = op
        self.forward = list(op.graph)
        self.order = {node: i for i, node in enumerate(self.forward)}
        self.batch_dependent = _reachable_nodes(self.forward, batch)
        whole = _closed_blocks(self.forward, blocks)
        self.blocks = sorted((b for b in whole if b), key=lambda b: self.order[b[0]])
        self.outputs = [outputs_of(b) for b in self.blocks]

    def apply(self, gradients: Mapping[ir.Value, ir.Value | None]) -> int:
        """Copy nodes for the reverse sweep that was appended since; return how many.

        Args:
            gradients: gradients of parameters and of the outputs of the blocks.
        """
        backward = [n for n in self.op.graph if n not in self.order]
        # Rules may have added outputs to forward nodes.
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
            keep = values_to_save(
                block, wanted, inner, lambda n: _may_copy(n, self.batch_dependent)
            )
            copies = self._copy(block, wanted - keep, inner, keep, sources)
            users.sort(key=lambda use: (use[0].name or "", use[1]))
            for node, i in users:
                x = node.inputs[i]
                if x in copies:
                    node.replace_input_with(i, copies[x])
            copied += len({y.producer() for y in copies.values()})
            ends = [
                g
                for x in self._exclusive_inputs(block, gradients)
                if (g := gradients[x]) is not None
            ]
            last = [*(node for node, _ in users), *(g.producer() for g in ends)]
            waiting = _last([n for n in last if n is not None], earlier)
        self.op.graph.sort()
        return copied

    def _exclusive_inputs(self, block: Block, values: Iterable[ir.Value]) -> list[ir.Value]:
        """Return the values that only this block reads: its own parameters."""
        inside = set(block)

        def only_here(x: ir.Value) -> bool:
            readers = [use.node for use in x.uses() if use.node in self.order]
            return all(
                n in inside
                or all(y not in self.batch_dependent and only_here(y) for y in n.outputs)
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
        """Append copies of the nodes that compute ``wanted``; return the copy of each value."""
        needed = set(wanted)
        chosen: list[ir.Node] = []
        for node in reversed(block):
            if any(y in needed for y in node.outputs) and _may_copy(node, self.batch_dependent):
                chosen.append(node)
                needed.update(x for x in node.inputs if x in inner and x not in keep)
        gates: dict[ir.Value, ir.Value] = {}
        copies: dict[ir.Value, ir.Value] = {}
        late: list[ir.Value] = []

        def gated(x: ir.Value | None) -> ir.Value:
            assert x is not None
            if not late:
                late.append(_gradient_gate(self.op, sources))
            if x not in gates:
                gates[x] = self.op.Where(late[0], x, x)
            return gates[x]

        for node in reversed(chosen):
            inputs = [x if x is None else copies.get(x, x) for x in node.inputs]
            if not any(x in copies for x in node.inputs if x is not None):
                at = _smallest_input(node)
                if at is None:
                    continue  # no input to gate: its results are stored
                inputs[at] = gated(inputs[at])
            first_only = node.op_type == "BatchNormalization"
            if first_only:  # onnxruntime updates the statistics in place, so the copy needs its own
                inputs[3:] = [gated(x) for x in inputs[3:]]
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


def _closed_blocks(nodes: Sequence[ir.Node], blocks: Sequence[Block]) -> list[list[ir.Node]]:
    """Add the nodes between the nodes of a block to the block.

    The gradient of an output then never depends on a gradient inside the block.
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


def _may_copy(node: ir.Node, batch_dependent: set[ir.Value]) -> bool:
    return (
        is_standard(node)
        and node.op_type not in RANDOM_OPS
        and not any(True for _ in subgraphs_of(node))
        and any(x in batch_dependent for x in node.inputs if x is not None)
        and any(y.dtype != ir.DataType.INT64 for y in node.outputs)
    )


def _reachable_nodes(nodes: Sequence[ir.Node], values: Iterable[ir.Value]) -> set[ir.Value]:
    reached = set(values)
    for node in nodes:
        if node.op_type not in _SHAPES and any(x in reached for x in node.inputs):
            reached.update(node.outputs)
    return reached


def _smallest_input(node: ir.Node) -> int | None:
    """Return the index of the smallest float input that the node computes with."""
    sizes = {
        i: _assumed_size(x)
        for i, x in enumerate(node.inputs)
        if x is not None
        and x.dtype == ir.DataType.FLOAT
        and (i == 0 or node.op_type not in _ONLY_FIRST_INPUT_MATTERS)
        and (i < 3 or node.op_type != "BatchNormalization")
    }
    return min(sizes, key=lambda i: (sizes[i], i)) if sizes else None


def _assumed_size(x: ir.Value) -> float:
    dims = S.dims_of(x)
    if dims is None:
        return math.inf
    return math.prod(d if isinstance(d, int) else _UNKNOWN_DIM_SIZE for d in dims)


def _gradient_gate(op: OpBuilder, sources: Sequence[ir.Value]) -> ir.Value:
    """Return a boolean scalar that depends on all ``sources``."""
    corners: dict[int, list[ir.Value]] = {}  # first element of each source, grouped by rank
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
    """Return a float result of each node that no other node of ``nodes`` depends on."""
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
    """Read shapes from stored values with the same shape, so that ``hidden`` ones can be freed."""
    by_shape: dict[tuple[Dim, ...], ir.Value] = {}

    def visit(values: Iterable[ir.Value]) -> None:
        for x in values:
            dims = S.dims_of(x)
            if x not in hidden and dims is not None and None not in dims:
                by_shape.setdefault(dims, x)

    visit(op.graph.inputs)
    for node in (*forward, *backward):
        x = node.inputs[0] if node.op_type in _SHAPES else None
        if x is not None and x in hidden and (dims := S.dims_of(x)) in by_shape:
            node.replace_input_with(0, by_shape[dims])
        visit(node.outputs)
