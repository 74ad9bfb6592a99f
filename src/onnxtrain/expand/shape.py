"""Shape arithmetic, slicing and repetition, reordering of elements, Cast.

Runtimes without Cast gather from a table of the values in the wanted type.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxtrain.expand.expansions import LOWERING, TRAINING, expansion
from onnxtrain.expand.select import BOOL, INTEGER_TYPES, bool_as_int64
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import minus
from onnxtrain.graph.shapes import dims as D

_INT64 = ir.DataType.INT64


_LAST = np.iinfo(np.int64).max


@expansion("Identity", when=LOWERING)
def identity(op, x):
    """Reshape to the same shape."""
    if op.static(x) is not None:
        return op.Reshape(x, list(op.static(x)))
    return op.Reshape(x, [0] * op.rank(x)) if op.rank(x) else None


@expansion("com.microsoft::SampleOp", when=TRAINING)
def sample_op(op, x):
    """The identity."""
    return op.Identity(x)


@expansion("Shape", when=LOWERING)
def shape(op, x, *, start, end):
    """Slice the whole shape."""
    r = op.rank(x)
    first = min(max(start + r if start < 0 else start, 0), r)
    last = r if end is None else min(max(end + r if end < 0 else end, 0), r)
    if (first, last) == (0, r):
        return None
    return op.Slice(op.Shape(x), [first], [last], [0])


@expansion("Size", when=LOWERING)
def size(op, x):
    """The product of the shape."""
    return op.ReduceProd(op.Shape(x), keepdims=0)


@expansion("Expand", when=LOWERING)
def expand(op, x, shape, *, node):
    """Tile the axes of size 1."""
    y = node.outputs[0]
    have, want = op.dims(x), op.dims(y)
    lead = len(want) - len(have)
    repeats = []
    length = None
    for i, d in enumerate(want):
        old = 1 if i < lead else have[i - lead]
        if old == d and d is not None:
            repeats.append(1)
        elif old == 1 and isinstance(d, int):
            repeats.append(d)
        elif old == 1:
            length = op.dims(shape) if length is None else length
            if length != (len(want),):
                return None
            # Right for sizes 0 and 1 as well.
            repeats.append(op.Slice(shape, [i], [i + 1], [0]))
        else:
            return None
    if lead:
        x = op.Unsqueeze(x, list(range(lead)))
    return op.Tile(x, op.vector(repeats))


@expansion("Tile", when=LOWERING)
def tile(op, x, repeats):
    """Concatenate copies, axis by axis."""
    counts = op.constant(repeats)
    if counts is None or 0 in counts or counts.max(initial=1) > 64:
        return None
    y = x
    for axis, n in enumerate(int(c) for c in counts):
        if n > 1:
            y = op.Concat(*[y] * n, axis=axis)
    return op.Identity(x) if y is x else y


@expansion("ConstantOfShape", when=LOWERING)
def constant_of_shape(op, shape, *, value):
    """Tile one element."""
    rank = op.dims(shape)[0]
    if not isinstance(rank, int) or rank == 0:
        return None
    filler = value.numpy().reshape(()) if value is not None else np.float32(0)
    dtype = value.dtype if value is not None else ir.DataType.FLOAT
    return op.Tile(op.const(np.full([1] * rank, filler), dtype), shape)


@expansion("Range", when=LOWERING)
def constant_range(op, start, limit, delta):
    """A constant."""
    bounds = [op.constant(v) for v in (start, limit, delta)]
    if any(b is None for b in bounds):
        return None
    return op.const(np.arange(*(b.reshape(()) for b in bounds)), start.dtype)


@expansion("Range", when=LOWERING)
def range_(op, start, limit, delta):
    """``start`` plus the positions (NonZero) in a vector of ones, for step 1."""
    step = op.constant(delta)
    if start.dtype != _INT64 or step is None or int(step.reshape(())) != 1:
        return None
    first = op.constant(start)
    from_zero = first is not None and not int(first.reshape(()))
    count = limit if from_zero else op.Max(op.Sub(limit, start), op.const(0))
    ones = op.ConstantOfShape(op.Reshape(count, [1]), value=ir.tensor(np.ones(1, np.int64)))
    y = op.Squeeze(op.NonZero(ones), [0])
    return y if from_zero else op.Add(y, start)


@expansion("com.microsoft::Range", when=TRAINING)
def contrib_range(op, start, limit, delta=None):
    """The standard operator of the same name; ``delta`` defaults to 1."""
    scalars = [op.Reshape(v, op.const([])) for v in (start, limit)]
    step = op.const(1, start.dtype) if delta is None else op.Reshape(delta, op.const([]))
    return op.Range(*scalars, step)


@expansion("Split", when=LOWERING)
def split(op, x, sizes=None, *, axis, num_outputs, node):
    """One Slice per part."""
    axis %= op.rank(x)
    total = op.dims(x)[axis]
    given = S.symbolic_of(sizes) if sizes is not None else None
    count = len(node.outputs)
    if given is not None and all(isinstance(g, int) for g in given):
        parts = [int(g) for g in given if g is not None]
    elif sizes is None and isinstance(total, int):
        each = -(-total // (num_outputs or count))
        parts = [min(each, total - i * each) for i in range(count)]
    else:
        return None
    ends = np.cumsum(parts)
    return tuple(
        op.Slice(x, [int(e - p)], [int(e)], [axis]) for p, e in zip(parts, ends, strict=True)
    )


@expansion("Slice", when=LOWERING)
def slice_by_positions(op, x, starts, ends, axes=None, steps=None):
    """Gather constant positions."""
    first, last = op.constant(starts), op.constant(ends)
    if first is None or last is None:
        return None
    stride = np.ones_like(first) if steps is None else op.constant(steps)
    if stride is None:
        return None
    chosen = op.axes(axes, op.rank(x)) if axes is not None else list(range(first.size))
    if chosen is None:
        return None
    y = x
    for axis, a, b, s in zip(chosen, first, last, stride, strict=True):
        n = op.dims(x)[axis]
        if not isinstance(n, int):
            return None
        where = list(range(n))[_bounded(int(a)) : _bounded(int(b)) : int(s)]
        if int(s) < 0 and int(b) <= -n - 1:
            where = list(range(n))[_bounded(int(a)) :: int(s)]
        y = op.Gather(y, op.const(np.asarray(where, np.int64)), axis=axis)
    return y


def _bounded(i: int) -> int | None:
    return None if abs(i) >= 1 << 31 and i > 0 else i


@expansion("com.microsoft::DynamicSlice", when=TRAINING)
def dynamic_slice(op, x, starts, ends, axes=None):
    """The standard Slice, which takes the same inputs since opset 10."""
    return op.Slice(x, starts, ends, axes)


@expansion("Flatten", when=LOWERING)
def flatten(op, x, *, axis):
    """Reshape to two axes."""
    dims = op.dims(x)
    axis = axis + len(dims) if axis < 0 else axis
    left, right = D.product(dims[:axis]), D.product(dims[axis:])
    if isinstance(right, int):
        return op.Reshape(x, [-1, right])
    return op.Reshape(x, [left, -1]) if isinstance(left, int) else None


@expansion("Squeeze", "Unsqueeze", "Reshape", when=LOWERING)
def reshape(op, x, other=None, *, node):
    """Reshape to the inferred shape, of which one size may be unknown."""
    y = node.outputs[0]
    dims = op.dims(y)
    unknown = [d for d in dims if not isinstance(d, int)]
    if len(unknown) > 1 or (unknown and 0 in dims) or node.op_type == "Reshape":
        return None
    return op.Reshape(x, [d if isinstance(d, int) else -1 for d in dims])


@expansion("Reshape", when=LOWERING)
def reshape_to_known(op, x, shape, *, allowzero, node):
    """Replace a computed shape by the inferred one."""
    dims = op.dims(node.outputs[0])
    unknown = [d for d in dims if not isinstance(d, int)]
    if op.constant(shape) is not None and not (allowzero and 0 in op.constant(shape)):
        return None
    if len(unknown) > 1 or 0 in dims:
        return None
    return op.Reshape(x, [d if isinstance(d, int) else -1 for d in dims])


@expansion("Reshape", "Transpose", when=LOWERING)
def expand_by_position(op, x, shape=None, *, node):
    """Gather from the flat tensor, for runtimes that reshape and transpose floats only."""
    before, after = op.static(x), op.static(node.outputs[0])
    if x.dtype not in (ir.DataType.INT32, _INT64) or before is None or after is None:
        return None
    flat, order = _flat(op, x, np.arange(int(np.prod(before))).reshape(before))
    if flat is None:
        return None
    positions = np.argsort(order).reshape(before)
    if node.op_type == "Transpose":
        perm = node.attributes["perm"].as_ints() if "perm" in node.attributes else None
        positions = positions.transpose(perm)
    return op.Gather(flat, op.const(positions.reshape(after)), axis=0)


def _flat(op, x, order):
    """Return the elements as a vector, built by slicing short axes, and their positions in x."""
    if not order.ndim:
        return op.Unsqueeze(x, [0]), order.reshape(1)
    slices = 1
    while order.ndim > 1:
        axis = int(np.argmin(order.shape))
        count = order.shape[axis]
        slices *= count
        if slices > 256:
            return None, order
        if count == 1:
            x = op.Squeeze(x, [axis])
        else:
            x = op.Concat(*(op.Gather(x, op.const(i), axis=axis) for i in range(count)), axis=0)
        order = np.concatenate([np.take(order, i, axis) for i in range(count)])
    return x, order


@expansion("com.microsoft::ExpandDims", when=TRAINING)
def expand_dims(op, x, axis):
    """Insert an axis of size 1."""
    return op.Unsqueeze(x, op.Reshape(op.cast(axis, _INT64), [1]))


@expansion("com.microsoft::UnfoldTensor", when=TRAINING)
def unfold_tensor(op, x, *, size, dim=-1, step=1):
    """Sliding windows of ``size`` along an axis, every ``step``, as a new last axis."""
    axis = dim % op.rank(x)
    room = minus(op, op.size(x, axis), size)
    count = room // step + 1 if isinstance(room, int) else op.Add(op.Div(room, step), 1)
    starts = op.Mul(op.iota(count), step)
    at = op.Add(op.Unsqueeze(starts, [1]), op.iota(size))  # [count, size]
    return op.move_axis(op.Gather(x, at, axis=axis), axis + 1, -1)


@expansion("DepthToSpace", when=LOWERING)
def depth_to_space(op, x, *, blocksize, mode):
    """[N, b, b, C, H, W] or [N, C, b, b, H, W] -> [N, C, H, b, W, b]."""
    n, (c, h, w) = op.size(x, 0), op.dims(x)[1:]
    b = blocksize
    if not all(isinstance(d, int) for d in (c, h, w)):
        return None
    front = [b, b, c // (b * b)] if mode == "DCR" else [c // (b * b), b, b]
    perm = [0, 3, 4, 1, 5, 2] if mode == "DCR" else [0, 1, 4, 2, 5, 3]
    first = -1 if not isinstance(n, int) else n
    y = op.Transpose(op.Reshape(x, [first, *front, h, w]), perm=perm)
    return op.Reshape(y, [first, c // (b * b), h * b, w * b])


@expansion("SpaceToDepth", when=LOWERING)
def space_to_depth(op, x, *, blocksize):
    """[N, C, H, b, W, b] -> [N, b, b, C, H, W]."""
    n, (c, h, w) = op.size(x, 0), op.dims(x)[1:]
    b = blocksize
    if not all(isinstance(d, int) for d in (c, h, w)):
        return None
    first = -1 if not isinstance(n, int) else n
    y = op.Reshape(x, [first, c, h // b, b, w // b, b])
    return op.Reshape(op.Transpose(y, perm=[0, 3, 5, 1, 2, 4]), [first, c * b * b, h // b, w // b])


@expansion("Trilu", when=LOWERING)
def trilu(op, x, k=None, *, upper):
    """``Where`` with a constant triangle."""
    rows, columns = op.dims(x)[-2:]
    shift = np.zeros((), np.int64) if k is None else op.constant(k)
    if not isinstance(rows, int) or not isinstance(columns, int) or shift is None:
        return None
    ones = np.ones((rows, columns), bool)
    shift = int(shift.reshape(()))
    mask = np.triu(ones, shift) if upper else np.tril(ones, shift)
    return op.Where(op.const(mask), x, op.const(0, x.dtype))


@expansion("com.microsoft::Trilu", when=TRAINING)
def contrib_trilu(op, x, k=None, *, upper=1):
    """The standard operator of the same name."""
    return op.Trilu(x, k, upper=upper)


@expansion("EyeLike", when=LOWERING)
def eye_like(op, x, *, dtype, k):
    """A constant."""
    shape = op.static(x)
    kind = ir.DataType(dtype) if dtype else x.dtype
    return None if shape is None else op.Identity(op.const(np.eye(*shape, k=k), kind))


@expansion("OneHot", when=LOWERING)
def one_hot(op, indices, depth, values, *, axis):
    """Compare indices with 0, 1, ...; negative indices count from the end."""
    n = op.constant(depth)
    if n is None:
        return None
    n = int(n.reshape(()))
    rank = op.rank(indices) + 1
    axis = axis % rank
    index = op.Unsqueeze(op.cast(indices, _INT64), [axis])
    shape = [n if i == axis else 1 for i in range(rank)]
    number = np.arange(n).reshape(shape)
    on = op.Or(op.Equal(index, op.const(number)), op.Equal(index, op.const(number - n)))
    low, high = op.Slice(values, [0], [1], [0]), op.Slice(values, [1], [2], [0])
    pair = op.constant(values)
    if pair is not None and list(pair) == [0, 1]:
        return op.Cast(on, to=values.dtype)
    return op.Where(on, high, low)


_BASE = 2048  # three digits in this base cover 32 bits


@expansion("Cast", when=LOWERING)
def cast_booleans(op, x, *, to, saturate, round_mode):
    """Compute the boolean as int64 0 or 1; other types gather from ``[0, 1]``."""
    dtype = ir.DataType(to)
    if x.dtype != BOOL or dtype == BOOL:
        return None
    number = bool_as_int64(op, x)
    if number is None or dtype == ir.DataType.INT64:
        return number
    return op.Gather(op.const([0, 1], dtype), number, axis=0)


@expansion("Cast", when=LOWERING)
def cast_integers(op, x, *, to, saturate, round_mode):
    """Gather the value of each base-2048 digit and add; exact for 32 bits, Gather fails beyond."""
    dtype = ir.DataType(to)
    if x.dtype not in INTEGER_TYPES or not (dtype.is_floating_point() or dtype in INTEGER_TYPES):
        return None
    if dtype.itemsize < 4:
        return None  # float16 cannot represent the table
    base, terms = op.const(_BASE, x.dtype), []
    for scale, most in ((1, _BASE), (_BASE, _BASE), (_BASE**2, _BASE // 4)):
        # Integer Div truncates towards zero, so digits have the sign of the number.
        rest = op.Div(x, base)
        digit = x if scale == _BASE**2 else op.Sub(x, op.Mul(rest, base))
        place = op.Add(digit, op.const(most, x.dtype))
        table = np.arange(-most, most, dtype=np.float64) * scale
        terms.append(op.Gather(op.const(table, dtype), place, axis=0))
        x = rest
    low, middle, high = terms
    # The two higher terms add exactly (22 bits), so there is one rounding, as in a Cast.
    return op.Add(op.Add(high, middle), low)
