"""Sequences that ``prepare`` could not resolve, and optionals.

The gradient of a sequence is a sequence of as many elements; that of an optional is the gradient of
its element.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.autodiff.accumulate import carries_gradient
from onnxtrain.autodiff.differentiate import differentiate
from onnxtrain.autodiff.registry import vjp, vjp_multi
from onnxtrain.graph.builder.copy_nodes import copy_nodes
from onnxtrain.graph.captured_values import captured


@vjp("SequenceConstruct")
def sequence_construct(op, dy, *xs):
    """Take the gradient of each element."""
    return tuple(op.SequenceAt(dy, i) for i in range(len(xs)))


@vjp("SequenceAt")
def sequence_at(op, dy, input_sequence, position):
    """Zeros for every element but one."""
    at = _from_front(op, input_sequence, position)
    others = op.SequenceErase(op.zeros_like(input_sequence), at)
    return op.SequenceInsert(others, dy, at)


@vjp("SequenceInsert")
def sequence_insert(op, dy, input_sequence, tensor, position=None):
    """Take the gradient of the new element out again."""
    if position is None:
        return op.SequenceErase(dy), op.SequenceAt(dy, -1)
    at = _from_front(op, input_sequence, position)
    return op.SequenceErase(dy, at), op.SequenceAt(dy, at)


@vjp("SequenceErase")
def sequence_erase(op, dy, input_sequence, position=None):
    """Zeros for the element that was dropped."""
    dropped = op.SequenceAt(input_sequence, -1 if position is None else position)
    at = None if position is None else _from_front(op, input_sequence, position)
    return op.SequenceInsert(dy, op.zeros_like(dropped), at)


@vjp("SplitToSequence")
def split_to_sequence(op, dy, x, split=None, *, axis, keepdims):
    """Join the pieces."""
    stacked = split is None and not keepdims
    return op.ConcatFromSequence(dy, axis=axis, new_axis=1 if stacked else 0)


@vjp("ConcatFromSequence")
def concat_from_sequence(op, dy, input_sequence, *, axis, new_axis):
    """Cut the gradient where the elements met."""
    if new_axis:
        return op.SplitToSequence(dy, axis=axis, keepdims=0)
    end = None if axis == -1 else axis + 1
    sizes = op.map_sequences(lambda body, x: body.Shape(x, start=axis, end=end), input_sequence)
    return op.SplitToSequence(dy, op.ConcatFromSequence(sizes, axis=0), axis=axis)


@vjp_multi("SequenceMap")
def sequence_map(op, dys, input_sequence, *additional_inputs, node):
    """A map of the body's reverse sweep; for what every step reads, the sum over the steps."""
    inputs, outer = (input_sequence, *additional_inputs), captured(node)
    inner = node.attributes["body"].as_graph()
    given = [i for i, dy in enumerate(dys) if dy is not None]
    step = op.body([*inner.inputs, *(inner.outputs[i] for i in given)])
    own, cotangents = step.graph.inputs[: len(inputs)], step.graph.inputs[len(inputs) :]
    outputs = copy_nodes(step, inner, dict(zip(inner.inputs, own, strict=True)))
    wanted = [x for x in (*own, *outer) if carries_gradient(x)]
    grads = differentiate(
        step, dict(zip((outputs[i] for i in given), cotangents, strict=True)), wanted
    )
    sources = dict(zip((*own, *outer), (*inputs, *outer), strict=True))
    for x in wanted:
        grad = grads[x]
        made = step.Identity(step.zeros_like(x) if grad is None else grad)
        made.shape = x.shape
        step.graph.outputs.append(made)
    step_grads = op.SequenceMap(
        *inputs, *(dys[i] for i in given), body=step.graph, _outputs=len(wanted)
    )
    by_value = dict(zip(wanted, step_grads if len(wanted) > 1 else [step_grads], strict=True))
    return tuple(_summed(op, by_value.get(x), sources[x]) for x in (*own, *outer))


@vjp("Optional")
def optional(op, dy, x=None):
    """The gradient of the element."""
    return dy


@vjp("OptionalGetElement")
def optional_get_element(op, dy, x):
    """The gradient of the element."""
    return dy


def _summed(op, grads, x):
    """Return the gradient of an input of SequenceMap from those of its steps."""
    if grads is None or isinstance(x.type, ir.SequenceType):
        return grads
    # An empty sequence cannot be joined, so a zero goes in front.
    some = op.SequenceInsert(grads, op.zeros_like(x))
    total = op.ReduceSum(op.ConcatFromSequence(some, axis=0, new_axis=1), [0], keepdims=0)
    total.shape = x.shape
    return total


def _from_front(op, sequence, position):
    """Return a position of an existing element, or behind the last one, as a number from 0 on."""
    known = op.constant(position)
    if known is not None and int(known.reshape(-1)[0]) >= 0:
        return position
    at = op.cast(position, ir.DataType.INT64)
    return op.Where(op.Less(at, 0), op.Add(at, op.SequenceLength(sequence)), at)
