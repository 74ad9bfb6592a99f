"""Updates of many parameters as one, inside a step whose parameters and state stay apart outside.

Where each operator is a kernel that has to be started, one update of a vector and a few operators
that join and part it are quicker than an update of each parameter.

Several tensors as one vector: an optimizer that works element by element needs one update then.

A node of a graph costs some microseconds whatever its size, and the nodes of the update are many in
a small model. Which parameters are worth joining is for the caller to say.

>>> pack = Pack("all", ("w", "b"), ((2, 2), (2,)), np.dtype("float32"))
>>> vector = pack.join_arrays({"w": np.eye(2), "b": np.array([3.0, 4.0])})
>>> vector.tolist()
[1.0, 0.0, 0.0, 1.0, 3.0, 4.0]
>>> pack.split_array(vector)["b"].tolist()
[3.0, 4.0]

Adam for many parameters at once, in few operators: averages, decay and copies are one product.

The rows ``m, v, p, g, g * g`` of a matrix, multiplied with a matrix of constants, give the new
``m`` and ``v``, and ``p`` with its decay. Divided by the corrections of their biases (1 for the
last two) they are what the update is made of.
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


@dataclasses.dataclass(frozen=True)
class Pack:
    """Tensors that lie one after the other in a vector; a single one may stay as it is.

    Args:
        name: of the vector.
        members: names of the tensors. One tensor under its own name is not reshaped.
        shapes: of the members.
        dtype: of all of them.
    """

    name: str
    members: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: np.dtype[Any]

    @property
    def joined(self) -> bool:
        """Whether there is a vector, not a tensor as it is."""
        return self.members != (self.name,)

    @property
    def sizes(self) -> list[int]:
        """Elements of each member."""
        return [math.prod(s) for s in self.shapes]

    def join(self, op: OpBuilder, values: Mapping[str, ir.Value]) -> ir.Value:
        """Emit the vector of the members among some values."""
        if not self.joined:
            return values[self.name]
        parts = [op.Reshape(values[n], op.const([-1])) for n in self.members]
        return parts[0] if len(parts) == 1 else op.Concat(*parts, axis=0)

    def split(self, op: OpBuilder, vector: ir.Value) -> dict[str, ir.Value]:
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
        """Return the vector of the members among some arrays, a copy."""
        if not self.joined:
            return np.array(arrays[self.name], self.dtype)
        return np.concatenate([np.ravel(arrays[n]) for n in self.members]).astype(self.dtype)

    def split_array(self, vector: np.ndarray) -> dict[str, np.ndarray]:
        """Return the members of a vector, as views."""
        if not self.joined:
            return {self.name: vector}
        ends = np.cumsum(self.sizes)[:-1]
        return {
            name: part.reshape(shape)
            for name, shape, part in zip(
                self.members, self.shapes, np.split(vector, ends), strict=True
            )
        }


def groups_with_equal_settings(
    optimizer: Optimizer, dtypes: Mapping[str, Any]
) -> list[tuple[str, ...]]:
    """Return groups of parameters of which every element is updated by the same formula.

    Args:
        optimizer: makes the updates; without ``elementwise`` there are no groups.
        dtypes: the element type of each parameter that may be in a group.
    """
    if not optimizer.elementwise:
        return []
    groups: dict[tuple[Any, ...], list[str]] = collections.defaultdict(list)
    for name, dtype in dtypes.items():
        settings = optimizer.group_of(name)
        groups[dtype, settings.weight_decay, settings.lr_factor].append(name)
    return [tuple(names) for names in groups.values()]


SLOTS = ("exp_avg", "exp_avg_sq")

_FAR = 50.0  # the hyperbolic tangent of this is 1


@dataclasses.dataclass(frozen=True)
class AdamRows:
    """What a step gives: the vector of parameters, and that of the moments, ``m`` before ``v``."""

    parameter: ir.Value
    moments: ir.Value


def is_plain_adam(optimizer: Optimizer) -> bool:
    """Return whether the update is that of torch's AdamW, or of Adam without decay."""
    if type(optimizer) is AdamW:
        plain = optimizer.correct_bias and optimizer.form == "torch"
    elif type(optimizer) is Adam:
        plain = not optimizer.weight_decay and not any(g.weight_decay for g in optimizer.groups)
    else:
        return False
    return plain and not optimizer.amsgrad and not optimizer.proximal and all(optimizer.betas)


