"""Cases for sequences and optionals: with known and unknown structure."""

from __future__ import annotations

import torch

from tests.cases.base import OpCase, f, ints

JOINED = """
g (float[2, 3] a, float[2, 1] b) => (float[2, 4] y) {
    s = SequenceConstruct(a, b)
    y = ConcatFromSequence<axis = -1>(s)
}
"""
STACKED = """
g (float[2, 3] a, float[2, 3] b, int64 i) => (float[2, 2, 3] y, float[2, 3] z) {
    s = SequenceConstruct(a, b, a)
    t = SequenceErase(s, i)
    y = ConcatFromSequence<axis = 1, new_axis = 1>(t)
    z = SequenceAt(s, i)
}
"""
AT = """
g (float[2, 3] a, float[3] b) => (float[2, 3] y) <int64 last = {-1}, int64 first = {0}> {
    s = SequenceConstruct(a, b)
    p = SequenceAt(s, last)
    q = SequenceAt(s, first)
    y = Mul(p, q)
}
"""
AT_RUNTIME = """
g (float[3] a, float[4] b, int64 i) => (float[N] y) {
    s = SequenceConstruct(a, b)
    p = SequenceAt(s, i)
    y = Mul(p, p)
}
"""
CHOSEN = """
g (float[2, 3] a, float[2, 3] b, int64 i) => (float[2, 3] y) {
    s = SequenceConstruct(a, b, a)
    y = SequenceAt(s, i)
}
"""
INSERTED = """
g (float[3] a, float[2] b) => (float[5] y) <int64 first = {0}> {
    s = SequenceConstruct(a)
    t = SequenceInsert(s, b, first)
    u = SequenceInsert(t, a)
    v = SequenceErase(u)
    n = SequenceLength(v)
    z = ConcatFromSequence<axis = 0>(v)
    two = CastLike(n, z)
    y = Mul(z, two)
}
"""
INSERTED_RUNTIME = """
g (float[3] a, float[2] b, int64 i, int64 j) => (float[N] y, float[M] z) {
    s = SequenceConstruct(a, b)
    t = SequenceInsert(s, b, i)
    u = SequenceErase(t, j)
    v = SequenceInsert(u, a)
    w = SequenceErase(v)
    y = ConcatFromSequence<axis = 0>(v)
    z = SequenceAt(w, i)
}
"""
SPLIT = """
g (float[5, 2] x) => (float[2, 2] y) <int64 two = {2}, int64 at = {1}, int64 end = {-1}> {
    s = SplitToSequence<axis = 0>(x, two)
    p = SequenceAt(s, at)
    q = SequenceAt(s, end)
    y = Add(p, q)
}
"""
SPLIT_SIZES = """
g (float[2, 5] x) => (float[2, 3] y, float[2, 2] z)
<int64[2] sizes = {3, 2}, int64 i = {0}, int64 j = {1}> {
    s = SplitToSequence<axis = -1>(x, sizes)
    y = SequenceAt(s, i)
    z = SequenceAt(s, j)
}
"""
SPLIT_SINGLE = """
g (float[3, 2] x, int64 i) => (float[2] y, float[1, 2] z, float[2, 3] w) {
    s = SplitToSequence<axis = 0, keepdims = 0>(x)
    t = SplitToSequence<axis = 0>(x)
    y = SequenceAt(s, i)
    z = SequenceAt(t, i)
    w = ConcatFromSequence<axis = 1, new_axis = 1>(s)
}
"""
SPLIT_RUNTIME = """
g (float[5, 2] x, int64 i, int64 size) => (float[N, 2] y, float[5, 2] z) {
    s = SplitToSequence<axis = 0>(x, size)
    y = SequenceAt(s, i)
    z = ConcatFromSequence<axis = 0>(s)
}
"""
MAPPED = """
g (float[3] a, float[2] b, float[1] c) => (float[5] y) {
    s = SequenceConstruct(a, b)
    t = SequenceMap <body = step (float[K] e) => (float[K] r) { p = Mul(e, e) r = Mul(p, c) }> (s)
    y = ConcatFromSequence<axis = 0>(t)
}
"""
MAPPED_RUNTIME = """
g (float[3] a, float[2] b, float[1] c, float[1] d, int64 i) => (float[N] y) {
    s = SequenceConstruct(a, b, a)
    t = SequenceErase(s, i)
    u = SequenceMap <
        body = step (float[K] e, float[1] k) => (float[K] r) {
            p = Mul(e, k)
            q = Mul(p, p)
            r = Mul(q, d)
        }
    > (t, c)
    y = ConcatFromSequence<axis = 0>(u)
}
"""
OPTIONAL = """
g (float[2, 3] x) => (float[2, 3] y, float[2, 3] z) {
    o = Optional(x)
    e = OptionalGetElement(o)
    y = Mul(e, e)
    z = OptionalGetElement(x)
}
"""
OPTIONAL_SEQUENCE = """
g (float[2] a, float[2] b, int64 i) => (float[2] y) {
    s = SequenceConstruct(a, b)
    o = Optional(s)
    has = OptionalHasElement(o)
    e = OptionalGetElement(o)
    p = SequenceAt(e, i)
    flag = CastLike(has, p)
    y = Mul(p, flag)
}
"""
# The reference evaluator has no optionals and no captured values in SequenceMap, and is wrong about
# sequences of unequal elements: hence forward="torch".
CASES = [
    OpCase(
        "ConcatFromSequence", (f(2, 3), f(2, 1)), model=JOINED, torch=lambda *x: torch.cat(x, 1)
    ),
    OpCase(
        "ConcatFromSequence",
        (f(2, 3), f(2, 3), ints(-2)),
        model=STACKED,
        torch=lambda a, b, i: (torch.stack([a, a], 1), b),
        id="stack-of-the-rest",
    ),
    OpCase("SequenceAt", (f(2, 3), f(3)), model=AT, torch=lambda a, b: a * b),
    OpCase(
        "SequenceAt",
        (f(2, 3), f(2, 3), ints(-1)),
        model=CHOSEN,
        torch=lambda a, b, i: a,
        id="runtime-equal-shapes",
    ),
    OpCase(
        "SequenceAt",
        (f(3), f(4), ints(-1)),
        model=AT_RUNTIME,
        torch=lambda a, b, i: b * b,
        forward="torch",
        id="runtime-other-shapes",
    ),
    OpCase(
        "SequenceConstruct",
        (f(3), f(2)),
        model=INSERTED,
        torch=lambda a, b: 2 * torch.cat([b, a]),
    ),
    OpCase(
        "SequenceConstruct",
        (f(3), f(2), ints(-1), ints(1)),
        model=INSERTED_RUNTIME,
        torch=lambda a, b, i, j: (torch.cat([a, b, a]), b),
        forward="torch",
        id="runtime",
    ),
    OpCase(
        "SequenceInsert", (f(3), f(2)), model=INSERTED, torch=lambda a, b: 2 * torch.cat([b, a])
    ),
    OpCase(
        "SequenceInsert",
        (f(3), f(2), ints(-1), ints(-3)),
        model=INSERTED_RUNTIME,
        torch=lambda a, b, i, j: (torch.cat([b, b, a]), b),
        forward="torch",
        id="runtime",
    ),
    OpCase("SequenceErase", (f(3), f(2)), model=INSERTED, torch=lambda a, b: 2 * torch.cat([b, a])),
    OpCase(
        "SequenceErase",
        (f(3), f(2), ints(0), ints(2)),
        model=INSERTED_RUNTIME,
        torch=lambda a, b, i, j: (torch.cat([b, a, a]), b),
        forward="torch",
        id="runtime",
    ),
    OpCase("SplitToSequence", (f(5, 2),), model=SPLIT, torch=lambda x: x[2:4] + x[4:]),
    OpCase(
        "SplitToSequence",
        (f(2, 5),),
        model=SPLIT_SIZES,
        torch=lambda x: x.split([3, 2], 1),
        id="sizes",
    ),
    OpCase(
        "SplitToSequence",
        (f(3, 2), ints(-2)),
        model=SPLIT_SINGLE,
        torch=lambda x, i: (x[1], x[1:2], x.T),
        id="single-slices",
    ),
    OpCase(
        "SplitToSequence",
        (f(5, 2), ints(-1), ints(2)),
        model=SPLIT_RUNTIME,
        torch=lambda x, i, n: (x[4:], x),
        forward="torch",
        id="runtime-size",
    ),
    OpCase(
        "SequenceMap",
        (f(3), f(2), f(1)),
        model=MAPPED,
        torch=lambda a, b, c: torch.cat([a, b]) ** 2 * c,
        forward="torch",
    ),
    OpCase(
        "SequenceMap",
        (f(3), f(2), f(1), f(1), ints(1)),
        model=MAPPED_RUNTIME,
        torch=lambda a, b, c, d, i: (torch.cat([a, a]) * c) ** 2 * d,
        forward="torch",
        id="runtime",
    ),
    OpCase("Optional", (f(2, 3),), model=OPTIONAL, torch=lambda x: (x * x, x), forward="torch"),
    OpCase(
        "Optional",
        (f(2), f(2), ints(1)),
        model=OPTIONAL_SEQUENCE,
        torch=lambda a, b, i: b,
        forward="torch",
        id="sequence",
    ),
    OpCase(
        "OptionalGetElement",
        (f(2, 3),),
        model=OPTIONAL,
        torch=lambda x: (x * x, x),
        forward="torch",
    ),
    OpCase(
        "OptionalGetElement",
        (f(2), f(2), ints(0)),
        model=OPTIONAL_SEQUENCE,
        torch=lambda a, b, i: a,
        forward="torch",
        id="sequence",
    ),
]
