"""Cases for RNN, GRU and LSTM, which prepare turns into Scan.

onnx's reference evaluator cannot run such Scans: the finite differences are taken on onnxruntime.
"""

from __future__ import annotations

import torch

from tests.cases.base import OpCase, f, ints

T, B, I, H = 4, 2, 3, 2


def _weights(gates: int, directions: int = 1) -> tuple:
    return f(T, B, I), f(directions, gates * H, I), f(directions, gates * H, H)


def _cells(step, states, x, w, r, b, directions):
    """Run one python cell per direction; ``b`` may be None."""
    ys, finals = [], []
    for d in range(w.shape[0]):
        h = [s[d] for s in states]
        out = [None] * x.shape[0]
        times = range(x.shape[0])
        for t in reversed(times) if directions[d] else times:
            bias = b[d] if b is not None else torch.zeros(2 * w.shape[1], dtype=x.dtype)
            n = w.shape[1]
            h = step(x[t] @ w[d].T + bias[:n], h, r[d], bias[n:])
            out[t] = h[0]
        ys.append(torch.stack(out))
        finals.append(h)
    return torch.stack(ys, 1), *(torch.stack(s) for s in zip(*finals, strict=True))


def _zeros(x, w):
    return torch.zeros(w.shape[0], x.shape[1], H, dtype=x.dtype)


def rnn(x, w, r, b=None, lens=None, h0=None, directions=(0,)):
    def step(gx, states, rd, rb):
        return [torch.tanh(gx + states[0] @ rd.T + rb)]

    return _cells(step, [_zeros(x, w) if h0 is None else h0], x, w, r, b, directions)


def gru(x, w, r, b=None, lens=None, h0=None, directions=(0,), linear=False):
    def step(gx, states, rd, rb):
        (h,) = states
        xz, xr, xn = gx.split(H, -1)
        z = torch.sigmoid(xz + h @ rd[:H].T + rb[:H])
        reset = torch.sigmoid(xr + h @ rd[H : 2 * H].T + rb[H : 2 * H])
        if linear:
            n = torch.tanh(xn + reset * (h @ rd[2 * H :].T + rb[2 * H :]))
        else:
            n = torch.tanh(xn + (reset * h) @ rd[2 * H :].T + rb[2 * H :])
        return [(1 - z) * n + z * h]

    return _cells(step, [_zeros(x, w) if h0 is None else h0], x, w, r, b, directions)


def lstm(x, w, r, b=None, lens=None, h0=None, c0=None, p=None, directions=(0,)):
    def step(gx, states, rd, rb):
        h, c = states
        i, o, forget, g = (gx + h @ rd.T + rb).split(H, -1)
        if p is not None:
            i, forget = i + p[0, :H] * c, forget + p[0, 2 * H :] * c
        c = torch.sigmoid(forget) * c + torch.sigmoid(i) * torch.tanh(g)
        if p is not None:
            o = o + p[0, H : 2 * H] * c
        return [torch.sigmoid(o) * torch.tanh(c), c]

    start = [_zeros(x, w) if s is None else s for s in (h0, c0)]
    return _cells(step, start, x, w, r, b, directions)


def _masked(cell, **options):
    """Run every sequence alone, up to its own length."""

    def run(x, w, r, b, lens, h0):
        ys, ends = [], []
        for i, n in enumerate(lens.tolist()):
            y, h = cell(x[:n, i : i + 1], w, r, b, None, h0[:, i : i + 1], **options)
            ys.append(torch.cat([y, torch.zeros(T - n, *y.shape[1:], dtype=y.dtype)]))
            ends.append(h)
        return torch.cat(ys, 2), torch.cat(ends, 1)

    return run


HIDDEN = {"hidden_size": H}
BOTH = {"hidden_size": H, "direction": "bidirectional"}
LENS = ints([4, 2], "int32")

CASES = [
    OpCase("RNN", _weights(1), HIDDEN, torch=rnn, outputs=2, forward="onnxruntime"),
    OpCase(
        "RNN",
        (*_weights(1, 2), f(2, 2 * H), None, f(2, B, H)),
        BOTH,
        torch=lambda *a: rnn(*a, directions=(0, 1)),
        outputs=2,
        forward="onnxruntime",
        id="bidirectional",
    ),
    OpCase(
        "RNN",
        (*_weights(1), f(1, 2 * H), LENS, f(1, B, H)),
        {**HIDDEN, "direction": "reverse"},
        torch=_masked(rnn, directions=(1,)),
        outputs=2,
        forward="onnxruntime",
        id="lengths-reverse",
    ),
    OpCase("GRU", (*_weights(3), f(1, 6 * H)), HIDDEN, torch=gru, outputs=2, forward="onnxruntime"),
    OpCase(
        "GRU",
        (*_weights(3, 2), f(2, 6 * H), None, f(2, B, H)),
        {**BOTH, "linear_before_reset": 1},
        torch=lambda *a: gru(*a, directions=(0, 1), linear=True),
        outputs=2,
        forward="onnxruntime",
        id="linear-bidirectional",
    ),
    OpCase(
        "GRU",
        (*_weights(3), f(1, 6 * H), LENS, f(1, B, H)),
        HIDDEN,
        torch=_masked(gru),
        outputs=2,
        forward="onnxruntime",
        id="lengths",
    ),
    OpCase("LSTM", _weights(4), HIDDEN, torch=lstm, outputs=3, forward="onnxruntime"),
    OpCase(
        "LSTM",
        (*_weights(4), f(1, 8 * H), None, f(1, B, H), f(1, B, H), f(1, 3 * H)),
        HIDDEN,
        torch=lstm,
        outputs=3,
        forward="onnxruntime",
        id="peepholes",
    ),
    OpCase(
        "LSTM",
        (*_weights(4, 2), f(2, 8 * H), None, f(2, B, H), f(2, B, H)),
        BOTH,
        torch=lambda *a: lstm(*a, directions=(0, 1)),
        outputs=3,
        forward="onnxruntime",
        id="bidirectional",
    ),
    OpCase(
        "LSTM",
        (*_weights(4), f(1, 8 * H)),
        {**HIDDEN, "direction": "reverse", "clip": 50.0},
        torch=lambda *a: lstm(*a, directions=(1,))[0],
        forward="onnxruntime",
        id="reverse-only-y",
    ),
]
