"""Which initializers a build may train: by role, or as the user names them."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Collection, Sequence

import onnx_ir as ir

from onnxtrain.autodiff.gradients import Names
from onnxtrain.autodiff.named_selections import expand
from onnxtrain.autodiff.registry import NO_GRADIENT
from onnxtrain.autodiff.selection import (
    batch_statistics,
    flowing_inputs,
    match,
    trainable,
    untrained_names,
)
from onnxtrain.errors import PrepareError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.nodes import key_of
from onnxtrain.graph.roles import roles_of, summary

_SHOWN = 8  # reasons in a message
_SMALL_INTEGERS = frozenset(
    {ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.INT4, ir.DataType.UINT4}
)

_IN_INTEGERS = ("QLinear", "QGemm", "QAttention", "MatMulInteger", "ConvInteger", "DynamicQuantize")
_INTEGER_ARITHMETIC = (
    "hint: small steps do not change integers, and no adapter fits beside operators that compute in"
    " them: train the model as it was before, or quantise it in the format QDQ, for onnxtrain.lora"
)


def candidates(
    base: ir.Model, train: Names, freeze: Names, *, inner: Collection[str] = ()
) -> list[ir.Value]:
    """Return the initializers that may be trained, in the order of the file.

    ``inner`` are values inside the model that a loss looks at, beside its outputs.
    """
    statistics = batch_statistics(base.graph)
    seen = [y for node in base.graph for y in node.outputs if y.name in inner]
    free = trainable(base, inner=seen)
    names = expand(base, names_list(train), free)
    chosen = free if train is None else _named(base, names)
    frozen = expand(base, names_list(freeze), free)
    if frozen:
        known = {x.name or "": x for x in chosen}
        out = set(match(frozen, {**dict(base.graph.initializers), **known}, "freeze", "parameter"))
        chosen = [x for x in chosen if x not in out]
    chosen = [x for x in chosen if x not in statistics or any(n == x.name for n in names)]
    chosen = [x for x in chosen if 0 not in (S.dims_of(x) or ())]  # nothing to change in them
    if not chosen:
        raise PrepareError(_nothing_left(base, train, freeze))
    return chosen


def why_untrained(base: ir.Model) -> list[str]:
    """Return a line for each reason why float tensors of the model do not train by default."""
    return summary(roles_of(base), base.graph.initializers)


def names_list(names: Names) -> list[str]:
    """Return names or patterns as a list."""
    return [] if names is None else [names] if isinstance(names, str) else list(names)


def _named(base: ir.Model, train: list[str]) -> list[ir.Value]:
    """Return what ``train`` names: a plain name may be any tensor, a pattern stands for weights.

    A pattern that fits no weight stands for the other tensors that it fits.
    """
    known = {
        n: x
        for n, x in base.graph.initializers.items()
        if S.is_float(x) and not S.is_own_constant(x)
    }
    untrained = untrained_names(base)
    weights = {n: x for n, x in known.items() if n not in untrained}
    wanted: set[ir.Value] = set()
    for name in train:
        narrow = name not in known and any(fnmatch.filter(weights, name))
        wanted.update(match([name], weights if narrow else known, "train", "parameter"))
    return [x for x in known.values() if x in wanted]


def _nothing_left(base: ir.Model, train: Names, freeze: Names) -> str:
    lines = ["no parameter is left to train"]
    if train is None and freeze is None:
        reasons = why_untrained(base)
        lines += [f"  {line}" for line in reasons[:_SHOWN]]
        cut_off = [n for n, role in roles_of(base).items() if role.trains]
        if cut_off:
            more = f" and {len(cut_off) - _SHOWN} more" if len(cut_off) > _SHOWN else ""
            lines.append(f"  no differentiable path from {', '.join(cut_off[:_SHOWN])}{more}")
        if len(reasons) > _SHOWN:
            lines.append(f"  ... and {len(reasons) - _SHOWN} more reasons")
        counts = Counter(key_of(n) for n in base.graph.all_nodes() if key_of(n) in NO_GRADIENT)
        lines += [
            f"  {key.split('::')[1]} x{n}: {NO_GRADIENT[key]}"
            for key, n in counts.items()
            if "::" in key
        ]
        integers = _integer_weights(base)
        if integers:
            more = f" and {len(integers) - _SHOWN} more" if len(integers) > _SHOWN else ""
            lines.append(
                f"  held as integers: {len(integers)}: {', '.join(integers[:_SHOWN])}{more}"
            )
        if len(lines) == 1:
            lines.append("  the model holds no float tensor that a gradient could change")
        last = _last_values(base.graph, cut_off)
        if integers and not _beside(base.graph, integers):
            lines.append(_INTEGER_ARITHMETIC)
        else:
            lines.append(_advice(bool(integers), bool(reasons or cut_off), last))
    else:
        lines.append("hint: look at `onnxtrain explain`, then at train and freeze")
    return "\n".join(lines)


def _integer_weights(base: ir.Model) -> list[str]:
    """Return the weights of a quantised model: tensors of small integers that are no vectors."""
    return [
        name
        for name, x in base.graph.initializers.items()
        if x.dtype in _SMALL_INTEGERS and len(x.shape or ()) > 1 and x.uses()
    ]


def _beside(graph: ir.Graph, integers: Sequence[str]) -> bool:
    """Return whether an adapter fits beside an operator that reads one of these weights.

    It does beside those that make floats of integers; others compute in integers.
    """
    readers = [use.node.op_type for n in integers for use in graph.initializers[n].uses()]
    return not all(r.startswith(_IN_INTEGERS) for r in readers)


def _last_values(graph: ir.Graph, weights: Sequence[str]) -> list[str]:
    """Return the values up to which gradients of weights could flow: what an ArgMax reads."""
    reached = {graph.initializers[n] for n in weights if n in graph.initializers}
    ends: dict[str, None] = {}
    for node in graph:
        flowing = flowing_inputs(node)
        if any(x in reached for x in flowing):
            reached.update(y for y in node.outputs if S.is_float(y))
        ends.update(
            {
                x.name or "": None
                for x in node.inputs
                if x is not None and x in reached and x not in flowing
            }
        )
    return [n for n in ends if n not in graph.initializers]


def _advice(integers: bool, tensors: bool, last: Sequence[str] = ()) -> str:
    """Return the hint that fits what the model holds."""
    if last:
        return (
            "hint: no gradient comes back from the outputs; a loss may look at a value inside: "
            f"LossTerm(loss, output={last[-1]!r})"
        )
    if integers:
        return (
            "hint: small steps do not change integers: onnxtrain.lora(...) puts matrices that train"
            " beside them; straight_through=True trains through what rounds activations"
        )
    if tensors:
        return "hint: name tensors in `train` to train them all the same"
    return "hint: numbers in attributes do not train; export the model with its weights as tensors"


__all__ = ["candidates", "names_list", "why_untrained"]
