"""Which initializers a build may train: by role, or as the user names them.

Weights from elsewhere, put into a model before anything is built of it.
"""

from __future__ import annotations

import fnmatch
import json
import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.autodiff.gradients import Names
from onnxtrain.autodiff.rule_registry import NO_GRADIENT
from onnxtrain.autodiff.selection import (
    batch_statistics,
    expand_selectors,
    flowing_inputs,
    match,
    trainable,
)
from onnxtrain.checkpoint import load_checkpoint
from onnxtrain.errors import CheckpointError, PrepareError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.io import Source, load
from onnxtrain.graph.nodes import op_key
from onnxtrain.importer import Prepared
from onnxtrain.importer.parameters import summarize_untrained

_MAX_REASONS = 8  # reasons in a message
_SMALL_INTEGERS = frozenset(
    {ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.INT4, ir.DataType.UINT4}
)

_INTEGER_OPERATORS = (
    "QLinear",
    "QGemm",
    "QAttention",
    "MatMulInteger",
    "ConvInteger",
    "DynamicQuantize",
)
_INTEGER_ARITHMETIC_HINT = (
    "hint: small steps do not change integers, and no adapter fits beside operators that compute in"
    " them: train the model as it was before, or quantise it in the format QDQ, for onnxtrain.lora"
)


def candidates(
    base: Prepared, train: Names, freeze: Names, *, inner: Collection[str] = ()
) -> list[ir.Value]:
    """Return the initializers that may be trained, in the order of the file.

    ``inner`` are values inside the model that a loss looks at, beside its outputs.
    """
    statistics = batch_statistics(base.graph)
    seen = [y for node in base.graph for y in node.outputs if y.name in inner]
    free = trainable(base, inner=seen)
    names = expand_selectors(base, names_list(train), free)
    chosen = free if train is None else _select_by_name(base, names)
    frozen = expand_selectors(base, names_list(freeze), free)
    if frozen:
        known = {x.name or "": x for x in chosen}
        out = set(match(frozen, {**dict(base.graph.initializers), **known}, "freeze", "parameter"))
        chosen = [x for x in chosen if x not in out]
    chosen = [x for x in chosen if x not in statistics or any(n == x.name for n in names)]
    chosen = [x for x in chosen if 0 not in (S.dims_of(x) or ())]  # nothing to change in them
    if not chosen:
        raise PrepareError(_nothing_to_train(base, train, freeze))
    return chosen


def untrained_reasons(base: Prepared) -> list[str]:
    """Return a line for each reason why float tensors of the model do not train by default."""
    return summarize_untrained(base.roles, base.graph.initializers)


def names_list(names: Names) -> list[str]:
    """Return names or patterns as a list."""
    return [] if names is None else [names] if isinstance(names, str) else list(names)


def _select_by_name(base: Prepared, train: list[str]) -> list[ir.Value]:
    """Return what ``train`` names: a plain name may be any tensor, a pattern stands for weights.

    A pattern that fits no weight stands for the other tensors that it fits.
    """
    known = {
        n: x
        for n, x in base.graph.initializers.items()
        if S.is_float(x) and not S.is_generated_constant(x)
    }
    untrained = base.untrained
    weights = {n: x for n, x in known.items() if n not in untrained}
    wanted: set[ir.Value] = set()
    for name in train:
        narrow = name not in known and any(fnmatch.filter(weights, name))
        wanted.update(match([name], weights if narrow else known, "train", "parameter"))
    return [x for x in known.values() if x in wanted]


