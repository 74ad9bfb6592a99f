"""Data movement: reshape, transpose, concatenate, repeat, pad, and casts between dtypes."""

from __future__ import annotations

from typing import Literal

import numpy as np

from onnxtrain.autodiff.rule_registry import undefined, vjp, vjp_multi
from onnxtrain.autodiff.rules.index import positions, scatter_flat, upcast_half


@vjp("Reshape")
def reshape(op, dy, x, shape):
    """Reshape ``dy`` to the shape of ``x``."""
    return op.reshape_like(dy, x)


@vjp("Flatten")
def flatten(op, dy, x):
    """Reshape ``dy`` to the shape of ``x``."""
    return op.reshape_like(dy, x)


@vjp("Squeeze", "Unsqueeze")
def squeeze(op, dy, x, axes=None):
    """Reshape ``dy`` to the shape of ``x``."""
    return op.reshape_like(dy, x)


@vjp("Transpose")
def transpose(op, dy, x, *, perm):
    """Transpose by the inverse permutation."""
    perm = perm if perm is not None else list(range(op.rank(x)))[::-1]
    if len(perm) < 2:
        return dy
    return op.Transpose(dy, perm=[perm.index(i) for i in range(len(perm))])


@vjp("Expand")
def expand(op, dy, x, shape):
    """Sum over the expanded axes."""
    return op.sum_to(dy, x)


@vjp("Tile")
def tile(op, dy, x, repeats):
    """Sum over the copies: ``[r * d] -> [r, d]`` for each axis."""
    rank = op.rank(x)
    if rank == 0:
        return op.reshape_like(dy, x)
    counts = op.constant(repeats)
    if counts is None:
        # r0, d0, r1, d1 ... computed in the graph
        pairs = op.Concat(op.Unsqueeze(repeats, [1]), op.Unsqueeze(op.shape_of(x), [1]), axis=1)
        split = op.Reshape(dy, op.Reshape(pairs, [2 * rank]), allowzero=1)
        return op.ReduceSum(split, list(range(0, 2 * rank, 2)), keepdims=0)
    sizes, copies = [], []
    for axis, r in enumerate(int(c) for c in counts):
        if r != 1:
            copies.append(len(sizes))
            sizes.append(r)
        sizes.append(op.size(x, axis))
    return op.ReduceSum(op.reshape(dy, sizes), copies, keepdims=0) if copies else dy


@vjp("Concat")
def concat(op, dy, *xs, axis):
    """Split the gradient at the boundaries of the inputs."""
    if len(xs) == 1:
        return dy
    sizes = op.vector([op.size(x, axis) for x in xs])
    return op.Split(dy, sizes, axis=axis, _outputs=len(xs))


@vjp_multi("Split")
def split(op, dys, x, split=None, *, axis, node):
    """Concatenate the gradients of the parts; unused parts get zeros."""
    parts = [
        op.zeros_like(op.extra_output(node, i)) if dy is None else dy for i, dy in enumerate(dys)
    ]
    return parts[0] if len(parts) == 1 else op.Concat(*parts, axis=axis)


@vjp("Trilu")
def trilu(op, dy, x, k=None, *, upper):
    """``dx = Trilu(dy)``."""
    return op.Trilu(dy, k, upper=upper)


@vjp("DepthToSpace")
def depth_to_space(op, dy, x, *, blocksize, mode):
    """SpaceToDepth; its permutation for ``CRD``, which SpaceToDepth does not support."""
    if mode == "DCR":
        return op.SpaceToDepth(dy, blocksize=blocksize)
    n, _, h, w = (op.size(x, i) for i in range(4))
    blocks = op.reshape(dy, [n, op.size(dy, 1), h, blocksize, w, blocksize])
    # [n, c, h, b, w, b] -> [n, c, b, b, h, w]
    return op.reshape_like(op.Transpose(blocks, perm=[0, 1, 3, 5, 2, 4]), x)


@vjp("SpaceToDepth")
def space_to_depth(op, dy, x, *, blocksize):
    """DepthToSpace."""
    return op.DepthToSpace(dy, blocksize=blocksize, mode="DCR")


@vjp("ReverseSequence")
def reverse_sequence(op, dy, x, sequence_lens, *, batch_axis, time_axis):
    """Reverse the gradient."""
    return op.ReverseSequence(dy, sequence_lens, batch_axis=batch_axis, time_axis=time_axis)


@vjp("CenterCropPad")
def center_crop_pad(op, dy, x, shape, *, axes):
    """CenterCropPad of ``dy``: crop and pad have the same offset ``(large - small) // 2``."""
    old = op.shape_of(x) if axes is None else op.vector([op.size(x, a) for a in axes])
    return op.CenterCropPad(dy, old, axes=axes)


