"""Join parameters into vectors, so that one update serves many of them.

A node costs some microseconds whatever the size of its tensors, and a small model has more nodes in
its update than in all its layers. An optimizer that works on each element separately
(:attr:`Optimizer.elementwise`) computes the same on a concatenation of tensors as on the tensors.

The file in order: :class:`Pack` concatenates and splits tensors, as graph nodes and as arrays;
:func:`groups_with_equal_settings` and :func:`pack_small_parameters` choose what to join;
:func:`apply_flattened` replaces :meth:`Optimizer.apply` for runtimes that launch one kernel per
operator; :func:`adam_as_matmul` is Adam on such a vector in the fewest operators. The callers in
``artifacts`` and ``sklearn`` decide which targets join which parameters.

>>> pack = Pack("all", ("w", "b"), ((2, 2), (2,)), np.dtype("float32"))
>>> vector = pack.join_arrays({"w": np.eye(2), "b": np.array([3.0, 4.0])})
>>> vector.tolist()
[1.0, 0.0, 0.0, 1.0, 3.0, 4.0]
>>> pack.split_array(vector)["b"].tolist()
[3.0, 4.0]
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain import thresholds as T
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.optim.optimizer import Optimizer
from onnxtrain.optim.optimizers import Adam, AdamW

Values = dict[str, ir.Value]
Shape = tuple[int, ...]
FLOAT32 = np.dtype("float32")


@dataclasses.dataclass(frozen=True)
class Pack:
    """Tensors stored one after another in a vector.

    Args:
        name: name of the vector.
        members: names of the tensors. A single member with the name of the pack is not reshaped.
        shapes: shapes of the members.
        dtype: element type of all members.
    """

    name: str
    members: tuple[str, ...]
    shapes: tuple[Shape, ...]
    dtype: np.dtype[Any]

    @property
    def joined(self) -> bool:
        """Whether the pack is a vector, and not one tensor in its own shape."""
        return self.members != (self.name,)

    @property
    def sizes(self) -> list[int]:
        """Number of elements of each member."""
        return [math.prod(s) for s in self.shapes]

    @property
    def size(self) -> int:
        """Number of elements of the vector."""
        return sum(self.sizes)

    def of_slot(self, slot: str) -> Pack:
        """Return the pack of one optimizer slot of the members, ``<parameter>.<slot>``."""
        members = tuple(f"{n}.{slot}" for n in self.members)
        return dataclasses.replace(self, name=f"{self.name}.{slot}", members=members)

    def join(self, op: OpBuilder, values: Mapping[str, ir.Value]) -> ir.Value:
        """Emit the concatenation of the members among ``values``."""
        if not self.joined:
            return values[self.name]
        parts = [op.Reshape(values[n], op.const([-1])) for n in self.members]
        return parts[0] if len(parts) == 1 else op.Concat(*parts, axis=0)

    def split(self, op: OpBuilder, vector: ir.Value) -> Values:
        """Emit the members of a vector."""
        if not self.joined:
            return {self.name: vector}
        parts: Sequence[ir.Value] = [vector]
        if len(self.members) > 1:
            parts = op.Split(vector, op.const(self.sizes), axis=0, _outputs=len(self.members))
        return {
            name: op.Reshape(part, op.const(list(shape), ir.DataType.INT64))
            for name, shape, part in zip(self.members, self.shapes, parts, strict=True)
        }

    def join_arrays(self, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the concatenation of the members among ``arrays``, as a copy."""
        if not self.joined:
            return np.array(arrays[self.name], self.dtype)
        return np.concatenate([np.ravel(arrays[n]) for n in self.members]).astype(self.dtype)

    def split_array(self, vector: np.ndarray) -> dict[str, np.ndarray]:
        """Return the members of a vector, as views."""
        if not self.joined:
            return {self.name: vector}
        parts = np.split(vector, np.cumsum(self.sizes)[:-1])
        return {
            name: part.reshape(shape)
            for name, shape, part in zip(self.members, self.shapes, parts, strict=True)
        }


