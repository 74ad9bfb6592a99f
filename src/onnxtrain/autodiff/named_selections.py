"""Parameters by a word: ``bias``, ``norm``, ``last:2``, where a list of names would stand."""

from __future__ import annotations

import re
from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.errors import PrepareError
from onnxtrain.graph.nodes import is_op
from onnxtrain.graph.roles import kinds

BIAS, NORM, LAST = "bias", "norm", "last"
_LAST = re.compile(r"^last:(\d+)$")
_BLOCK = re.compile(r"^(.*?(?:^|[._/])(?:layers?|blocks?|h|stages?|resblocks))[._/](\d+)[._/]")
_NORM_NAME = re.compile(r"norm|(^|[._/])ln(_|\d|[._/])", re.IGNORECASE)
_NORMS = ("BatchNormalization", "LayerNormalization", "InstanceNormalization", "GroupNormalization")
_OFFSET = 2  # the place of a normalisation's bias
_OWN_LAYER = frozenset({"weight", "embedding", "recurrent weight"})


def expand(model: ir.Model, names: Sequence[str], trainable: Sequence[ir.Value]) -> list[str]:
    """Return names in which each word is replaced by the parameters it stands for.

    Args:
        model: a prepared model.
        names: names, patterns and words; a tensor that is called by a word goes first.
        trainable: the parameters of the model.

    Raises:
        PrepareError: if a word stands for nothing.
    """
    known = {*model.graph.initializers, *(x.name for x in model.graph.inputs)}
    expanded: list[str] = []
    for name in names:
        if name in known or not _is_word(name):
            expanded.append(name)
            continue
        hits = _meant(model, name, trainable)
        if not hits:
            raise PrepareError(f"the model has no parameters that {name!r} stands for")
        expanded += [x.name or "" for x in hits]
    return expanded


def listed(model: ir.Model, trainable: Sequence[ir.Value]) -> dict[str, str]:
    """Return the words that stand for something in this model, with what that is."""
    if not trainable:
        return {}
    words = {
        BIAS: _meant(model, BIAS, trainable),
        NORM: _meant(model, NORM, trainable),
        f"{LAST}:1": _meant(model, f"{LAST}:1", trainable),
    }
    layers, kind = _layers(model, trainable)
    about = {w: f"{len(v)} tensor(s), {_numbers(v)} numbers" for w, v in words.items() if v}
    if f"{LAST}:1" in about:
        about[f"{LAST}:1"] += f", of {len(layers)} {kind}"
    return about


def _numbers(values: Sequence[ir.Value]) -> int:
    return sum(x.const_value.size for x in values if x.const_value is not None)


def _is_word(name: str) -> bool:
    return name in (BIAS, NORM) or _LAST.match(name) is not None


def _meant(model: ir.Model, word: str, trainable: Sequence[ir.Value]) -> list[ir.Value]:
    parts = kinds(model)
    if word == BIAS:
        return [x for x in trainable if parts.get(x.name or "") == "bias" or _is_offset(x)]
    if word == NORM:
        return [x for x in trainable if _is_norm(x, parts.get(x.name or "", ""))]
    match = _LAST.match(word)
    assert match is not None
    count = int(match[1])
    if count < 1:
        raise PrepareError(f"{word!r} stands for no layer\nhint: last:1 is the last one")
    layers, kind = _layers(model, trainable)
    if count > len(layers):
        raise PrepareError(f"{word!r}: the model has only {len(layers)} {kind}")
    return [x for layer in layers[-count:] for x in layer]


def _is_offset(x: ir.Value) -> bool:
    return any(use.idx == _OFFSET and is_op(use.node, *_NORMS) for use in x.uses())


def _is_norm(x: ir.Value, kind: str) -> bool:
    used = any(use.idx in (1, _OFFSET) and is_op(use.node, *_NORMS) for use in x.uses())
    named = kind == "scale" and _NORM_NAME.search(x.name or "") is not None
    return used or named or kind == "normalisation"


def _layers(model: ir.Model, trainable: Sequence[ir.Value]) -> tuple[list[list[ir.Value]], str]:
    """Return the parameters layer by layer, in the order in which the graph reads them.

    Where names number blocks (``layers.3.``), those are the layers, and what comes after the last
    block belongs to it. Else each weight begins one.
    """
    order = _in_order(model, trainable)
    blocks = [_block(x) for x in order]
    if len({b for b in blocks if b is not None}) > 1:
        return _by_block(order, blocks), "blocks"
    parts, layers = kinds(model), list[list[ir.Value]]()
    for x in order:
        if not layers or parts.get(x.name or "", "weight") in _OWN_LAYER:
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


def _in_order(model: ir.Model, trainable: Sequence[ir.Value]) -> list[ir.Value]:
    """Return parameters in the order in which nodes first read them."""
    wanted = set(trainable)
    order = dict.fromkeys(
        x for node in model.graph.all_nodes() for x in node.inputs if x is not None and x in wanted
    )
    return [*order, *(x for x in trainable if x not in order)]


__all__ = ["expand", "listed"]
