"""Sequences handled element by element."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder.op_builder import OpBuilder
from onnxtrain.graph.shapes import dims as D


def map_sequences(
    op: OpBuilder, function: Callable[..., ir.Value], *sequences: ir.Value
) -> ir.Value:
    """Return the sequence of ``function(body, element, ...)``; ``body`` is the builder to use.

    Elements at the same position of several sequences must have the same shape.
    """
    element = element_of(op, sequences[0])
    body = op.body([element] * len(sequences))
    result = function(body, *body.graph.inputs)
    body.graph.outputs.append(body.Identity(result) if result.producer() is None else result)
    return op.SequenceMap(*sequences, body=body.graph)


def element_of(op: OpBuilder, sequence: ir.Value) -> ir.Value:
    """Return a value that has the type of one element, with names for the sizes that vary."""
    assert isinstance(sequence.type, ir.SequenceType)
    name = op.names.fresh(f"{op.prefix}element")
    element = ir.Value(name=name, type=sequence.type.elem_type)
    dims = S.dims_of(sequence)
    if dims is not None:
        named = [D.symbol(f"{name}.{i}") if d is None else d for i, d in enumerate(dims)]
        S.set_dims(element, named)
    return element
