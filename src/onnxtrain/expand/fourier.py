"""Fourier transforms and complex arithmetic.

DFT becomes a matmul with a constant matrix of cosines and sines; STFT and Rfft become DFT.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxtrain.expand.expansions import LOWERING, TRAINING, expansion, on_target, raise_unsupported
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder


@expansion("DFT", when=on_target(lacks="DFT"))
@expansion("DFT", when=LOWERING)
def dft(
    op: OpBuilder,
    x: ir.Value,
    length: ir.Value | None = None,
    axis: ir.Value | None = None,
    *,
    inverse: int,
    onesided: int,
) -> ir.Value | None:
    """A matmul with the cosines and sines of the transform."""
    rank = op.rank(x)
    where = op.constant(axis) if axis is not None else np.asarray(-2)
    if where is None:
        return None
    at = int(where.reshape(())) % rank
    n, parts = op.dims(x)[at], op.dims(x)[-1]
    points = n if length is None else op.constant(length)
    if points is None or not isinstance(n, int) or parts not in (1, 2) or (inverse and onesided):
        return None
    points = int(np.asarray(points).reshape(()))
    if points < n:
        x, n = op.Slice(x, [0], [points], [at]), points
    kept = points // 2 + 1 if onesided else points
    angle = 2 * np.pi * np.outer(np.arange(n), np.arange(kept)) / points
    scale, turn = (1 / points, 1.0) if inverse else (1.0, -1.0)
    real, imaginary = np.cos(angle) * scale, turn * np.sin(angle) * scale
    # The axis last, then [.., n * parts] @ [n * parts, kept * 2].
    moved = op.move_axis(x, at, rank - 2)  # [..., n, parts]
    dims = op.dims(moved)
    table = np.zeros((n, parts, kept, 2))
    table[:, 0, :, 0], table[:, 0, :, 1] = real, imaginary
    if parts == 2:
        table[:, 1, :, 0], table[:, 1, :, 1] = -imaginary, real
    lead = [op.size(moved, i) for i in range(rank - 2)]
    flat = op.reshape(moved, [*lead, n * parts])
    y = op.MatMul(flat, op.const(table.reshape(n * parts, kept * 2), x.dtype))
    y = op.reshape(y, [*lead, kept, 2])
    S.set_dims(y, [*dims[:-2], kept, 2])
    return op.move_axis(y, rank - 2, at)


@expansion("STFT", when=TRAINING)
@expansion("STFT", when=LOWERING)
def stft(op, signal, frame_step, window=None, frame_length=None, *, onesided=1):
    """Gather overlapping frames, multiply by the window, transform each by DFT."""
    step = op.Cast(op.Reshape(frame_step, op.const([])), to=ir.DataType.INT64)
    if frame_length is not None:
        length = op.Cast(op.Reshape(frame_length, op.const([])), to=ir.DataType.INT64)
    else:
        size = op.size(window, 0)
        length = op.const(size) if isinstance(size, int) else op.Squeeze(size, [0])
    samples = op.size(signal, 1)
    samples = op.const(samples) if isinstance(samples, int) else op.Squeeze(samples, [0])
    frames = op.Add(op.Div(op.Sub(samples, length), step), 1)
    starts = op.Mul(op.Range(op.const(0), frames, op.const(1)), step)
    inside = op.Range(op.const(0), length, op.const(1))
    at = op.Add(op.Unsqueeze(starts, [1]), op.Unsqueeze(inside, [0]))  # [frames, length]
    if op.rank(signal) == 2:
        signal = op.Unsqueeze(signal, [2])
    cut = op.Gather(signal, at, axis=1)  # [batch, frames, length, channels]
    if window is not None:
        cut = op.Mul(cut, op.Unsqueeze(window, [1]))
    cut.shape = ir.Shape([*list(cut.shape)[:-1], signal.shape[-1]])
    return op.DFT(cut, length, op.const(2), onesided=onesided)


@expansion("com.microsoft::Rfft", when=TRAINING)
def rfft(op, x, *, signal_ndim=1, normalized=0, onesided=1, node):
    """The one-sided DFT of the last axis."""
    if signal_ndim != 1 or normalized or not onesided:
        raise_unsupported(node, "only one-sided, unnormalized transforms of one axis are supported")
    rank = op.rank(x)
    return op.DFT(op.Unsqueeze(x, [-1]), None, op.const(rank - 1), onesided=1)


@expansion("com.microsoft::Irfft", when=TRAINING)
def irfft(op, x, *, signal_ndim, normalized=0, onesided=1, node):
    """The inverse DFT of the half spectrum, completed by its conjugate mirror image.

    The imaginary parts at both ends are ignored.
    """
    if signal_ndim != 1 or normalized or not onesided:
        raise_unsupported(node, "only one-sided, unnormalized transforms of one axis are supported")
    axis = op.rank(x) - 2
    half = op.dims(x)[axis]
    if not isinstance(half, int):
        raise_unsupported(node, "the length of the signal must be static")
    inner = op.Slice(x, [1], [half - 1], [axis])
    mirrored = op.Slice(inner, [-1], [-(half - 1)], [axis], [-1])
    conjugate = op.Mul(mirrored, op.const([1.0, -1.0], x.dtype))
    ends = op.const([1.0, 0.0], x.dtype)
    first, last = (op.Mul(op.Slice(x, [i], [i + 1], [axis]), ends) for i in (0, half - 1))
    spectrum = op.Concat(first, inner, last, conjugate, axis=axis)
    signal = op.DFT(spectrum, None, op.const(axis), inverse=1)
    return op.Squeeze(op.Slice(signal, [0], [1], [-1]), [-1])


@expansion("com.microsoft::ComplexMul", when=TRAINING)
def complex_mul(op, a, b):
    """The product of complex numbers ``[..., 2]``."""
    return _complex_product(op, a, b, conjugate=False)


@expansion("com.microsoft::ComplexMulConj", when=TRAINING)
def complex_mul_conj(op, a, b):
    """The product with the conjugate of ``b``."""
    return _complex_product(op, a, b, conjugate=True)


def _complex_product(op: OpBuilder, a: ir.Value, b: ir.Value, *, conjugate: bool) -> ir.Value:
    ar, ai = op.Split(a, axis=-1, num_outputs=2, _outputs=2)
    br, bi = op.Split(b, axis=-1, num_outputs=2, _outputs=2)
    if conjugate:
        bi = op.Neg(bi)
    real = op.Sub(op.Mul(ar, br), op.Mul(ai, bi))
    imaginary = op.Add(op.Mul(ar, bi), op.Mul(ai, br))
    return op.Concat(real, imaginary, axis=-1)
