"""Trainable parameters: which initializers a build trains, and initial weights from other files.

- :func:`select_parameters` applies ``train=`` and ``freeze=``. By default it selects every weight
  with a differentiable path to an output; the error lists why nothing is left.
- :func:`load_weights` sets initializers from a state_dict before a build.
- :func:`aliases_of` reads the other names of tied weights, which torch's exporter drops.
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
    reaching,
    trainable,
)
from onnxtrain.checkpoint import load_checkpoint
from onnxtrain.errors import CheckpointError, PrepareError, term_of_output
from onnxtrain.graph import shapes as S
from onnxtrain.graph.io import Source, load
from onnxtrain.graph.nodes import op_key
from onnxtrain.importer import Prepared
from onnxtrain.importer.parameters import summarize_untrained

ALIASES = "onnxtrain.aliases"
"""Metadata key of a model: other names of its tied weights, a JSON object of lists."""

_MAX_REASONS = 8  # per error message
_QUANTIZED_DTYPES = frozenset(
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
    "hint: gradient steps cannot train integers, and onnxtrain.lora(...) does not support operators"
    " that compute in them; train the float model, or quantize it in the QDQ format"
)


def select_parameters(
    base: Prepared,
    train: Names,
    freeze: Names,
    *,
    inner: Collection[str] = (),
    loss: object = None,
) -> list[ir.Value]:
    """Return the initializers to train, in the order of the model.

    Args:
        base: the imported model.
        train: names, globs or selectors of parameters; by default all trainable ones.
        freeze: names, globs or selectors to exclude.
        inner: values inside the model that the loss reads, in addition to its outputs.
        loss: the loss of the caller, for hints.

    Raises:
        PrepareError: if a name is unknown or nothing is left to train.
    """
    statistics = batch_statistics(base.graph)
    read_by_loss = [y for node in base.graph for y in node.outputs if y.name in inner]
    default = trainable(base, inner=read_by_loss)
    names = expand_selectors(base, names_list(train), default)
    selected = default if train is None else _select_by_name(base, names)
    frozen = expand_selectors(base, names_list(freeze), default)
    if frozen:
        known = {**dict(base.graph.initializers), **{x.name or "": x for x in selected}}
        excluded = set(match(frozen, known, "freeze", "parameter"))
        selected = [x for x in selected if x not in excluded]
    # The forward pass updates running statistics; they train only if named literally.
    selected = [x for x in selected if x not in statistics or x.name in names]
    selected = [x for x in selected if 0 not in (S.dims_of(x) or ())]  # empty tensors
    if not selected:
        raise PrepareError(_nothing_to_train(base, train, freeze, loss))
    return selected


def untrained_reasons(base: Prepared) -> list[str]:
    """Return a line for each reason why float tensors of the model do not train by default."""
    return summarize_untrained(base.roles, base.graph.initializers)


def names_list(names: Names) -> list[str]:
    """Return names or patterns as a list."""
    return [] if names is None else [names] if isinstance(names, str) else list(names)


def _select_by_name(base: Prepared, train: list[str]) -> list[ir.Value]:
    """Return the tensors that ``train`` names.

    An exact name selects any float tensor. A pattern selects weights only, or other float tensors
    (scales, constants) if it matches no weight.
    """
    floats = {
        n: x
        for n, x in base.graph.initializers.items()
        if S.is_float(x) and not S.is_generated_constant(x)
    }
    untrained = base.untrained
    weights = {n: x for n, x in floats.items() if n not in untrained}
    selected: set[ir.Value] = set()
    for name in train:
        weights_only = name not in floats and any(fnmatch.filter(weights, name))
        selected.update(match([name], weights if weights_only else floats, "train", "parameter"))
    return [x for x in floats.values() if x in selected]


_OWN_TENSORS = {
    **dict.fromkeys(("LayerNormalization", "InstanceNormalization", "BatchNormalization"), (1, 2)),
    **dict.fromkeys(("Gemm", "Conv", "ConvTranspose"), (2,)),
}
"""Inputs that layers do not share: scales and biases."""


def shared_tensors(
    graph: ir.Graph, trained: Sequence[str], aliases: Mapping[str, Sequence[str]]
) -> list[str]:
    """Return a line for each trained scale or bias of several layers.

    Exporters merge equal tensors, such as the ones and zeros of fresh norms. torch's tied
    parameters are known by their aliases.
    """
    lines = []
    for name in trained:
        x = graph.initializers.get(name)
        if x is None or len(x.shape or ()) != 1 or name in aliases:
            continue
        layers = [node for node, i in x.uses() if i in _OWN_TENSORS.get(node.op_type, ())]
        if len(layers) > 1:
            lines.append(
                f"{name!r} belongs to {len(layers)} layers and trains as one tensor: exporters "
                f"merge equal values ({_first_names([n.name or '' for n in layers], 3)})"
            )
    return lines


_TREES_HINT = (
    "hint: decision trees have no weights that gradient steps can train; fit them again in the "
    "library that made them, or train a network instead, such as scikit-learn's MLPClassifier"
)


def _nothing_to_train(base: Prepared, train: Names, freeze: Names, loss: object) -> str:
    """Return the error message: why each tensor and operator does not train, and a hint."""
    lines = ["no parameter is left to train"]
    if train is not None or freeze is not None:
        lines.append("hint: `onnxtrain explain` lists the parameters that train= and freeze= match")
        return "\n".join(lines)
    reasons = untrained_reasons(base)
    lines += [f"  {line}" for line in reasons[:_MAX_REASONS]]
    cut_off = [n for n, role in base.roles.items() if role.trains]
    if cut_off:
        lines.append(f"  no differentiable path from {_first_names(cut_off, _MAX_REASONS)}")
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
        names = _first_names(integers, _MAX_REASONS)
        lines.append(f"  stored as integers: {len(integers)}: {names}")
    if len(lines) == 1:
        lines.append("  the model has no float tensor with a gradient")
    if integers and not _supports_adapters(base.graph, integers):
        lines.append(_INTEGER_ARITHMETIC_HINT)
    else:
        last = _last_differentiable_values(base.graph, cut_off)
        if not (integers or reasons or cut_off) and any("::TreeEnsemble" in key for key in counts):
            return "\n".join([*lines, _TREES_HINT])
        named = loss if isinstance(loss, str) and loss != "nll" else "cross_entropy"
        lines.append(_hint(bool(integers), _reached(base), bool(cut_off), last, named))
    return "\n".join(lines)


def _integer_weights(graph: ir.Graph) -> list[str]:
    """Return the weights of a quantized model: integer tensors that are not vectors."""
    return [
        name
        for name, x in graph.initializers.items()
        if x.dtype in _QUANTIZED_DTYPES and len(x.shape or ()) > 1 and x.uses()
    ]


def _supports_adapters(graph: ir.Graph, integers: Sequence[str]) -> bool:
    """Return whether some weight is dequantized, so that an adapter can run in parallel."""
    readers = [use.node.op_type for n in integers for use in graph.initializers[n].uses()]
    return not all(r.startswith(_INTEGER_OPERATORS) for r in readers)


def _last_differentiable_values(graph: ir.Graph, weights: Sequence[str]) -> list[str]:
    """Return the values at which gradients to the weights stop, such as the input of an ArgMax."""
    reached = {graph.initializers[n] for n in weights if n in graph.initializers}
    last: dict[str, None] = {}
    for node in graph:
        flowing = flowing_inputs(node)
        if any(x in reached for x in flowing):
            reached.update(y for y in node.outputs if S.is_float(y))
        last.update(
            {
                x.name or "": None
                for x in node.inputs
                if x is not None and x in reached and x not in flowing
            }
        )
    return [n for n in last if n not in graph.initializers]


def _reached(base: Prepared) -> list[str]:
    """Return the float tensors of the file that do not train by default but can if named."""
    useful = reaching(base.graph)
    statistics = batch_statistics(base.graph)
    return [
        name
        for name, x in base.graph.initializers.items()
        if x in useful and x not in statistics and not S.is_generated_constant(x)
    ]


def _hint(
    integers: bool, tensors: Sequence[str], cut_off: bool, last: Sequence[str], loss: str
) -> str:
    """Return the hint for a model with these kinds of tensors."""
    if last:
        return (
            "hint: no gradient flows from the outputs; let the loss read a value inside the model: "
            + term_of_output(loss, last[-1])
        )
    if integers:
        return (
            "hint: gradient steps cannot train integers; onnxtrain.lora(...) adds float adapters, "
            "and straight_through=True trains through quantized activations"
        )
    if tensors:
        return f"hint: name the tensors to train: train={list(tensors[:2])!r}"
    if cut_off:
        return "hint: train the model inside these operators before it is wrapped"
    return "hint: attributes do not train; export the model with its weights as initializers"


def load_weights(
    model: Source,
    weights: Mapping[str, Any] | str | os.PathLike[str],
    *,
    strict: bool = True,
) -> onnx.ModelProto:
    """Return the model with weights of a state_dict or a safetensors file.

    ``Trainer.load_weights`` sets trained parameters only; this sets all initializers, so that
    frozen weights can be loaded before a build.

    Args:
        model: a path, bytes, ``ModelProto`` or ``ir.Model``; it is not changed.
        weights: names to arrays or torch tensors, or a path.
        strict: refuse unknown names, and float initializers without a weight.

    Raises:
        CheckpointError: if names or shapes do not fit.
    """
    if isinstance(weights, str | os.PathLike):
        weights = load_checkpoint(weights)[0]
    work = load(model)
    known = work.graph.initializers
    unknown = [n for n in weights if n not in known and not n.startswith("optim/")]
    missing = [n for n, x in known.items() if n not in weights and S.is_float(x)]
    if strict and (unknown or missing):
        raise CheckpointError(
            f"weights do not fit: missing {_first_names(missing, 5) or 'nothing'}, "
            f"unknown {_first_names(unknown, 5) or 'nothing'}\n"
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


def aliases_of(model: ir.Model) -> dict[str, tuple[str, ...]]:
    """Return the other names of tied weights, as the exporter recorded them.

    Raises:
        PrepareError: if the metadata is damaged.
    """
    text = model.metadata_props.get(ALIASES, "{}")
    try:
        aliases = {name: tuple(others) for name, others in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise PrepareError(f"the metadata {ALIASES!r} of the model is damaged: {error}") from error
    if not all(isinstance(other, str) for others in aliases.values() for other in others):
        raise PrepareError(f"the metadata {ALIASES!r} of the model is damaged: names are strings")
    return aliases


def _first_names(names: Sequence[str], limit: int) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