def adam_as_matmul(
    optimizer: Optimizer,
    pack: Pack,
    op: OpBuilder,
    parameters: Mapping[str, ir.Value],
    gradients: Mapping[str, ir.Value],
    state: Mapping[str, ir.Value],
    lr: ir.Value,
    step: ir.Value,
    biases: dict[tuple[float, float], ir.Value],
) -> AdamRows:
    """Emit the update of a pack.

    Args:
        optimizer: one that :func:`is_plain_adam` takes.
        pack: the parameters that are joined.
        op: where the nodes go.
        parameters: by name.
        gradients: by the name of the parameter.
        state: by ``<parameter>.<slot>``.
        lr: float32[1].
        step: the number of this step, from 1.
        biases: corrections that were emitted already; filled.
    """
    assert isinstance(optimizer, Adam | AdamW)
    group, size = optimizer.group_of(pack.name), sum(pack.sizes)
    g = pack.join(op, gradients)
    moments = [state[f"{n}.{slot}"] for slot in SLOTS for n in pack.members]
    parts = [*moments, *(parameters[n] for n in pack.members), g, op.Mul(g, g)]
    flat = op.Concat(*(op.Reshape(x, [-1]) for x in parts), axis=0)
    mixing = op.const(_mixing(optimizer.betas, group.weight_decay or 0.0), ir.DataType.FLOAT)
    mixed = op.MatMul(mixing, op.Reshape(flat, [5, size]))
    if optimizer.betas not in biases:
        biases[optimizer.betas] = _corrections(op, optimizer.betas, step)
    even = op.Reshape(op.Div(mixed, biases[optimizer.betas]), [-1])
    m, v, decay, p = op.Split(even, op.const([size] * 4), axis=0, _outputs=4)
    change = op.Div(m, op.Add(op.Sqrt(v), optimizer.eps))
    if group.weight_decay:
        change = op.Add(change, decay)
    rate = lr if group.lr_factor == 1.0 else op.Mul(lr, group.lr_factor)
    new = op.Sub(p, op.Mul(change, rate))
    return AdamRows(new, op.Reshape(mixed, [-1]))


def _mixing(betas: tuple[float, float], decay: float) -> np.ndarray:
    """Return the matrix that makes new rows: ``m, v, decay * p, p``."""
    b1, b2 = betas
    return np.array(
        [
            [b1, 0, 0, 1 - b1, 0],
            [0, b2, 0, 0, 1 - b2],
            [0, 0, decay, 0, 0],
            [0, 0, 1, 0, 0],
        ]
    )


def _corrections(op: OpBuilder, betas: tuple[float, float], step: ir.Value) -> ir.Value:
    """Return ``1 - beta**step`` of both averages, without cancellation, and 1 twice: ``[4, 1]``.

    With ``t = tanh(-step * ln(beta) / 2)`` it is ``t / (t / 2 + 1 / 2)``.
    """
    halves = np.array([[-math.log(betas[0]) / 2], [-math.log(betas[1]) / 2], [_FAR], [_FAR]])
    t = op.Tanh(op.Mul(op.Cast(step, to=ir.DataType.FLOAT), op.const(halves, ir.DataType.FLOAT)))
    return op.Div(t, op.HardSigmoid(t, alpha=0.5, beta=0.5))


Values = dict[str, ir.Value]

_MAX_SPLIT_OUTPUTS = 7  # of one Split: WebGPU grants every kernel eight buffers


def apply_flattened(
    optimizer: Optimizer,
    op: OpBuilder,
    parameters: Mapping[str, ir.Value],
    gradients: Mapping[str, ir.Value],
    state: Mapping[str, ir.Value],
    lr: ir.Value,
    step: ir.Value,
) -> tuple[Values, Values]:
    """Emit one step as :meth:`Optimizer.apply` does, with small parameters joined to vectors."""
    packs = list(_packs(optimizer, op, parameters))
    if packs and is_plain_adam(optimizer):
        return _apply_adam(optimizer, op, packs, parameters, gradients, state, lr, step)
    slots = {p.name: _slot_packs(optimizer, op, parameters, p) for p in packs}
    gone = {n for p in packs for n in p.members}
    few = {n: x for n, x in parameters.items() if n not in gone}
    mine = {n: gradients[n] for n in few}
    kept = dict(state)
    for pack in packs:
        few[pack.name] = pack.join(op, parameters)
        mine[pack.name] = pack.join(op, gradients)
        kept.update({p.name: p.join(op, state) for p in slots[pack.name]})
    new, new_state = optimizer.apply(op, few, mine, kept, lr, step)
    for pack in packs:
        new.update(_split_members(op, new.pop(pack.name), pack))
        for slot in slots[pack.name]:
            new_state.update(_split_members(op, new_state.pop(slot.name), slot))
    return {n: new[n] for n in parameters}, new_state


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
    """Emit a step of Adam whose joined parameters take part in one product."""
    gone = {n for p in packs for n in p.members}
    few = {n: x for n, x in parameters.items() if n not in gone}
    new, new_state = optimizer.apply(op, few, gradients, state, lr, step) if few else ({}, {})
    biases: dict[tuple[float, float], ir.Value] = {}
    for pack in packs:
        rows = adam_as_matmul(optimizer, pack, op, parameters, gradients, state, lr, step, biases)
        new.update(_split_members(op, rows.parameter, pack))
        moments = _moments(pack, SLOTS)
        new_state.update(_split_members(op, rows.moments, moments, rest=2 * sum(pack.sizes)))
    return {n: new[n] for n in parameters}, new_state


