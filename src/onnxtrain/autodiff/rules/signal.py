"""Discrete Fourier transforms."""

from __future__ import annotations

import numpy as np

from onnxtrain.autodiff.rule_registry import undefined, vjp


@vjp("DFT")
def dft(op, dy, x, dft_length=None, axis=None, *, inverse, onesided):
    """The adjoint of a discrete Fourier transform is the unscaled inverse transform.

    ``y = F x`` gives ``dx = conj(F)^T dy``: length times the inverse transform. A real ``x``
    gets the real part. Frequencies that ``onesided`` omits and elements that ``dft_length`` cuts
    have zero gradient.
    """
    where = op.const(-2) if axis is None else axis
    at = op.constant(where)
    if at is None:
        return undefined("the axis is computed at run time")
    at = int(at.reshape(-1)[0]) % op.rank(x)
    if inverse and onesided:
        return _inverse_onesided(op, dy, x, at)
    size = op.size(x, at)
    if dft_length is None:
        length = op.const(size) if isinstance(size, int) else op.Squeeze(size, [0])
    else:
        given = op.constant(dft_length)
        length = (
            op.const(int(given.reshape(-1)[0]))
            if given is not None
            else op.Reshape(dft_length, op.const([]))
        )
    back = op.DFT(dy, length, op.const(at), inverse=1 - inverse)
    scale = op.Cast(length, to=x.dtype)
    dx = op.Div(back, scale) if inverse else op.Mul(back, scale)
    if dft_length is not None:
        dx = _fit(op, dx, at, size, length)
    return op.Slice(dx, [0], op.vector([op.size(x, -1)]), [-1])


def _inverse_onesided(op, dy, x, at):
    """``y_n = sum_k c_k Re(x_k w^(kn)) / N`` gives ``dx_k = c_k sum_n dy_n w^(-kn) / N``.

    ``c_k`` is 2 where ``k`` also represents ``N - k``: everywhere except 0 and N / 2.
    """
    bins, count = op.size(x, at), op.size(dy, at)
    if not isinstance(bins, int) or not isinstance(count, int) or bins != count // 2 + 1:
        return undefined("an inverse one-sided transform needs known sizes N // 2 + 1 and N")
    weights = np.full(bins, 2.0 / count)
    weights[0] = 1.0 / count
    if count % 2 == 0:
        weights[-1] = 1.0 / count
    shape = [bins if i == at else 1 for i in range(op.rank(x))]
    spectrum = op.DFT(dy, None, op.const(at), onesided=1)
    return op.Mul(spectrum, op.const(weights.reshape(shape), x.dtype))


def _fit(op, dx, at, size, length):
    """Slice or zero-pad to ``size`` along an axis; elements beyond it were not read."""
    given = op.constant(length)
    if isinstance(size, int) and given is not None and int(given) >= size:
        return op.Slice(dx, [0], [size], [at])
    missing = op.Sub(op.vector([size]), op.Reshape(length, [1]))  # negative cuts
    return op.Pad(dx, op.Concat(op.const([0]), missing, axis=0), None, op.const([at]))
