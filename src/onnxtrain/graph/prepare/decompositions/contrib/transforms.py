"""Complex numbers, Fourier transforms, inverse matrices."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.prepare.decompose import decomposition
from onnxtrain.graph.prepare.decompositions.contrib.heads import refuse


@decomposition("com.microsoft::ComplexMul")
def complex_mul(op, a, b):
    """Products of complex numbers ``[..., 2]``."""
    return _product(op, a, b, conjugate=False)


@decomposition("com.microsoft::ComplexMulConj")
def complex_mul_conj(op, a, b):
    """Products with the conjugates of the second."""
    return _product(op, a, b, conjugate=True)


def _product(op: OpBuilder, a: ir.Value, b: ir.Value, *, conjugate: bool) -> ir.Value:
    ar, ai = op.Split(a, axis=-1, num_outputs=2, _outputs=2)
    br, bi = op.Split(b, axis=-1, num_outputs=2, _outputs=2)
    if conjugate:
        bi = op.Neg(bi)
    real = op.Sub(op.Mul(ar, br), op.Mul(ai, bi))
    imaginary = op.Add(op.Mul(ar, bi), op.Mul(ai, br))
    return op.Concat(real, imaginary, axis=-1)


@decomposition("com.microsoft::Rfft")
def rfft(op, x, *, signal_ndim=1, normalized=0, onesided=1, node):
    """The transform of the last axis by the standard's DFT; the other half is redundant."""
    if signal_ndim != 1 or normalized or not onesided:
        refuse(node, "only one-sided transforms of one axis, not normalised")
    rank = op.rank(x)
    return op.DFT(op.Unsqueeze(x, [-1]), None, op.const(rank - 1), onesided=1)


@decomposition("com.microsoft::Irfft")
def irfft(op, x, *, signal_ndim, normalized=0, onesided=1, node):
    """The inverse of Rfft: of half a spectrum, of which the rest is the mirror image.

    The imaginary parts at both ends do not count.
    """
    if signal_ndim != 1 or normalized or not onesided:
        refuse(node, "only one-sided transforms of one axis, not normalised")
    axis = op.rank(x) - 2
    half = op.dims(x)[axis]
    if not isinstance(half, int):
        refuse(node, "the length of the signal is not known")
    inner = op.Slice(x, [1], [half - 1], [axis])
    mirrored = op.Slice(inner, [-1], [-(half - 1)], [axis], [-1])
    conjugate = op.Mul(mirrored, op.const([1.0, -1.0], x.dtype))
    ends = op.const([1.0, 0.0], x.dtype)
    first, last = (op.Mul(op.Slice(x, [i], [i + 1], [axis]), ends) for i in (0, half - 1))
    spectrum = op.Concat(first, inner, last, conjugate, axis=axis)
    signal = op.DFT(spectrum, None, op.const(axis), inverse=1)
    return op.Squeeze(op.Slice(signal, [0], [1], [-1]), [-1])


@decomposition("com.microsoft::Inverse")
def inverse(op, x, *, node):
    """The inverse of each matrix, by Gauss and Jordan with the largest pivot of each column."""
    n = op.dims(x)[-1]
    if not isinstance(n, int) or n > 16:
        refuse(node, "matrices of unknown size, or larger than 16")
    dtype = x.dtype
    rows = op.const(list(range(n)))
    lead = op.rank(x) - 2
    table = op.Concat(x, op.Expand(op.eye(n, dtype), op.shape_of(x)), axis=-1)  # [..., n, 2 n]
    for i in range(n):
        column = op.Abs(op.Slice(table, [i], [i + 1], [-1]))  # [..., n, 1]
        open_ = op.Cast(op.GreaterOrEqual(op.Unsqueeze(rows, [1]), op.const(i)), to=dtype)
        best = op.ArgMax(op.Mul(op.Add(column, 1e-30), open_), axis=-2, keepdims=1)
        pivot = op.Cast(op.Equal(op.Unsqueeze(rows, [1]), best), to=dtype)  # [..., n, 1]
        here = op.Cast(op.Equal(op.Unsqueeze(rows, [1]), op.const(i)), to=dtype)
        above = op.ReduceSum(op.Mul(table, pivot), [-2], keepdims=1)
        current = op.ReduceSum(op.Mul(table, here), [-2], keepdims=1)
        same = op.Mul(pivot, here)
        swapped = op.Sub(table, op.Mul(table, op.Sub(op.Add(pivot, here), same)))
        swapped = op.Add(swapped, op.Mul(here, above))
        swapped = op.Add(swapped, op.Mul(op.Sub(pivot, same), current))
        leading = op.Div(above, op.Slice(above, [i], [i + 1], [-1]))
        factor = op.Mul(op.Slice(swapped, [i], [i + 1], [-1]), op.Sub(1.0, here))
        cleared = op.Sub(swapped, op.Mul(factor, leading))
        table = op.Add(op.Mul(cleared, op.Sub(1.0, here)), op.Mul(leading, here))
    y = op.Slice(table, [n], [2 * n], [lead + 1])
    y.shape = x.shape
    return y