def _moments(pack: Pack, slots: tuple[str, ...]) -> Pack:
    """Return the pack of all state of a pack's members, slot after slot."""
    members = tuple(f"{n}.{slot}" for slot in slots for n in pack.members)
    return dataclasses.replace(pack, members=members, shapes=pack.shapes * len(slots))


def _split_members(op: OpBuilder, vector: ir.Value, pack: Pack, rest: int = 0) -> Values:
    """Emit the members of a vector, a few at a time: a kernel has room for so many results.

    Args:
        op: where the nodes go.
        vector: members one after the other.
        pack: names and shapes of the members.
        rest: how many elements follow that nobody wants.
    """
    each, most = 1, _MAX_SPLIT_OUTPUTS - bool(rest)
    while each * most < len(pack.members):
        each *= _MAX_SPLIT_OUTPUTS
    pieces = [
        Pack("", pack.members[i : i + each], pack.shapes[i : i + each], pack.dtype)
        for i in range(0, len(pack.members), each)
    ]
    sizes = [*(sum(p.sizes) for p in pieces), *([rest] if rest else [])]
    vectors = op.Split(vector, op.const(sizes), axis=0, _outputs=len(sizes))
    found: Values = {}
    for piece, part in zip(pieces, vectors, strict=False):
        alone = len(piece.members) == 1
        found.update(piece.split(op, part) if alone else _split_members(op, part, piece))
    return found


def _packs(
    optimizer: Optimizer, op: OpBuilder, parameters: Mapping[str, ir.Value]
) -> Iterator[Pack]:
    """Yield what to join: parameters that are updated alike, up to a size."""
    dtypes = {
        n: ir.DataType.FLOAT
        for n, x in parameters.items()
        if x.dtype == ir.DataType.FLOAT and _small(optimizer, op, n, x)
    }
    for group in groups_with_equal_settings(
        optimizer, dtypes
    ):  # named as its first member, whose settings are all theirs
        for names in _in_chunks(group, {n: _size(op, parameters[n]) for n in group}):
            shapes = tuple(_dims(op, parameters[n]) for n in names)
            if len(names) > 1:
                yield Pack(names[0], tuple(names), shapes, np.dtype("float32"))


def _in_chunks(names: tuple[str, ...], sizes: Mapping[str, int]) -> Iterator[list[str]]:
    piece: list[str] = []
    total = 0
    for name in names:
        if piece and total + sizes[name] > T.FLATTENED_VECTOR_ELEMENTS:
            yield piece
            piece, total = [], 0
        piece.append(name)
        total += sizes[name]
    yield piece


def _small(optimizer: Optimizer, op: OpBuilder, name: str, x: ir.Value) -> bool:
    """Return whether a parameter is worth joining; its state must have its shape."""
    dims = op.static(x)
    if dims is None or math.prod(dims) > T.FLATTENED_PARAMETER_ELEMENTS:
        return False
    return all(s.dims == tuple(dims) for s in optimizer.slots(name, tuple(dims), ir.DataType.FLOAT))


def _slot_packs(
    optimizer: Optimizer, op: OpBuilder, parameters: Mapping[str, ir.Value], pack: Pack
) -> list[Pack]:
    """Return the packs of a pack's state."""
    first = pack.members[0]
    slots = optimizer.slots(first, _dims(op, parameters[first]), ir.DataType.FLOAT)
    return [
        Pack(
            f"{pack.name}.{s.name}",
            tuple(f"{n}.{s.name}" for n in pack.members),
            pack.shapes,
            pack.dtype,
        )
        for s in slots
    ]


def _dims(op: OpBuilder, x: ir.Value) -> tuple[int, ...]:
    return tuple(op.static(x) or ())


def _size(op: OpBuilder, x: ir.Value) -> int:
    return math.prod(_dims(op, x))
