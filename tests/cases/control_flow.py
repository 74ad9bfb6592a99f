"""Cases for If, Loop and Scan.

onnx's reference evaluator runs neither a reversed or off-axis Scan nor scalar scan outputs of a
Loop: the finite differences are taken on onnxruntime.
"""

from __future__ import annotations

import torch

from tests.cases.base import OpCase, bools, f, ints

SCAN = """g (float[T,3] x, float[3] h0, float[3,3] w) => (float[3] h, float[T,3] ys) {
  h, ys = Scan <num_scan_inputs = 1, %s body = b (float[3] s, float[3] e)
    => (float[3] s2, float[3] y)
    { a = MatMul (s, w)  c = Add (a, e)  s2 = Tanh (c)  y = Mul (s2, s) }> (h0, x)
}"""

SCAN_AXES = """g (float[3,T] x, float[3] h0) => (float[3] h, float[3,T] ys) {
  h, ys = Scan <num_scan_inputs = 1, scan_input_axes = [1], scan_output_axes = [-1],
    body = b (float[3] s, float[3] e) => (float[3] s2, float[3] y)
    { s2 = Mul (s, e)  y = Sin (s2) }> (h0, x)
}"""

SCAN_MAP = """g (float[T,3] x, float[T,3] z, float[3] w) => (float[T,3] ys) {
  ys = Scan <num_scan_inputs = 2, body = b (float[3] e, float[3] k) => (float[3] y)
    { a = Mul (e, w)  y = Mul (a, k) }> (x, z)
}"""

SCAN_COUNTER = """g (int64 n, float[T,3] x) => (float[T,3] ys) {
  m, ys = Scan <num_scan_inputs = 1, body = b (int64 i, float[3] e) => (int64 j, float[3] y)
    { one = Constant <value = int64 {1}> ()  j = Add (i, one)  k = Cast <to = 1> (j)
      kk = CastLike (k, e)  y = Mul (e, kk) }> (n, x)
}"""


def _scan(x, h0, w, *, reverse=False):
    h, ys = h0, [None] * len(x)
    for t in reversed(range(len(x))) if reverse else range(len(x)):
        new = torch.tanh(h @ w + x[t])
        ys[t], h = new * h, new
    return h, torch.stack(ys)


def _scan_axes(x, h0):
    h, ys = h0, []
    for t in range(x.shape[1]):
        h = h * x[:, t]
        ys.append(torch.sin(h))
    return h, torch.stack(ys, 1)


LOOP = """g (int64 n, bool go, float[3] x, float[3] w) => (float[3] y, float[K,3] ys) {
  y, ys = Loop <body = b (int64 i, bool c, float[3] s) => (bool c2, float[3] s2, float[3] e)
    { c2 = Identity (c)  a = Mul (s, w)  s2 = Sin (a)  e = Mul (s2, s) }> (n, go, x)
}"""

LOOP_COND = """g (float[3] x, float[3] w) => (float[3] y) {
  n = Constant <value = int64 {10}> ()
  go = Constant <value = bool {1}> ()
  y = Loop <body = b (int64 i, bool c, float[3] s) => (bool c2, float[3] s2)
    { two = Constant <value = int64 {2}> ()  c2 = Less (i, two)  a = Mul (s, w)  s2 = Sin (a) }>
    (n, go, x)
}"""


def _loop(n, go, x, w):
    ys = []
    for _ in range(int(n) if bool(go) else 0):
        new = torch.sin(x * w)
        ys.append(new * x)
        x = new
    return x, torch.stack(ys)


def _loop_three(x, w):
    for _ in range(3):
        x = torch.sin(x * w)
    return x


IF = """g (bool c, float[n] x, float[n] w) => (float[n] y, float[n] z) {
  y, z = If <then_branch = a () => (float[n] p, float[n] p2) { p = Mul (x, w)  p2 = Sin (x) },
    else_branch = b () => (float[n] q, float[n] q2) { q = Tanh (x)  q2 = Identity (x) }> (c)
}"""

NESTED = """g (bool c, bool d, float[n] x, float[n] w) => (float[n] y) {
  h = Tanh (x)
  y = If <then_branch = a () => (float[n] p)
      { p = If <then_branch = e () => (float[n] r) { r = Mul (h, w) },
                else_branch = k () => (float[n] s) { s = Mul (h, x) }> (d) },
    else_branch = b () => (float[n] q) { q = Sin (w) }> (c)
}"""

CASES = [
    OpCase("Scan", (f(5, 3), f(3), f(3, 3)), model=SCAN % "", torch=_scan, forward="onnxruntime"),
    OpCase(
        "Scan",
        (f(5, 3), f(3), f(3, 3)),
        model=SCAN % "scan_input_directions = [1], scan_output_directions = [1],",
        torch=lambda x, h0, w: _scan(x, h0, w, reverse=True),
        forward="onnxruntime",
        id="reverse",
    ),
    OpCase(
        "Scan", (f(3, 4), f(3)), model=SCAN_AXES, torch=_scan_axes, id="axes", forward="onnxruntime"
    ),
    OpCase(
        "Scan",
        (f(4, 3), f(4, 3), f(3)),
        model=SCAN_MAP,
        torch=lambda x, z, w: x * w * z,
        forward="onnxruntime",
        id="no-state",
    ),
    OpCase(
        "Scan",
        (ints(0), f(4, 3)),
        model=SCAN_COUNTER,
        torch=lambda n, x: x * torch.arange(1, 5, dtype=x.dtype)[:, None],
        forward="onnxruntime",
        id="integer-state",
    ),
    OpCase(
        "Loop", (ints(4), bools(True), f(3), f(3)), model=LOOP, torch=_loop, forward="onnxruntime"
    ),
    OpCase(
        "Loop",
        (f(3), f(3)),
        model=LOOP_COND,
        torch=_loop_three,
        id="condition",
        forward="onnxruntime",
    ),
    OpCase(
        "If",
        (bools(True), f(4), f(4)),
        model=IF,
        torch=lambda c, x, w: (x * w, torch.sin(x)),
        forward="onnxruntime",
        id="then",
    ),
    OpCase(
        "If",
        (bools(False), f(4), f(4)),
        model=IF,
        torch=lambda c, x, w: (torch.tanh(x) + 0 * w, x),
        forward="onnxruntime",
        id="else",
    ),
    OpCase(
        "If",
        (bools(True), bools(False), f(4), f(4)),
        model=NESTED,
        torch=lambda c, d, x, w: torch.tanh(x) * x + 0 * w,
        forward="onnxruntime",
        id="nested",
    ),
]