def groups_with_equal_settings(
    optimizer: Optimizer, dtypes: Mapping[str, Any]
) -> list[tuple[str, ...]]:
    """Return groups of parameters whose elements are all updated by the same formula.

    Args:
        optimizer: the optimizer; without ``elementwise`` there are no groups.
        dtypes: element type of each parameter that may join a group.
    """
    if not optimizer.elementwise:
        return []
    groups: dict[tuple[Any, ...], list[str]] = collections.defaultdict(list)
    for name, dtype in dtypes.items():
        settings = optimizer.group_of(name)
        groups[dtype, settings.weight_decay, settings.lr_factor].append(name)
    return [tuple(names) for names in groups.values()]


def pack_small_parameters(
    optimizer: Optimizer,
    shapes: Mapping[str, Shape],
    *,
    max_elements: int,
    max_vector_elements: float = math.inf,
) -> list[Pack]:
    """Return packs of two or more float32 parameters that one update can serve.

    A pack has the name of its first member, whose settings all members share.

    Args:
        optimizer: updates the parameters.
        shapes: shapes of float32 parameters whose optimizer slots have the same shape.
        max_elements: size of the largest parameter to join; larger ones cost more to copy than
            nodes cost to run.
        max_vector_elements: size at which a pack is full and the next one begins.
    """
    small = {n: FLOAT32 for n, shape in shapes.items() if math.prod(shape) <= max_elements}
    return [
        Pack(names[0], names, tuple(shapes[n] for n in names), FLOAT32)
        for group in groups_with_equal_settings(optimizer, small)
        for names in _chunks(group, shapes, max_vector_elements)
        if len(names) > 1
    ]


def _chunks(
    names: Sequence[str], shapes: Mapping[str, Shape], max_elements: float
) -> Iterator[tuple[str, ...]]:
    """Yield consecutive names whose shapes have at most ``max_elements`` elements together."""
    chunk: list[str] = []
    total = 0
    for name in names:
        size = math.prod(shapes[name])
        if chunk and total + size > max_elements:
            yield tuple(chunk)
            chunk, total = [], 0
        chunk.append(name)
        total += size
    yield tuple(chunk)


def apply_flattened(
    optimizer: Optimizer,
    op: OpBuilder,
    parameters: Mapping[str, ir.Value],
    gradients: Mapping[str, ir.Value],
    state: Mapping[str, ir.Value],
    lr: ir.Value,
    step: ir.Value,
) -> tuple[Values, Values]:
    """Emit one step as :meth:`Optimizer.apply` does, with small parameters joined to vectors.

    Parameters and state stay separate tensors outside the graph:

        before:  p1, g1 -> update -> p1'        p2, g2 -> update -> p2'
        after:   Concat(p1, p2), Concat(g1, g2) -> update -> Split -> p1', p2'
    """
    packs = _packs_of_values(optimizer, op, parameters)
    if packs and is_plain_adam(optimizer):
        return _apply_adam(optimizer, op, packs, parameters, gradients, state, lr, step)
    packed = {n for p in packs for n in p.members}
    joined = {n: x for n, x in parameters.items() if n not in packed}
    joined_gradients = {n: gradients[n] for n in joined}
    joined_state = dict(state)
    slots: dict[str, list[Pack]] = {}
    for pack in packs:
        names = optimizer.slots(pack.members[0], pack.shapes[0], ir.DataType.FLOAT)
        slots[pack.name] = [pack.of_slot(s.name) for s in names]
        joined[pack.name] = pack.join(op, parameters)
        joined_gradients[pack.name] = pack.join(op, gradients)
        joined_state.update({p.name: p.join(op, state) for p in slots[pack.name]})
    new, new_state = optimizer.apply(op, joined, joined_gradients, joined_state, lr, step)
    for pack in packs:
        new.update(_split_in_stages(op, new.pop(pack.name), pack))
        for slot in slots[pack.name]:
            new_state.update(_split_in_stages(op, new_state.pop(slot.name), slot))
    return {n: new[n] for n in parameters}, new_state


