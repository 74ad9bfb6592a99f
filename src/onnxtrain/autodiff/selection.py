"""Select values by name: what ``wrt``, ``train``, ``freeze`` and ``outputs`` mean for a model.

A request is a list of names, glob patterns and selectors (``bias``, ``norm``, ``last:2``), or
``None`` for all trainable parameters.
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
from onnxtrain.importer import Prepared, constant_names

BIAS, NORM, LAST = "bias", "norm", "last"
_LAST = re.compile(r"^last:(\d+)$")
_BLOCK = re.compile(r"^(.*?(?:^|[._/])(?:layers?|blocks?|h|stages?|resblocks))[._/](\d+)[._/]")
_NORM_NAME = re.compile(r"norm|(^|[._/])ln(_|\d|[._/])", re.IGNORECASE)
_NORMS = ("BatchNormalization", "LayerNormalization", "InstanceNormalization", "GroupNormalization")
_OFFSET = 2  # index of the bias of a normalization operator
_OWN_LAYER = frozenset({"weight", "embedding", "recurrent weight"})


def expand_selectors(
    prepared: Prepared, names: Sequence[str], trainable: Sequence[ir.Value]
) -> list[str]:
    """Replace each selector (``bias``, ``norm``, ``last:N``) by the names of its parameters.

    Args:
        prepared: the model.
        names: names, patterns and selectors. A tensor named like a selector takes
            precedence.
        trainable: the parameters of the model.

    Raises:
        PrepareError: a selector matches no parameter.
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
            raise PrepareError(f"the selector {name!r} matches no parameter of the model")
        expanded += [x.name or "" for x in hits]
    return expanded


def available_selectors(prepared: Prepared, trainable: Sequence[ir.Value]) -> dict[str, str]:
    """Return the selectors that match parameters of this model, each with a description."""
    if not trainable:
        return {}
    selected = {
        BIAS: _resolve_selector(prepared, BIAS, trainable),
        NORM: _resolve_selector(prepared, NORM, trainable),
        f"{LAST}:1": _resolve_selector(prepared, f"{LAST}:1", trainable),
    }
    layers, kind = _layers(prepared, trainable)
    descriptions = {
        selector: f"{len(values)} tensor(s), {_element_count(values)} elements"
        for selector, values in selected.items()
        if values
    }
    if f"{LAST}:1" in descriptions:
        descriptions[f"{LAST}:1"] += f", of {len(layers)} {kind}"
    return descriptions


def _element_count(values: Sequence[ir.Value]) -> int:
    return sum(x.const_value.size for x in values if x.const_value is not None)


def _is_selector(name: str) -> bool:
    return name in (BIAS, NORM) or _LAST.match(name) is not None


def _resolve_selector(
    prepared: Prepared, selector: str, trainable: Sequence[ir.Value]
) -> list[ir.Value]:
    kinds = prepared.kinds
    if selector == BIAS:
        return [x for x in trainable if kinds.get(x.name or "") == "bias" or _is_offset(x)]
    if selector == NORM:
        return [x for x in trainable if _is_norm(x, kinds.get(x.name or "", ""))]
    match = _LAST.match(selector)
    assert match is not None
    count = int(match[1])
    if count < 1:
        raise PrepareError(
            f"{selector!r} must select at least one layer\nhint: last:1 is the last layer"
        )
    layers, kind = _layers(prepared, trainable)
    if count > len(layers):
        raise PrepareError(f"{selector!r} selects {count} {kind}, but the model has {len(layers)}")
    return [x for layer in layers[-count:] for x in layer]


def _is_offset(x: ir.Value) -> bool:
    return any(use.idx == _OFFSET and is_op(use.node, *_NORMS) for use in x.uses())


def _is_norm(x: ir.Value, kind: str) -> bool:
    used = any(use.idx in (1, _OFFSET) and is_op(use.node, *_NORMS) for use in x.uses())
    named = kind == "scale" and _NORM_NAME.search(x.name or "") is not None
    return used or named or kind == "normalization"


def _layers(prepared: Prepared, trainable: Sequence[ir.Value]) -> tuple[list[list[ir.Value]], str]:
    """Return the parameters grouped by layer, in the order in which the graph reads them.

    Where names have block numbers (``layers.3.``), each block is a layer, and parameters after the
    last block belong to it. Otherwise each weight starts a layer.
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
        if current is not None:  # parameters before the first block belong to none
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
    """Return the inputs and initializers that ``wrt`` selects, in that order, each once.

    ``None`` selects every trainable parameter, in the order of the file.
    """
    if wrt is None:
        return trainable(prepared)
    candidates = {x.name or "": x for x in prepared.graph.inputs}
    constants = prepared.constants | constant_names(prepared.model)
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
    """Return the graph outputs that ``outputs`` selects; ``None`` selects all float outputs."""
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
            f"only float tensors have gradients, got {listing}\nhint: remove them from `{argument}`"
        )
    return values


def trainable(prepared: Prepared, *, inner: Sequence[ir.Value] = ()) -> list[ir.Value]:
    """Return the float initializers that are parameters and that a gradient can reach.

    Excludes running statistics of BatchNormalization, constants of the graph, and tensors that
    parameter detection classified as constants. Gradients start from the float outputs and from
    ``inner`` values.
    """
    graph = prepared.graph
    excluded = prepared.constants | constant_names(prepared.model) | prepared.untrained
    statistics = batch_statistics(graph)
    candidates = [
        x
        for name, x in graph.initializers.items()
        if name not in excluded and x not in statistics and S.is_float(x)
    ]
    useful = reaching(graph, [*graph.outputs, *inner], refused=True)
    return [x for x in candidates if x in useful]


def batch_statistics(graph: ir.Graph) -> set[ir.Value]:
    """Return the running means and variances that BatchNormalization nodes read."""
    statistics: set[ir.Value] = set()
    for node in nodes(graph, "BatchNormalization", subgraphs=True):
        statistics.update(x for x in node.inputs[3:5] if x is not None)
    return statistics


def reaching(
    graph: ir.Graph, outputs: Sequence[ir.Value] | None = None, *, refused: bool = False
) -> set[ir.Value]:
    """Return every value from which a differentiable path leads to ``outputs``.

    ``None`` means every float output of the graph. With ``refused``, paths may cross nodes that are
    an error to differentiate through, so that the caller gets that error and not silence.
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
    """Return the inputs of a node that receive a gradient from its outputs."""
    return [] if blocks_gradient(node) else differentiable_inputs(node)


def match(
    wanted: Sequence[str], candidates: dict[str, ir.Value], argument: str, kind: str
) -> list[ir.Value]:
    """Return the candidates that names and patterns select; raise if one of them has no match."""
    matched: dict[ir.Value, None] = {}
    absent: list[str] = []
    for pattern in wanted:
        if pattern in candidates:
            matched.setdefault(candidates[pattern])
            continue
        hits = fnmatch.filter(candidates, pattern) if any(c in pattern for c in "*?[") else []
        # A pattern selects what can be differentiated; a plain name of another type is an error.
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
        raise PrepareError(f"`{argument}` is empty\nhint: select at least one {kind}")
    return list(matched)
