"""Which modules get adapters: by a word, or by names and patterns."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.adapters.modules.layers import LINEAR
from onnxtrain.adapters.modules.units import Unit
from onnxtrain.errors import PrepareError
from onnxtrain.graph.nodes import is_op

ATTENTION, ALL_LINEAR = "attention", "all-linear"
_IN_ATTENTION = re.compile(r"(^|\.)\w*(attn|attention)\w*\.", re.IGNORECASE)
_BY_LAST_NAME = frozenset(
    (
        *("q_proj", "k_proj", "v_proj", "o_proj", "out_proj", "qkv_proj", "in_proj", "Wqkv"),
        *("q_lin", "k_lin", "v_lin", "out_lin", "query", "key", "value", "query_key_value"),
        *("c_attn", "to_q", "to_k", "to_v"),
    )
)
_HEADS = frozenset({"lm_head", "embed_out", "output_projection"})
_AFTER_HEAD = ("Add", "Cast", "Div", "Mul", "Tanh", "Softmax", "LogSoftmax", "Identity", "Sigmoid")
_SHOWN = 8


def choose(units: Sequence[Unit], targets: str | Sequence[str]) -> list[Unit]:
    """Return the units that ``targets`` names, in the order of the file.

    Raises:
        PrepareError: if a pattern matches nothing; near names are listed.
    """
    if not units:
        raise PrepareError(
            "the model has no layer that an adapter could be put beside\n"
            "hint: adapters go beside MatMul, Gemm, MatMulNBits, MatMulBnb4, Gather and Conv whose "
            "weights are stored in the file"
        )
    chosen: dict[str, Unit] = {}
    for wanted in [targets] if isinstance(targets, str) else targets:
        hits = _matching(units, wanted)
        if not hits:
            raise PrepareError(_nothing(units, wanted))
        chosen.update((u.module, u) for u in hits)
    if not chosen:
        raise PrepareError("`targets` is empty\nhint: attention, all-linear, or names of layers")
    return [u for u in units if u.module in chosen]


def _matching(units: Sequence[Unit], wanted: str) -> list[Unit]:
    if wanted == ATTENTION:
        return [u for u in units if u.kind == LINEAR and _in_attention(u.module)]
    if wanted == ALL_LINEAR:
        linear = [u for u in units if u.kind == LINEAR]
        inner = [u for u in linear if not _is_head(u)]
        return inner or linear
    return [u for u in units if any(_fits(name, wanted) for name in _names(u))]


def _in_attention(module: str) -> bool:
    return _IN_ATTENTION.search(module) is not None or module.split(".")[-1] in _BY_LAST_NAME


def _names(unit: Unit) -> list[str]:
    """Return what a user may call a unit: its module, its parts, the nodes and weights."""
    layers = [s.layer for s in unit.sites]
    names = [unit.module]
    for layer in layers:
        names += [layer.module, layer.node.name or "", *(w.name or "" for w in layer.weights)]
    return names


def _fits(name: str, target: str) -> bool:
    if any(c in target for c in "*?["):
        return fnmatch.fnmatchcase(name, target)
    return name == target or name.endswith("." + target)


def _is_head(unit: Unit) -> bool:
    """Return whether a unit makes an output of the model: the head stays as it is."""
    if unit.module.split(".")[-1] in _HEADS:
        return True
    return any(_reaches_output(site.layer.y) for site in unit.sites)


def _reaches_output(y: ir.Value) -> bool:
    pending, seen = [y], set[ir.Value]()
    while pending:
        value = pending.pop()
        if value.is_graph_output():
            return True
        if value in seen:
            continue
        seen.add(value)
        pending += [
            u.node.outputs[0]
            for u in value.uses()
            if is_op(u.node, *_AFTER_HEAD) and _beside_constants(u.node, value)
        ]
    return False


def _beside_constants(node: ir.Node, value: ir.Value) -> bool:
    others = [x for x in node.inputs if x is not None and x is not value]
    return all(x.is_initializer() or x.const_value is not None for x in others)


def _nothing(units: Sequence[Unit], target: str) -> str:
    modules = [u.module for u in units]
    last = list(dict.fromkeys(m.split(".")[-1] for m in modules))
    near = [
        *difflib.get_close_matches(target, last, n=3, cutoff=0.4),
        *difflib.get_close_matches(target, modules, n=3, cutoff=0.4),
    ]
    choice = near or [*last, *modules]
    more = f" and {len(choice) - _SHOWN} more" if len(choice) > _SHOWN else ""
    listing = ", ".join(dict.fromkeys(choice[:_SHOWN]))
    return (
        f"`targets` matches no layer: {target!r}\n"
        f"hint: the model has {listing}{more}; or take 'attention' or 'all-linear'"
    )


__all__ = ["choose"]