def _packs_of_values(
    optimizer: Optimizer, op: OpBuilder, parameters: Mapping[str, ir.Value]
) -> list[Pack]:
    """Return packs of the float32 parameters of static shape that are worth joining."""
    shapes: dict[str, Shape] = {}
    for name, x in parameters.items():
        dims = op.static(x)
        if x.dtype != ir.DataType.FLOAT or dims is None:
            continue
        slots = optimizer.slots(name, tuple(dims), ir.DataType.FLOAT)
        if all(s.dims == tuple(dims) for s in slots):
            shapes[name] = tuple(dims)
    return pack_small_parameters(
        optimizer,
        shapes,
        max_elements=T.FLATTENED_PARAMETER_ELEMENTS,
        max_vector_elements=T.FLATTENED_VECTOR_ELEMENTS,
    )


_MAX_SPLIT_OUTPUTS = 7
"""Outputs of one Split: WebGPU grants a kernel eight storage buffers, and one is the input."""


def _split_in_stages(op: OpBuilder, vector: ir.Value, pack: Pack, unused: int = 0) -> Values:
    """Emit the members of a vector by a tree of Splits with few outputs each.

    Args:
        op: builder of the graph.
        vector: the members, one after another.
        pack: names and shapes of the members.
        unused: number of elements after the last member.
    """
    per_part, fanout = 1, _MAX_SPLIT_OUTPUTS - bool(unused)
    while per_part * fanout < len(pack.members):
        per_part *= _MAX_SPLIT_OUTPUTS
    parts = [
        Pack("", pack.members[i : i + per_part], pack.shapes[i : i + per_part], pack.dtype)
        for i in range(0, len(pack.members), per_part)
    ]
    sizes = [*(p.size for p in parts), *([unused] if unused else [])]
    vectors = op.Split(vector, op.const(sizes), axis=0, _outputs=len(sizes))
    members: Values = {}
    for part, values in zip(parts, vectors, strict=False):
        single = len(part.members) == 1
        members.update(part.split(op, values) if single else _split_in_stages(op, values, part))
    return members


ADAM_SLOTS = ("exp_avg", "exp_avg_sq")

_SATURATED = 50.0  # tanh of it is exactly 1 in float32


def is_plain_adam(optimizer: Optimizer) -> bool:
    """Return whether the update is that of torch's AdamW, or of Adam without weight decay."""
    if type(optimizer) is AdamW:
        plain = optimizer.correct_bias and optimizer.form == "torch"
    elif type(optimizer) is Adam:
        plain = not optimizer.weight_decay and not any(g.weight_decay for g in optimizer.groups)
    else:
        return False
    pulled = optimizer.proximal or optimizer.ewc
    return plain and not optimizer.amsgrad and not pulled and all(optimizer.betas)


def _apply_adam(
    optimizer: Optimizer,
    op: OpBuilder,
    packs: list[Pack],
    parameters: Mapping[str, ir.Value],
    gradients: Mapping[str, ir.Value],
    state: Mapping[str, ir.Value],
    lr: ir.Value,
    step: ir.Value,
) -> tuple[Values, Values]:
    """Emit a step of Adam in which each pack is updated by :func:`adam_as_matmul`."""
    packed = {n for p in packs for n in p.members}
    separate = {n: x for n, x in parameters.items() if n not in packed}
    new, new_state = (
        optimizer.apply(op, separate, gradients, state, lr, step) if separate else ({}, {})
    )
    corrections: dict[tuple[float, float], ir.Value] = {}
    for pack in packs:
        parameter, moments = adam_as_matmul(
            optimizer, pack, op, parameters, gradients, state, lr, step, corrections
        )
        new.update(_split_in_stages(op, parameter, pack))
        members = tuple(n for slot in ADAM_SLOTS for n in pack.of_slot(slot).members)
        slots = Pack(pack.name, members, pack.shapes * len(ADAM_SLOTS), pack.dtype)
        new_state.update(_split_in_stages(op, moments, slots, unused=2 * pack.size))
    return {n: new[n] for n in parameters}, new_state


