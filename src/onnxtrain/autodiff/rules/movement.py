"""Rearranging elements: shapes, axes, joining and repeating."""

from __future__ import annotations

from onnxtrain.autodiff.registry import vjp, vjp_multi


@vjp("Reshape")
def reshape(op, dy, x, shape):
    """Back to the old shape."""
    return op.reshape_like(dy, x)


@vjp("Flatten")
def flatten(op, dy, x):
    """Back to the old shape."""
    return op.reshape_like(dy, x)


@vjp("Squeeze", "Unsqueeze")
def squeeze(op, dy, x, axes=None):
    """Back to the old shape."""
    return op.reshape_like(dy, x)


@vjp("Transpose")
def transpose(op, dy, x, *, perm):
    """The inverse permutation."""
    perm = perm if perm is not None else list(range(op.rank(x)))[::-1]
    if len(perm) < 2:
        return dy
    return op.Transpose(dy, perm=[perm.index(i) for i in range(len(perm))])


@vjp("Expand")
def expand(op, dy, x, shape):
    """Sum over what was repeated."""
    return op.sum_to(dy, x)


@vjp("Tile")
def tile(op, dy, x, repeats):
    """Sum over the copies: ``[r * d] -> [r, d]``, axis by axis."""
    rank = op.rank(x)
    if rank == 0:
        return op.reshape_like(dy, x)
    counts = op.constant(repeats)
    if counts is None:
        # r0, d0, r1, d1 ... at run time
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
    """Cut the gradient where the parts met."""
    if len(xs) == 1:
        return dy
    sizes = op.vector([op.size(x, axis) for x in xs])
    return op.Split(dy, sizes, axis=axis, _outputs=len(xs))


@vjp_multi("Split")
def split(op, dys, x, split=None, *, axis, node):
    """Join the parts; one that nobody used counts as zeros."""
    parts = [
        op.zeros_like(op.extra_output(node, i)) if dy is None else dy for i, dy in enumerate(dys)
    ]
    return parts[0] if len(parts) == 1 else op.Concat(*parts, axis=axis)


@vjp("Trilu")
def trilu(op, dy, x, k=None, *, upper):
    """The same triangle of the gradient."""
    return op.Trilu(dy, k, upper=upper)


@vjp("DepthToSpace")
def depth_to_space(op, dy, x, *, blocksize, mode):
    """SpaceToDepth; for ``CRD``, which that operator does not have, its permutation."""
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
    """Reversed again."""
    return op.ReverseSequence(dy, sequence_lens, batch_axis=batch_axis, time_axis=time_axis)


@vjp("CenterCropPad")
def center_crop_pad(op, dy, x, shape, *, axes):
    """Cropping undoes padding and the reverse: both have the offset ``(large - small) // 2``."""
    old = op.shape_of(x) if axes is None else op.vector([op.size(x, a) for a in axes])
    return op.CenterCropPad(dy, old, axes=axes)
