"""Cases of operators newer than the working opset."""

from __future__ import annotations

from .make import c, f, ints, w
from .single import Case

_HEADS = {"q_num_heads": 2, "kv_num_heads": 2}

NEWER = [
    Case("Attention", (f(2, 2, 5, 4), f(2, 2, 6, 4), f(2, 2, 6, 4)), since=23),
    Case(
        "Attention",
        tuple(f(2, 5, 8) for _ in range(3)),
        {**_HEADS, "is_causal": 1},
        "flat",
        since=23,
    ),
    Case("RotaryEmbedding", (f(2, 2, 3, 4), w(8, 2), w(8, 2), ints(8, 2, 3)), since=23),
    Case(
        "RotaryEmbedding",
        (f(1, 3, 8), w(1, 3, 2), w(1, 3, 2)),
        {"num_heads": 2, "interleaved": 1},
        "interleaved",
        since=23,
    ),
    Case("RMSNormalization", (f(2, 3, 4), w(4)), since=23),
    Case("RMSNormalization", (f(2, 3, 4), w(3, 4)), {"axis": 1, "epsilon": 0.1}, "axis", since=23),
    Case("Swish", (f(9, scale=3),), since=24),
    Case("Swish", (f(9, scale=3),), {"alpha": 0.5}, "alpha", since=24),
    Case("TensorScatter", (f(2, 1, 4, 3), f(2, 1, 2, 3), c([1, 0])), since=24, dynamic=False),
    Case("CumProd", (f(2, 5), c(1)), since=26, dynamic=False, also_lacks=("Scan", "Loop")),
]
