"""A language model as training sees it: whole sequences, no cache of earlier keys and values."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.load_normalized import own_domains
from onnxtrain.errors import PrepareError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.builder.replace_value import replace_value
from onnxtrain.graph.io import Source, load
from onnxtrain.graph.io.shared_weights import copy_with_weights
from onnxtrain.text.names import IDS, MASK, POSITIONS, SWITCHES, is_past, is_present

_TAKES_PAST: Mapping[str, tuple[int, ...]] = {
    "com.microsoft::GroupQueryAttention": (3, 4),
    "com.microsoft::SparseAttention": (3, 4),
    "com.microsoft::MultiHeadAttention": (6, 7),
    "com.microsoft::DecoderMaskedMultiHeadAttention": (5, 6),
    "com.microsoft::Attention": (4,),
    "::Attention": (4, 5),
}
"""Operators that may be given keys and values of earlier tokens, and where."""


def without_cache(model: Source) -> ir.Model:
    """Return a copy of a language model that computes whole sequences, ready for ``build``.

    Inputs for a cache (``past_key_values.0.key``) are gone and taken as empty, and so are its
    outputs (``present.0.key``); settings such as ``use_cache_branch`` have the value that computes
    all positions. The mask has the length of the sequence. A model without any of these comes back
    as it was.

    Raises:
        PrepareError: a cache is used in a way that has no empty form.
    """
    work = copy_with_weights(load(model, allow_domains=own_domains()))
    graph = work.graph
    known = {x.name or "": x for x in graph.inputs}
    past = [x for name, x in known.items() if is_past(name)]
    settings = {name: x for name, x in known.items() if name in SWITCHES}
    if IDS not in known or not (past or settings or any(is_present(y.name) for y in graph.outputs)):
        return work
    graph.outputs[:] = [y for y in graph.outputs if not is_present(y.name)]
    first = next(iter(graph))
    op = OpBuilder(graph, "whole/", before=first)
    for name, x in settings.items():
        value = np.full([1] * len(S.dims_of(x) or ()), SWITCHES[name])
        x.replace_all_uses_with(op.const(value, x.dtype))
        graph.inputs.remove(x)
    for x in past:
        _remove(op, x, known[IDS])
        graph.inputs.remove(x)
    _rename_sizes(graph, known)
    return work


def _remove(op: OpBuilder, past: ir.Value, ids: ir.Value) -> None:
    """Take a cache away from all that reads it."""
    for use in list(past.uses()):
        node, place = use.node, use.idx
        if place in _TAKES_PAST.get(f"{node.domain}::{node.op_type}", ()):
            node.replace_input_with(place, None)
            node.attributes.pop("sliding_window_cache", None)
            _drop_present(node)
        elif node.op_type == "Concat" and not node.domain:
            rest = [x for x in node.inputs if x is not past]
            if len(rest) == 1 and rest[0] is not None:
                joined = node.outputs[0]
                rest[0].type = rest[0].type or past.type
                replace_value(joined, rest[0], [(u.node, u.idx) for u in joined.uses()])
                assert node.graph is not None
                node.graph.remove(node, safe=True)
                continue
            node.replace_input_with(place, _empty(op, past, ids))
        else:
            asked = node.op_type == "Shape" and not node.domain
            node.replace_input_with(place, _empty(op, past, ids, shape_only=asked))


def _drop_present(node: ir.Node) -> None:
    """Leave out outputs of an attention that nobody reads: without a past there may be none."""
    for y in node.outputs[1:3]:
        if not y.uses() and not y.is_graph_output():
            y.name = ""
    if not any(y.name for y in node.outputs[1:]):
        node.resize_outputs(1)


def _empty(op: OpBuilder, past: ir.Value, ids: ir.Value, *, shape_only: bool = False) -> ir.Value:
    """Return a cache of no tokens; where only its shape is read, that is the number of tokens."""
    dims = S.dims_of(past) or ()
    open_sizes = [i for i, d in enumerate(dims) if not isinstance(d, int) and i not in (0, 2)]
    if len(dims) < 3 or (open_sizes and not shape_only):
        raise PrepareError(
            f"the cache {S.describe_value(past)} has no size that could be read from the file\n"
            "hint: export the model without a cache (use_cache=False)"
        )
    sizes = [d if isinstance(d, int) else int(i in open_sizes) for i, d in enumerate(dims)]
    batch = op.size(ids, 0) if not isinstance(dims[0], int) else dims[0]
    return op.full([batch, *sizes[1:]], 0.0, past.dtype or ir.DataType.FLOAT)


def _rename_sizes(graph: ir.Graph, known: Mapping[str, ir.Value]) -> None:
    """Give mask and positions the length of the ids, and that name wherever it was another."""
    length = (S.dims_of(known[IDS]) or (None, None))[-1]
    other: set[str] = set()
    for name in (MASK, POSITIONS):
        size = (S.dims_of(known[name]) or (None,))[-1] if name in known else None
        if isinstance(size, str) and isinstance(length, str) and size != length:
            other.add(size)
    if not other:
        return
    values = [*graph.inputs, *(y for node in graph.all_nodes() for y in node.outputs)]
    for value in values:
        dims = S.dims_of(value) if value.shape is not None else None
        if dims is not None and other.intersection(d for d in dims if isinstance(d, str)):
            S.set_dims(value, [length if d in other else d for d in dims])
