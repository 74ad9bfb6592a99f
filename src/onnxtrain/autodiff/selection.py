"""Which values a request means: names, glob patterns, or the trainable parameters.

Parameters by a word: ``bias``, ``norm``, ``last:2``, where a list of names would stand.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.autodiff.differentiate import differentiable_inputs
from onnxtrain.autodiff.rule_registry import blocks_gradient, is_not_differentiable
from onnxtrain.errors import PrepareError, UndifferentiableError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.nodes import is_op, nodes
from onnxtrain.importer import Prepared

BIAS, NORM, LAST = "bias", "norm", "last"
_LAST = re.compile(r"^last:(\d+)$")
_BLOCK = re.compile(r"^(.*?(?:^|[._/])(?:layers?|blocks?|h|stages?|resblocks))[._/](\d+)[._/]")
_NORM_NAME = re.compile(r"norm|(^|[._/])ln(_|\d|[._/])", re.IGNORECASE)
_NORMS = ("BatchNormalization", "LayerNormalization", "InstanceNormalization", "GroupNormalization")
_OFFSET = 2  # the place of a normalisation's bias
_OWN_LAYER = frozenset({"weight", "embedding", "recurrent weight"})


def expand_selectors(
    prepared: Prepared, names: Sequence[str], trainable: Sequence[ir.Value]
) -> list[str]:
    """Return names in which each word is replaced by the parameters it stands for.

    Args:
        prepared: the model.
        names: names, patterns and words; a tensor that is called by a word goes first.
        trainable: the parameters of the model.

    Raises:
        PrepareError: if a word stands for nothing.
    """
    graph = prepared.graph
    known = {*graph.initializers, *(x.name for x in graph.inputs)}
    expanded: list[str] = []
    for name in names:
        if name in known or not _is_selector(name):
            expanded.append(name)
            continue
        hits = _resolve_selector(prepared, name, trainable)
        if not hits:
            raise PrepareError(f"the model has no parameters that {name!r} stands for")
        expanded += [x.name or "" for x in hits]
    return expanded


def available_selectors(prepared: Prepared, trainable: Sequence[ir.Value]) -> dict[str, str]:
    """Return the words that stand for something in this model, with what that is."""
    if not trainable:
        return {}
    words = {
        BIAS: _resolve_selector(prepared, BIAS, trainable),
        NORM: _resolve_selector(prepared, NORM, trainable),
        f"{LAST}:1": _resolve_selector(prepared, f"{LAST}:1", trainable),
    }
    layers, kind = _layers(prepared, trainable)
    about = {w: f"{len(v)} tensor(s), {_element_count(v)} numbers" for w, v in words.items() if v}
    if f"{LAST}:1" in about:
        about[f"{LAST}:1"] += f", of {len(layers)} {kind}"
    return about


def _element_count(values: Sequence[ir.Value]) -> int:
    return sum(x.const_value.size for x in values if x.const_value is not None)


def _is_selector(name: str) -> bool:
    return name in (BIAS, NORM) or _LAST.match(name) is not None


def _resolve_selector(
    prepared: Prepared, word: str, trainable: Sequence[ir.Value]
) -> list[ir.Value]:
    kinds = prepared.kinds
    if word == BIAS:
        return [x for x in trainable if kinds.get(x.name or "") == "bias" or _is_offset(x)]
    if word == NORM:
        return [x for x in trainable if _is_norm(x, kinds.get(x.name or "", ""))]
    match = _LAST.match(word)
    assert match is not None
    count = int(match[1])
    if count < 1:
        raise PrepareError(f"{word!r} stands for no layer\nhint: last:1 is the last one")
    layers, kind = _layers(prepared, trainable)
    if count > len(layers):
        raise PrepareError(f"{word!r}: the model has only {len(layers)} {kind}")
    return [x for layer in layers[-count:] for x in layer]


def _is_offset(x: ir.Value) -> bool:
    return any(use.idx == _OFFSET and is_op(use.node, *_NORMS) for use in x.uses())


def _is_norm(x: ir.Value, kind: str) -> bool:
    used = any(use.idx in (1, _OFFSET) and is_op(use.node, *_NORMS) for use in x.uses())
    named = kind == "scale" and _NORM_NAME.search(x.name or "") is not None
    return used or named or kind == "normalization"


def _layers(prepared: Prepared, trainable: Sequence[ir.Value]) -> tuple[list[list[ir.Value]], str]:
    """Return the parameters layer by layer, in the order in which the graph reads them.

    Where names number blocks (``layers.3.``), those are the layers, and what comes after the last
    block belongs to it. Else each weight begins one.
    """
    order = _in_order(prepared.graph, trainable)
    blocks = [_block(x) for x in order]
    if len({b for b in blocks if b is not None}) > 1:
        return _by_block(order, blocks), "blocks"
    kinds, layers = prepared.kinds, list[list[ir.Value]]()
    for x in order:
        if not layers or kinds.get(x.name or "", "weight") in _OWN_LAYER:
            layers.append([])
        layers[-1].append(x)
    return layers, "layers"


def _by_block(
    order: Sequence[ir.Value], blocks: Sequence[tuple[str, int] | None]
) -> list[list[ir.Value]]:
    groups: dict[tuple[str, int], list[ir.Value]] = {}
    current: tuple[str, int] | None = None
    for x, block in zip(order, blocks, strict=True):
        current = block or current
        if current is not None:  # what stands in front of the first block is of none
            groups.setdefault(current, []).append(x)
    return list(groups.values())


def _block(x: ir.Value) -> tuple[str, int] | None:
    match = _BLOCK.match(x.name or "")
    return None if match is None else (match[1], int(match[2]))


def _in_order(graph: ir.Graph, trainable: Sequence[ir.Value]) -> list[ir.Value]:
    """Return parameters in the order in which nodes first read them."""
    wanted = set(trainable)
    order = dict.fromkeys(
        x for node in graph.all_nodes() for x in node.inputs if x is not None and x in wanted
    )
    return [*order, *(x for x in trainable if x not in order)]


def select_wrt(prepared: Prepared, wrt: str | Sequence[str] | None) -> list[ir.Value]:
    """Return the inputs and initializers that ``wrt`` names, in that order, each once.

    ``None`` stands for every trainable parameter, in the order of the file.
    """
    if wrt is None:
        return trainable(prepared)
    candidates = {x.name or "": x for x in prepared.graph.inputs}
    constants = prepared.constants
    for name, x in prepared.graph.initializers.items():
        if name not in constants:
            candidates.setdefault(name, x)
    candidates.update(prepared.unused)
    names = [wrt] if isinstance(wrt, str) else list(wrt)
    names = expand_selectors(prepared, names, trainable(prepared))
    values = match(names, candidates, "wrt", "value")
    return _only_floats(values, "wrt")


def select_outputs(
    prepared: Prepared, outputs: str | Sequence[str] | None, argument: str = "outputs"
) -> list[ir.Value]:
    """Return the graph outputs that ``outputs`` names; ``None`` stands for all float ones."""
    if outputs is None:
        chosen = [y for y in prepared.graph.outputs if S.is_float(y)]
        if not chosen:
            raise UndifferentiableError(
                "the model has no float output: "
                + ", ".join(S.describe_value(y) for y in prepared.graph.outputs)
            )
        return chosen
    candidates = {y.name or "": y for y in prepared.graph.outputs}
    chosen = match(
        [outputs] if isinstance(outputs, str) else list(outputs), candidates, argument, "output"
    )
    return _only_floats(chosen, argument)


def _only_floats(values: list[ir.Value], argument: str) -> list[ir.Value]:
    wrong = [x for x in values if not S.is_float(x)]
    if wrong:
        listing = ", ".join(S.describe_value(x) for x in wrong)
        raise UndifferentiableError(
            f"only floats have gradients: {listing}\nhint: leave them out of `{argument}`"
        )
    return values


def trainable(prepared: Prepared, *, inner: Sequence[ir.Value] = ()) -> list[ir.Value]:
    """Return the float initializers that work as weights and through which a gradient can flow.

    Running statistics of BatchNormalization are not among them, nor are the constants of the graph
    and what works as one (:mod:`onnxtrain.graph`). A gradient comes from the float outputs,
    and from ``inner`` values.
    """
    graph = prepared.graph
    excluded = prepared.constants | prepared.untrained
    statistics = batch_statistics(graph)
    candidates = [
        x
        for name, x in graph.initializers.items()
        if name not in excluded and x not in statistics and S.is_float(x)
    ]
    useful = reaching(graph, [*graph.outputs, *inner], refused=True)
    return [x for x in candidates if x in useful]


def batch_statistics(graph: ir.Graph) -> set[ir.Value]:
    """Return the values that BatchNormalization nodes read as running mean and variance."""
    statistics: set[ir.Value] = set()
    for node in nodes(graph, "BatchNormalization", subgraphs=True):
        statistics.update(x for x in node.inputs[3:5] if x is not None)
    return statistics


def reaching(
    graph: ir.Graph, outputs: Sequence[ir.Value] | None = None, *, refused: bool = False
) -> set[ir.Value]:
    """Return every value from which a differentiable path leads to ``outputs``.

    ``None`` stands for every float output of the graph. With ``refused``, nodes count as passed
    that it is an error to differentiate through: whoever wants the gradient shall be told.
    """
    useful = set(graph.outputs if outputs is None else outputs)
    useful = {y for y in useful if S.is_float(y)}
    for node in reversed(list(graph)):
        if any(y in useful for y in node.outputs):
            useful.update(flowing_inputs(node))
            if refused and is_not_differentiable(node):
                useful.update(x for x in node.inputs if x is not None)
    return useful


def flowing_inputs(node: ir.Node) -> list[ir.Value]:
    """Return the inputs of a node that pass a gradient on to some output of it."""
    return [] if blocks_gradient(node) else differentiable_inputs(node)


def match(
    wanted: Sequence[str], candidates: dict[str, ir.Value], argument: str, kind: str
) -> list[ir.Value]:
    """Return the candidates that names and patterns select; raise if one matches nothing."""
    matched: dict[ir.Value, None] = {}
    absent: list[str] = []
    for pattern in wanted:
        if pattern in candidates:
            matched.setdefault(candidates[pattern])
            continue
        hits = fnmatch.filter(candidates, pattern) if any(c in pattern for c in "*?[") else []
        # A pattern stands for what can be differentiated; a plain name must exist.
        hits = [h for h in hits if S.is_float(candidates[h])]
        if not hits:
            absent.append(pattern)
        for name in hits:
            matched.setdefault(candidates[name])
    if absent:
        near = {
            n for a in absent for n in difflib.get_close_matches(a, candidates, n=3, cutoff=0.4)
        }
        listing = ", ".join(repr(a) for a in absent)
        choice = ", ".join(sorted(near) or list(candidates)[:8])
        raise PrepareError(
            f"no such {kind} in `{argument}`: {listing}\nhint: the model has {choice}"
        )
    if not matched:
        raise PrepareError(f"`{argument}` is empty\nhint: name at least one {kind}")
    return list(matched)