_END = 2**63 - 1
Mode = Literal["reflect", "edge", "wrap"]


@vjp("Pad")
def pad(op, dy, x, pads, constant_value=None, axes=None, *, mode):
    """Remove the padding; the gradient of repeated elements is added to their source."""
    if op.rank(x) == 0:
        return dy
    if mode == "constant":
        dx = _crop(op, dy, x, pads, axes)
        if constant_value is None:
            return dx
        # 1 on the padding, 0 inside
        border = op.Pad(op.zeros_like(x), pads, 1.0, axes)
        total = op.ReduceSum(op.Mul(dy, border), keepdims=0)
        return dx, None, op.reshape_like(total, constant_value)
    amounts = _amounts(op, x, pads, axes)
    if amounts is None or not all(
        isinstance(op.dims(x)[a], int) and min(pair) >= 0 for a, pair in amounts.items()
    ):
        # pad a tensor of positions in the same way, and scatter-add the gradient by it
        source = op.Pad(positions(op, x), pads, None, axes, mode=mode)
        return scatter_flat(op, source, dy, x, unique=False)
    grad = upcast_half(op, dy)
    for axis, (before, after) in amounts.items():
        if before or after:
            grad = _fold_back(op, grad, axis, op.dims(x)[axis], before, after, mode)
    return op.cast(grad, dy.dtype)


def _crop(op, dy, x, pads, axes):
    """Undo constant padding: slice what was added, pad zeros where elements were removed."""
    amounts = _amounts(op, x, pads, axes)
    if amounts is None:
        return _crop_at_run_time(op, dy, pads, axes)
    added = {a: (max(b, 0), max(e, 0)) for a, (b, e) in amounts.items() if b > 0 or e > 0}
    removed = [0] * 2 * op.rank(x)
    for axis, (before, after) in amounts.items():
        size = op.dims(x)[axis]
        if isinstance(size, int) and (before + size < 0 or after + size < 0):
            return undefined(f"axis {axis} of size {size} is padded by {before} and {after}")
        removed[axis], removed[axis + op.rank(x)] = max(-before, 0), max(-after, 0)
    if added:
        starts = [before for before, _ in added.values()]
        ends = [-after if after else _END for _, after in added.values()]
        dy = op.Slice(dy, starts, ends, list(added))
    if any(removed):
        dy = op.Pad(dy, removed)
    elif added:
        dy.shape = x.shape
    return dy


def _crop_at_run_time(op, dy, pads, axes):
    """The same for dynamic pads; the graph does not check that they fit the input."""
    n = op.rank(dy) if axes is None else op.dims(axes)[0]
    sizes = op.shape_of(dy) if axes is None else op.Gather(op.shape_of(dy), axes)
    added = op.Max(pads, 0)
    before, after = op.Split(added, axis=0, num_outputs=2, _outputs=2)
    where = op.const(list(range(n))) if axes is None else axes
    inside = op.Slice(dy, before, op.Sub(sizes, after), where)
    return op.Pad(inside, op.Sub(added, pads), None, axes)


def _amounts(op, x, pads, axes) -> dict[int, tuple[int, int]] | None:
    """Return (before, after) by axis, ``None`` if the pads are dynamic."""
    amounts = op.constant(pads)
    where = op.axes(axes, op.rank(x))
    if amounts is None or where is None:
        return None
    n = len(where)
    return {a: (int(amounts[i]), int(amounts[i + n])) for i, a in enumerate(where)}


def _fold_back(op, dy, axis: int, size: int, before: int, after: int, mode: Mode):
    """Undo padding along one axis: the interior plus the border, added to its source."""
    source = np.pad(np.arange(size), (before, after), mode=mode)
    border = [*range(before), *range(before + size, before + size + after)]
    inside = op.Slice(dy, [before], [before + size], [axis])
    strip = op.Gather(dy, border, axis=axis)
    line = op.reshape(
        op.const(source[border].astype(np.int64)),
        [1] * axis + [-1] + [1] * (op.rank(dy) - 1 - axis),
    )
    where = op.expand_like(line, strip)
    return op.ScatterElements(inside, where, strip, axis=axis, reduction="add")


@vjp("Cast")
def cast(op, dy, x):
    """Cast ``dy`` to the dtype of ``x``.

    Only for casts between floats: no gradient flows through integers, booleans and 8-bit floats, as
    in torch.
    """
    return op.cast(dy, x.dtype)


@vjp("CastLike", constant_inputs={1: "it only sets the dtype"})
def cast_like(op, dy, x, target_type):
    """Cast ``dy`` to the dtype of ``x``."""
    return op.cast(dy, x.dtype)
