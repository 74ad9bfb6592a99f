"""Which parts of a forward pass are computed again: by name, by boundary, or found."""

from __future__ import annotations

import difflib
import fnmatch
import math
import re
from collections.abc import Iterator, Sequence

import onnx_ir as ir

from onnxtrain.errors import PrepareError
from onnxtrain.graph import shapes as S

AUTO = "auto"
_SCOPES = "pkg.torch.onnx.name_scopes"


def copy_scopes(source: ir.Model, prepared: ir.Model) -> None:
    """Write the scopes that torch recorded in a model into its prepared form, in place."""
    known = {n.name: n.metadata_props.get(_SCOPES) for n in source.graph}
    for node in prepared.graph:
        if known.get(node.name):
            node.metadata_props[_SCOPES] = known[node.name] or ""


def find_blocks(
    nodes: Sequence[ir.Node], wanted: str | Sequence[str], live: set[ir.Value]
) -> list[list[ir.Node]]:
    """Return the blocks that ``recompute`` asks for.

    Args:
        nodes: the forward pass up to the loss, in order.
        wanted: ``"auto"``, or globs of scopes, nodes and boundaries.
        live: the values that depend on what is trained.

    Raises:
        PrepareError: if a pattern matches nothing.
    """
    if wanted == AUTO:
        return _between(nodes, _boundaries(nodes, live))
    patterns = [wanted] if isinstance(wanted, str) else list(wanted)
    labels: dict[ir.Node, str] = {}
    matched: set[str] = set()
    for node in nodes:
        pattern_label = next(
            ((p, label) for label, names in _scopes(node) for p in patterns if _fits(p, names)),
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
    cuts = [n for n in nodes if any(_fits(p, [y.name or ""]) for p in rest for y in n.outputs)]
    for p in rest:
        if not any(_fits(p, [y.name or ""]) for n in cuts for y in n.outputs):
            raise PrepareError(_nothing(p, nodes))
    taken = {n for block in blocks.values() for n in block}
    between = [[n for n in block if n not in taken] for block in _between(nodes, cuts)]
    return [*blocks.values(), *between]


def _fits(pattern: str, names: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(n, pattern) for n in names)


def _scopes(node: ir.Node) -> Iterator[tuple[str, list[str]]]:
    """Return the scopes of a node from the outermost to itself: a label, and what it is called.

    torch writes module names into the nodes' metadata; older exporters write them into the names,
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
    """Return what lies before each cut; what follows the last one is used at once, and kept."""
    ends, blocks, block = set(cuts), [], []
    for node in nodes:
        block.append(node)
        if node in ends:
            blocks.append(block)
            block = []
    return blocks


def _boundaries(nodes: Sequence[ir.Node], live: set[ir.Value]) -> list[ir.Node]:
    """Return nodes whose result is all that the rest of the pass reads, a good distance apart.

    With ``s`` blocks of a pass that takes ``w`` bytes, and boundaries of ``v`` bytes, ``s v + w /
    s`` are needed at a time; that is least for ``s = sqrt(w / v)``.
    """
    last: dict[ir.Value, int] = {}
    for i, node in enumerate(nodes):
        last.update((x, i) for x in node.inputs if x in live)
    crossing: set[ir.Value] = set()
    weights, candidates = [], []
    for i, node in enumerate(nodes):
        made = [y for y in node.outputs if y in live]
        weights.append(sum(_size(y) for y in made))
        crossing = {x for x in (*crossing, *made) if last.get(x, -1) > i}
        if len(crossing) == 1 and crossing <= set(made):
            candidates.append(i)
    if not candidates:
        return []
    size = sum(_size(y) for i in candidates for y in nodes[i].outputs) / len(candidates)
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


def _size(x: ir.Value) -> float:
    dims = S.dims_of(x)
    return 0.0 if dims is None else math.prod(d if isinstance(d, int) else 1 for d in dims)


def _nothing(pattern: str, nodes: Sequence[ir.Node]) -> str:
    names = {n for node in nodes for _, scopes in _scopes(node) for n in scopes}
    names |= {y.name or "" for node in nodes for y in node.outputs}
    near = difflib.get_close_matches(pattern, sorted(names), n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}?" if near else '"auto" finds blocks by itself'
    return f"recompute: no scope, node or value is called {pattern!r}\nhint: {hint}"
