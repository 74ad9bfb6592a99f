"""Loops over sequences of tensors whose length is not known."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from onnxtrain.graph.builder import OpBuilder

Step = Callable[..., Sequence[ir.Value]]


def map_sequences(
    op: OpBuilder, sequences: Sequence[ir.Value], step: Step, *, results: int
) -> list[ir.Value]:
    """Return the sequences of ``step(body, *elements)`` over the elements at each place."""
    first = _element(sequences[0])
    length = op.SequenceLength(sequences[0])
    empty = [op.SequenceEmpty(dtype=int(first.dtype)) for _ in range(results)]
    body = op.body([op.const(0), op.const(True), *empty])
    at, go, *collected = body.graph.inputs
    elements = [_take(body, s, at) for s in sequences]
    new = step(body, *elements)
    grown = [body.SequenceInsert(s, x) for s, x in zip(collected, new, strict=True)]
    body.graph.outputs.extend([body.Identity(go), *grown])
    loop_outputs = op.Loop(length, op.const(True), *empty, body=body.graph, _outputs=results)
    values = list(loop_outputs) if isinstance(loop_outputs, tuple) else [loop_outputs]
    for value in values:
        value.type = ir.SequenceType(ir.TensorType(first.dtype))
    return values


def clip_sequence(op: OpBuilder, gradients: ir.Value, max_norm: float) -> ir.Value:
    """Scale all elements so that their joint norm is at most ``max_norm``."""
    zero = op.const(0.0, ir.DataType.FLOAT)
    body = op.body([op.const(0), op.const(True), zero])
    at, go, total = body.graph.inputs
    g = _take(body, gradients, at)
    square = body.cast(body.ReduceSum(body.Mul(g, g), keepdims=0), ir.DataType.FLOAT)
    body.graph.outputs.extend([body.Identity(go), body.Add(total, square)])
    squares = op.Loop(op.SequenceLength(gradients), op.const(True), zero, body=body.graph)
    factor = op.Div(max_norm, op.Add(op.Sqrt(squares), 1e-6))
    factor = op.Where(op.Less(factor, 1.0), factor, 1.0)
    (clipped,) = map_sequences(
        op, [gradients], lambda b, x: [b.Mul(x, b.cast(factor, x.dtype))], results=1
    )
    return clipped


def _element(sequence: ir.Value) -> ir.TensorType:
    kind = sequence.type
    assert isinstance(kind, ir.SequenceType)
    assert isinstance(kind.elem_type, ir.TensorType)
    return kind.elem_type


def _take(op: OpBuilder, sequence: ir.Value, at: ir.Value) -> ir.Value:
    value = op.SequenceAt(sequence, at)
    value.type = ir.TensorType(_element(sequence).dtype)
    return value
