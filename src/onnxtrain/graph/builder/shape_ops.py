"""Shape helpers of the builder: static when known, nodes when not, behind one name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.nodes import is_op
from onnxtrain.graph.shapes import dims as D
from onnxtrain.graph.shapes.dims import Dim

Size = int | ir.Value
"""A size as rules pass it around: a number, or an int64 value of shape [1]."""


class ShapeOps:
    """Mixin of :class:`~onnxtrain.graph.builder.OpBuilder`."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    # -- asking -----------------------------------------------------------------

    def rank(self, x: ir.Value) -> int:
        """Return the rank of a value; a ``ShapeError`` if it is unknown."""
        return S.rank_of(x)

    def dims(self, x: ir.Value) -> tuple[Dim, ...]:
        """Return the dimensions of a value: numbers, symbolic expressions, or ``None``."""
        S.rank_of(x)
        return S.dims_of(x) or ()

    def static(self, x: ir.Value) -> tuple[int, ...] | None:
        """Return the shape if every size is a number, else ``None``."""
        dims = S.dims_of(x)
        if dims is None or not all(isinstance(d, int) for d in dims):
            return None
        return dims  # pyright: ignore[reportReturnType]

    def axes(self, axes: Sequence[int] | ir.Value | None, rank: int) -> list[int] | None:
        """Return constant axes as non-negative numbers; ``None`` if they are not constant.

        ``axes=None`` means all of them.
        """
        if axes is None:
            return list(range(rank))
        if isinstance(axes, ir.Value):
            array = S.constant_of(axes)
            if array is None:
                return None
            axes = [int(a) for a in array.reshape(-1)]
        return [a % rank for a in axes]

    def constant(self, x: ir.Value | None) -> np.ndarray | None:
        """Return the array of a constant, ``None`` if the value is computed or absent."""
        return S.constant_of(x)

    def same_shape(self, x: ir.Value, ref: ir.Value) -> bool:
        """Return whether two values provably have the same shape."""
        return S.same_shape(x, ref)

    # -- sizes as values ----------------------------------------------------------

    def shape_of(self, x: ir.Value) -> ir.Value:
        """Return the shape of a value as an int64 vector."""
        dims = S.dims_of(x)
        if dims is not None and all(isinstance(d, int) for d in dims):
            return self.const(np.asarray(dims, np.int64))
        return self.Shape(self.shape_source(x))

    def size(self, x: ir.Value, axis: int) -> Size:
        """Return one size: a number if it is known, else an int64 value of shape [1]."""
        axis %= self.rank(x)
        d = self.dims(x)[axis]
        if isinstance(d, int):
            return d
        fed = None if self.position is None or d is None else self.fed_size(d)
        return self.Shape(self.shape_source(x), start=axis, end=axis + 1) if fed is None else fed

    def fed_size(self, d: str) -> ir.Value | None:
        """Return a size, or a sum of sizes, that inputs of the graph tell.

        Asked of inputs, the same size is the same value in all layers of a model.
        """
        parts: list[Any] = []
        fed = self._fed_sizes()
        for name in [d] if d in fed else d.split("+"):
            name = name.strip()
            where = fed.get(name)
            if where is not None:
                parts.append(self.Shape(where[0], start=where[1], end=where[1] + 1))
            elif name.isdigit():
                parts.append(self.const([int(name)]))
            else:
                return None
        total = parts[0]
        for part in parts[1:]:
            total = self.Add(total, part)
        return total

    def _fed_sizes(self) -> dict[str, tuple[ir.Value, int]]:
        """Return the first input, and its axis, that has each of the named sizes."""
        where: dict[str, tuple[ir.Value, int]] = {}
        for x in self.root.inputs:
            for i, d in enumerate(S.dims_of(x) or ()):
                if isinstance(d, str) and not isinstance(x.type, ir.SequenceType):
                    where.setdefault(d, (x, i))
        return where

    def vector(self, sizes: Sequence[Size]) -> ir.Value:
        """Join sizes to an int64 vector."""
        if all(isinstance(s, int) for s in sizes):
            return self.const(np.asarray(sizes, np.int64))
        parts: list[ir.Value] = []
        run: list[int] = []
        for s in sizes:
            if isinstance(s, int):
                run.append(s)
                continue
            if run:
                parts.append(self.const(run))
                run = []
            parts.append(s)
        if run:
            parts.append(self.const(run))
        return parts[0] if len(parts) == 1 else self.Concat(*parts, axis=0)

    def count(self, x: ir.Value, axes: Sequence[int] | ir.Value | None = None) -> ir.Value:
        """Return the number of elements along ``axes`` (all by default), a scalar of x's dtype."""
        if isinstance(axes, ir.Value):
            picked = self.Gather(self.shape_of(x), axes)
            return self.Cast(self.ReduceProd(picked, keepdims=0), to=x.dtype)
        dims = self.dims(x)
        chosen = [dims[a] for a in (range(len(dims)) if axes is None else axes)]
        if all(isinstance(d, int) for d in chosen):
            return self.const(D.product(chosen), x.dtype)
        if axes is None:
            return self.Cast(self.Size(self.shape_source(x)), to=x.dtype)
        sizes = [self.size(x, a) for a in axes]
        total = sizes[0] if len(sizes) == 1 else self.ReduceProd(self.vector(sizes), keepdims=0)
        return self.Cast(self.Squeeze(total) if len(sizes) == 1 else total, to=x.dtype)

    # -- changing shape -------------------------------------------------------------

    def reshape(self, x: ir.Value, sizes: Sequence[Size]) -> ir.Value:
        """Reshape to the given sizes; one of them may be -1, a 0 is a size of zero."""
        return self.Reshape(x, self.vector(sizes), allowzero=1 if 0 in _ints(sizes) else None)

    def reshape_like(self, x: ir.Value, ref: ir.Value) -> ir.Value:
        """Return ``x`` in the shape of ``ref``, which has as many elements."""
        if S.same_shape(x, ref):
            return x
        sizes = _constant_sizes(S.dims_of(x), S.dims_of(ref))
        out = self.Reshape(x, self.shape_of(ref) if sizes is None else sizes)
        out.shape = ref.shape
        return out

    def expand_like(self, x: ir.Value, ref: ir.Value) -> ir.Value:
        """Broadcast ``x`` to the shape of ``ref``."""
        if S.same_shape(x, ref):
            return x
        out = self.Expand(x, self.shape_of(ref))
        out.shape = ref.shape
        return out

    def sum_to(self, x: ir.Value, ref: ir.Value) -> ir.Value:
        """Undo broadcasting: sum ``x`` down to the shape of ``ref``."""
        if S.same_shape(x, ref):
            return x
        maker = x.producer()
        if maker is not None and is_op(maker, "Neg") and maker.inputs[0] is not None:
            return self.Neg(self.sum_to(maker.inputs[0], ref))  # the sum is smaller
        have, want = self.dims(x), self.dims(ref)
        lead = len(have) - len(want)
        if lead < 0:
            return self.reshape_like(x, ref)
        pairs = list(zip(have[lead:], want, strict=True))
        # Broadcast sizes are equal or one is 1: a size that is a number above 1 is never summed.
        if all(a == b or b == 1 or (isinstance(b, int) and b > 1) for a, b in pairs):
            inner = [lead + i for i, (a, b) in enumerate(pairs) if b == 1 and a != 1]
            axes = [*range(lead), *inner]
            if not axes:
                return x
            if inner and lead:
                return self.reshape_like(self.ReduceSum(x, axes, keepdims=0), ref)
            out = self.ReduceSum(x, axes, keepdims=0 if lead else 1)
            out.shape = ref.shape
            return out
        # A size is only known at run time: sum every axis on which ref has size 1.
        shape = self.shape_of(ref)
        padded = self.Concat(self.const([1] * lead), shape, axis=0) if lead else shape
        axes = self.Reshape(self.NonZero(self.Equal(padded, 1)), [-1])
        out = self.Reshape(self.ReduceSum(x, axes, keepdims=1, noop_with_empty_axes=1), shape)
        out.shape = ref.shape
        return out

    def restore_axes(
        self, y: ir.Value, x: ir.Value, axes: Sequence[int] | ir.Value | None, keepdims: int
    ) -> ir.Value:
        """Put back, with size 1, the axes that reducing ``x`` to ``y`` removed."""
        if keepdims:
            return y
        if axes is None:
            return self.Reshape(y, [1] * self.rank(x)) if self.rank(x) else y
        return self.Unsqueeze(y, axes)

    # -- filling ----------------------------------------------------------------------

    def full(self, sizes: Sequence[Size] | ir.Value, value: float, dtype: ir.DataType) -> ir.Value:
        """Return a tensor of the given shape with one value everywhere."""
        shape = sizes if isinstance(sizes, ir.Value) else self.vector(sizes)
        # Of bfloat16 not every runtime makes constants.
        if self.target.lacks("ConstantOfShape") or dtype == ir.DataType.BFLOAT16:
            return self.Expand(self.const(value, dtype), shape)
        filler = ir.tensor(np.full(1, value, dtype.numpy()), dtype=dtype)
        return self.ConstantOfShape(shape, value=filler)

    def sign(self, x: ir.Value) -> ir.Value:
        """Return -1, 0 or 1 for every element."""
        if not self.target.lacks("Sign"):
            return self.Sign(x)
        zero, one, minus = (self.const(v, x.dtype) for v in (0.0, 1.0, -1.0))
        return self.Where(self.Greater(x, zero), one, self.Where(self.Less(x, zero), minus, zero))

    def zeros_like(self, x: ir.Value) -> ir.Value:
        """Return zeros of the shape and dtype of ``x``."""
        return self._full_like(x, 0.0)

    def ones_like(self, x: ir.Value) -> ir.Value:
        """Return ones of the shape and dtype of ``x``."""
        return self._full_like(x, 1.0)

    def iota(self, size: Size) -> ir.Value:
        """Return the integers 0, 1 ... below ``size`` as an int64 vector."""
        if isinstance(size, int):
            return self.const(np.arange(size, dtype=np.int64))
        return self.Range(0, self.Squeeze(size, [0]), 1)

    def eye(self, size: Size, dtype: ir.DataType) -> ir.Value:
        """Return the identity matrix."""
        if isinstance(size, int):
            return self.const(np.eye(size), dtype)
        count = self.iota(size)
        return self.Cast(self.Equal(self.Unsqueeze(count, [1]), count), to=dtype)

    def _full_like(self, x: ir.Value, value: float) -> ir.Value:
        assert x.dtype is not None
        if isinstance(x.type, ir.SequenceType):
            return self.map_sequences(lambda body, item: body._full_like(item, value), x)
        if x.shape is not None and len(x.shape) == 0:
            return self.const(value, x.dtype)
        out = self.full(self.shape_of(x), value, x.dtype)
        out.shape = x.shape
        return out

    # -- moving axes --------------------------------------------------------------------

    def mT(self, x: ir.Value) -> ir.Value:  # noqa: N802 - numpy's name
        """Swap the last two axes."""
        r = self.rank(x)
        return self.Transpose(x, perm=[*range(r - 2), r - 1, r - 2])

    def move_axis(self, x: ir.Value, source: int, target: int) -> ir.Value:
        """Move one axis to another position."""
        r = self.rank(x)
        source, target = source % r, target % r
        if source == target:
            return x
        perm = [i for i in range(r) if i != source]
        perm.insert(target, source)
        return self.Transpose(x, perm=perm)

    def cast(self, x: ir.Value, dtype: ir.DataType | None) -> ir.Value:
        """Return ``x`` in another dtype."""
        return x if x.dtype == dtype or dtype is None else self.Cast(x, to=dtype)


def _constant_sizes(have: Sequence[Dim] | None, want: Sequence[Dim] | None) -> list[int] | None:
    """Return constant sizes for a Reshape: 0 for a size that stays, -1 for the only unknown one."""
    if want is None or 0 in want:
        return None
    sizes: list[int] = []
    for i, d in enumerate(want):
        if isinstance(d, int):
            sizes.append(d)
        elif have is not None and i < len(have) and d is not None and have[i] == d:
            sizes.append(0)
        else:
            sizes.append(-1)
    return sizes if sizes.count(-1) <= 1 else None


def _ints(sizes: Sequence[Size]) -> list[int]:
    return [s for s in sizes if isinstance(s, int)]
