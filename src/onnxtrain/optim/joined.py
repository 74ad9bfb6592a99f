"""Updates of many parameters as one, inside a step whose parameters and state stay apart outside.

Where each operator is a kernel that has to be started, one update of a vector and a few operators
that join and part it are quicker than an update of each parameter.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping

import numpy as np
import onnx_ir as ir

from onnxtrain import thresholds as T
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.optim.adam_rows import SLOTS, adam_rows, is_plain_adam
from onnxtrain.optim.base import Optimizer
from onnxtrain.optim.packing import Pack, alike

Values = dict[str, ir.Value]

_RESULTS = 7  # of one Split: WebGPU grants every kernel eight buffers


def apply_joined(
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
        new.update(_parted(op, new.pop(pack.name), pack))
        for slot in slots[pack.name]:
            new_state.update(_parted(op, new_state.pop(slot.name), slot))
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
        rows = adam_rows(optimizer, pack, op, parameters, gradients, state, lr, step, biases)
        new.update(_parted(op, rows.parameter, pack))
        moments = _moments(pack, SLOTS)
        new_state.update(_parted(op, rows.moments, moments, rest=2 * sum(pack.sizes)))
    return {n: new[n] for n in parameters}, new_state


def _moments(pack: Pack, slots: tuple[str, ...]) -> Pack:
    """Return the pack of all state of a pack's members, slot after slot."""
    members = tuple(f"{n}.{slot}" for slot in slots for n in pack.members)
    return dataclasses.replace(pack, members=members, shapes=pack.shapes * len(slots))


def _parted(op: OpBuilder, vector: ir.Value, pack: Pack, rest: int = 0) -> Values:
    """Emit the members of a vector, a few at a time: a kernel has room for so many results.

    Args:
        op: where the nodes go.
        vector: members one after the other.
        pack: names and shapes of the members.
        rest: how many elements follow that nobody wants.
    """
    each, most = 1, _RESULTS - bool(rest)
    while each * most < len(pack.members):
        each *= _RESULTS
    pieces = [
        Pack("", pack.members[i : i + each], pack.shapes[i : i + each], pack.dtype)
        for i in range(0, len(pack.members), each)
    ]
    sizes = [*(sum(p.sizes) for p in pieces), *([rest] if rest else [])]
    vectors = op.Split(vector, op.const(sizes), axis=0, _outputs=len(sizes))
    found: Values = {}
    for piece, part in zip(pieces, vectors, strict=False):
        alone = len(piece.members) == 1
        found.update(piece.split(op, part) if alone else _parted(op, part, piece))
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
    for group in alike(
        optimizer, dtypes
    ):  # named as its first member, whose settings are all theirs
        for names in _in_pieces(group, {n: _size(op, parameters[n]) for n in group}):
            shapes = tuple(_dims(op, parameters[n]) for n in names)
            if len(names) > 1:
                yield Pack(names[0], tuple(names), shapes, np.dtype("float32"))


def _in_pieces(names: tuple[str, ...], sizes: Mapping[str, int]) -> Iterator[list[str]]:
    piece: list[str] = []
    total = 0
    for name in names:
        if piece and total + sizes[name] > T.JOINED_ELEMENTS:
            yield piece
            piece, total = [], 0
        piece.append(name)
        total += sizes[name]
    yield piece


def _small(optimizer: Optimizer, op: OpBuilder, name: str, x: ir.Value) -> bool:
    """Return whether a parameter is worth joining; its state must have its shape."""
    dims = op.static(x)
    if dims is None or math.prod(dims) > T.JOINED_PARAMETER_ELEMENTS:
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


__all__ = ["apply_joined"]
