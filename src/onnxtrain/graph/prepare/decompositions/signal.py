"""Short-time Fourier transform."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph.prepare.decompose import decomposition


@decomposition("STFT")
def stft(op, signal, frame_step, window=None, frame_length=None, *, onesided=1):
    """Cut the signal into frames, weigh them with the window, transform each."""
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