def _nothing_to_train(base: Prepared, train: Names, freeze: Names) -> str:
    lines = ["no parameter is left to train"]
    if train is None and freeze is None:
        reasons = untrained_reasons(base)
        lines += [f"  {line}" for line in reasons[:_MAX_REASONS]]
        cut_off = [n for n, role in base.roles.items() if role.trains]
        if cut_off:
            more = f" and {len(cut_off) - _MAX_REASONS} more" if len(cut_off) > _MAX_REASONS else ""
            lines.append(f"  no differentiable path from {', '.join(cut_off[:_MAX_REASONS])}{more}")
        if len(reasons) > _MAX_REASONS:
            lines.append(f"  ... and {len(reasons) - _MAX_REASONS} more reasons")
        counts = Counter(op_key(n) for n in base.graph.all_nodes() if op_key(n) in NO_GRADIENT)
        lines += [
            f"  {key.split('::')[1]} x{n}: {NO_GRADIENT[key]}"
            for key, n in counts.items()
            if "::" in key
        ]
        integers = _integer_weights(base.graph)
        if integers:
            more = (
                f" and {len(integers) - _MAX_REASONS} more" if len(integers) > _MAX_REASONS else ""
            )
            lines.append(
                f"  held as integers: {len(integers)}: {', '.join(integers[:_MAX_REASONS])}{more}"
            )
        if len(lines) == 1:
            lines.append("  the model holds no float tensor that a gradient could change")
        last = _last_differentiable_values(base.graph, cut_off)
        if integers and not _adapter_fits(base.graph, integers):
            lines.append(_INTEGER_ARITHMETIC_HINT)
        else:
            lines.append(_hint(bool(integers), bool(reasons or cut_off), last))
    else:
        lines.append("hint: look at `onnxtrain explain`, then at train and freeze")
    return "\n".join(lines)


def _integer_weights(graph: ir.Graph) -> list[str]:
    """Return the weights of a quantised model: tensors of small integers that are no vectors."""
    return [
        name
        for name, x in graph.initializers.items()
        if x.dtype in _SMALL_INTEGERS and len(x.shape or ()) > 1 and x.uses()
    ]


def _adapter_fits(graph: ir.Graph, integers: Sequence[str]) -> bool:
    """Return whether an adapter fits beside an operator that reads one of these weights.

    It does beside those that make floats of integers; others compute in integers.
    """
    readers = [use.node.op_type for n in integers for use in graph.initializers[n].uses()]
    return not all(r.startswith(_INTEGER_OPERATORS) for r in readers)


def _last_differentiable_values(graph: ir.Graph, weights: Sequence[str]) -> list[str]:
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


def _hint(integers: bool, tensors: bool, last: Sequence[str] = ()) -> str:
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


ALIASES = "onnxtrain.aliases"
"""Metadata of a model: other names of its tied weights, a JSON object of lists."""


def aliases_of(model: ir.Model) -> dict[str, tuple[str, ...]]:
    """Return the other names of tied weights, as the exporter recorded them.

    Raises:
        PrepareError: if the record is damaged.
    """
    text = model.metadata_props.get(ALIASES, "{}")
    try:
        aliases = {name: tuple(others) for name, others in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise PrepareError(f"the metadata {ALIASES!r} of the model is damaged: {error}") from error
    if not all(isinstance(other, str) for others in aliases.values() for other in others):
        raise PrepareError(f"the metadata {ALIASES!r} of the model is damaged: names are strings")
    return aliases


def load_weights(
    model: Source,
    weights: Mapping[str, Any] | str | os.PathLike[str],
    *,
    strict: bool = True,
) -> onnx.ModelProto:
    """Return the model with weights of a state_dict or a safetensors file.

    ``Trainer.load_weights`` sets what is trained; this sets all initializers, also those to freeze.

    Args:
        model: a path, bytes, ``ModelProto`` or ``ir.Model``; it is not changed.
        weights: names to arrays or torch tensors, or a path.
        strict: refuse names that the model has not, and float initializers that get no weight.

    Raises:
        CheckpointError: if names or shapes do not fit.
    """
    if isinstance(weights, str | os.PathLike):
        weights = load_checkpoint(weights)[0]
    work = load(model)
    known = work.graph.initializers
    extra = [n for n in weights if n not in known and not n.startswith("optim/")]
    missing = [n for n, x in known.items() if n not in weights and S.is_float(x)]
    if strict and (extra or missing):
        raise CheckpointError(
            f"weights do not fit: missing {_first_names(missing)}, unknown {_first_names(extra)}\n"
            "hint: strict=False sets those that fit"
        )
    value: Any
    for name, value in weights.items():
        if name not in known:
            continue
        array = value.detach().cpu().numpy() if hasattr(value, "detach") else np.asarray(value)
        old = known[name].const_value
        assert old is not None
        if tuple(array.shape) != tuple(old.numpy().shape):
            raise CheckpointError(
                f"{name!r} has shape {list(array.shape)}, expected {list(old.numpy().shape)}"
            )
        known[name].const_value = ir.Tensor(array.astype(old.numpy().dtype), old.dtype, name=name)
    return ir.to_proto(work)


def _first_names(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return (", ".join(names[:5]) or "nothing") + more
