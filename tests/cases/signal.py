"""Cases for DFT and STFT."""

from __future__ import annotations

import torch

from tests.cases.base import OpCase, const, f


def _fft(x, n=None, axis=1, *, inverse=False, onesided=False):
    z = torch.view_as_complex(x.contiguous()) if x.shape[-1] == 2 else x[..., 0]
    if onesided:
        y = torch.fft.rfft(z, n, axis)
    else:
        y = (torch.fft.ifft if inverse else torch.fft.fft)(z, n, axis)
    return torch.view_as_real(y)


def _stft(signal, step, window=None, length=None, *, onesided=True):
    n = length if window is None else window.shape[0]
    frames = signal[..., 0].unfold(1, n, step) if signal.dim() == 3 else signal.unfold(1, n, step)
    if window is not None:
        frames = frames * window
    return _fft(frames[..., None], None, 2, onesided=onesided)


CASES = [
    OpCase("DFT", (f(2, 5, 1), None, const(1)), torch=lambda x, n, a: _fft(x)),
    OpCase("DFT", (f(2, 4, 2), None, const(-2)), torch=lambda x, n, a: _fft(x), id="complex"),
    OpCase(
        "DFT",
        (f(2, 5, 2), None, const(1)),
        {"inverse": 1},
        torch=lambda x, n, a: _fft(x, inverse=True),
        id="inverse",
    ),
    OpCase(
        "DFT",
        (f(2, 6, 1), None, const(1)),
        {"onesided": 1},
        torch=lambda x, n, a: _fft(x, onesided=True),
        id="one-sided-even",
    ),
    OpCase(
        "DFT",
        (f(3, 5, 2, 1), const(8), const(1)),
        {"onesided": 1},
        torch=lambda x, n, a: _fft(x, 8, onesided=True),
        id="longer",
    ),
    OpCase("DFT", (f(2, 7, 2), const(4), const(1)), torch=lambda x, n, a: _fft(x, 4), id="shorter"),
    OpCase("STFT", (f(2, 12, 1), const(3), f(4)), torch=_stft),
    OpCase(
        "STFT",
        (f(1, 9, 1), const(2), None, const(5)),
        {"onesided": 0},
        torch=lambda s, step, w, n: _stft(s, step, None, n, onesided=False),
        id="no-window",
    ),
]