def adam_as_matmul(
    optimizer: Optimizer,
    pack: Pack,
    op: OpBuilder,
    parameters: Mapping[str, ir.Value],
    gradients: Mapping[str, ir.Value],
    state: Mapping[str, ir.Value],
    lr: ir.Value,
    step: ir.Value,
    corrections: dict[tuple[float, float], ir.Value],
) -> tuple[ir.Value, ir.Value]:
    """Emit Adam's update of a pack; return the new parameters, and a vector that starts with m, v.

    One MatMul of a constant matrix with the rows ``m, v, p, g, g * g`` computes both averages, the
    decay and a copy of the parameters, which is fewer kernels than an operator for each:

        m' = b1 m + (1 - b1) g        v' = b2 v + (1 - b2) g g        d = decay p
        p' = p - lr (m' / (1 - b1^t) / (sqrt(v' / (1 - b2^t)) + eps) + d)

    Args:
        optimizer: one that :func:`is_plain_adam` accepts.
        pack: the parameters to join.
        op: builder of the graph.
        parameters: by name.
        gradients: by the name of the parameter.
        state: by ``<parameter>.<slot>``.
        lr: float32[1].
        step: the number of this step, from 1.
        corrections: bias corrections emitted so far, by betas; extended in place.
    """
    assert isinstance(optimizer, Adam | AdamW)
    group, size = optimizer.group_of(pack.name), pack.size
    g = pack.join(op, gradients)
    moments = [state[n] for slot in ADAM_SLOTS for n in pack.of_slot(slot).members]
    parts = [*moments, *(parameters[n] for n in pack.members), g, op.Mul(g, g)]
    flat = op.Concat(*(op.Reshape(x, [-1]) for x in parts), axis=0)
    mixing = op.const(_adam_matrix(optimizer.betas, group.weight_decay or 0.0), ir.DataType.FLOAT)
    rows = op.MatMul(mixing, op.Reshape(flat, [5, size]))
    if optimizer.betas not in corrections:
        corrections[optimizer.betas] = _bias_corrections(op, optimizer.betas, step)
    corrected = op.Reshape(op.Div(rows, corrections[optimizer.betas]), [-1])
    m, v, decay, p = op.Split(corrected, op.const([size] * 4), axis=0, _outputs=4)
    update = op.Div(m, op.Add(op.Sqrt(v), optimizer.eps))
    if group.weight_decay:
        update = op.Add(update, decay)
    rate = lr if group.lr_factor == 1.0 else op.Mul(lr, group.lr_factor)
    return op.Sub(p, op.Mul(update, rate)), op.Reshape(rows, [-1])


def _adam_matrix(betas: tuple[float, float], decay: float) -> np.ndarray:
    """Return the matrix from rows ``m, v, p, g, g * g`` to rows ``m', v', decay * p, p``."""
    b1, b2 = betas
    return np.array(
        [
            [b1, 0, 0, 1 - b1, 0],
            [0, b2, 0, 0, 1 - b2],
            [0, 0, decay, 0, 0],
            [0, 0, 1, 0, 0],
        ]
    )


def _bias_corrections(op: OpBuilder, betas: tuple[float, float], step: ir.Value) -> ir.Value:
    """Return ``[1 - b1**step, 1 - b2**step, 1, 1]`` of shape [4, 1], without cancellation.

    With ``t = tanh(-step * ln(beta) / 2)``, ``1 - beta**step = t / (t / 2 + 1 / 2)``.
    """
    halves = [[-math.log(beta) / 2] for beta in betas] + [[_SATURATED], [_SATURATED]]
    half_logs = op.const(np.array(halves), ir.DataType.FLOAT)
    t = op.Tanh(op.Mul(op.Cast(step, to=ir.DataType.FLOAT), half_logs))
    # HardSigmoid is t / 2 + 1 / 2 in one kernel: t is in (0, 1], so it never clips.
    return op.Div(t, op.HardSigmoid(t, alpha=0.5, beta=0.5))
