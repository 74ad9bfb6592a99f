"""Sequences of known structure become tensors, with the same values and the right gradients."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import onnxtrain
from onnxtrain.errors import UndifferentiableError
from tests.cases.checks import nodes_of
from tests.cases.evaluate import stock

HEADER = '<ir_version: 10, opset_import: ["" : 21]>\n'
CHUNKS = """
g (float[N, 2] x, int64 i) => (float[K, 2] y, float[L, 2] z, int64 n)
<int64 two = {2}, int64 one = {1}> {
    s = SplitToSequence<axis = 0>(x, two)
    y = SequenceAt(s, i)
    z = SequenceAt(s, one)
    n = SequenceLength(s)
}
"""
APPENDING = """
g (float[4, 3] x, float[3] w) => (float[M, 3] y, float[12] z, float[3] last, int64 n)
<int64 steps = {4}, bool go = {1}, int64 end = {-1}> {
    none = SequenceEmpty<dtype = 1>()
    total, s, t = Loop <body = step (int64 i, bool c, float[3] sum, seq(float[3]) before,
                                     seq(float[3]) other)
        => (bool d, float[3] next, seq(float[3]) after, seq(float[3]) more) {
        row = Gather(x, i)
        part = Mul(row, w)
        next = Add(sum, part)
        after = SequenceInsert(before, part)
        more = SequenceInsert(other, next)
        d = Identity(c)
    }> (steps, go, w, none, none)
    y = ConcatFromSequence<axis = 0, new_axis = 1>(s)
    z = ConcatFromSequence<axis = 0>(t)
    last = SequenceAt(s, end)
    n = SequenceLength(t)
}
"""
GROWING = """
g (float[4, 3] x) => (float[M] y) <int64 steps = {4}, bool go = {1}> {
    none = SequenceEmpty<dtype = 1>()
    s = Loop <body = step (int64 i, bool c, seq(float[K]) before)
        => (bool d, seq(float[K]) after) {
        row = Gather(x, i)
        zero = Constant<value_ints = [0]>()
        axes = Constant<value_ints = [0]>()
        end = Unsqueeze(i, axes)
        part = Slice(row, zero, end)
        after = SequenceInsert(before, part)
        d = Identity(c)
    }> (steps, go, none)
    y = ConcatFromSequence<axis = 0>(s)
}
"""
READ_IN_LOOP = """
g (float[3] a, float[2] b, float[1] c) => (float y)
<int64 steps = {3}, bool go = {1}, float zero = {0}> {
    s = SequenceConstruct(a, b, c)
    y = Loop <body = step (int64 i, bool c, float before) => (bool d, float after) {
        item = SequenceAt(s, i)
        squared = Mul(item, item)
        part = ReduceSum<keepdims = 0>(squared)
        after = Add(before, part)
        d = Identity(c)
    }> (steps, go, zero)
}
"""
CHOSEN = """
g (float[3] a, float[2] b, bool swap) => (float[N] y) <int64 first = {0}> {
    s = If <
        then_branch = one () => (seq(float[N]) p) { p = SequenceConstruct(b, a) },
        else_branch = two () => (seq(float[N]) q) { q = SequenceConstruct(a, b) }
    > (swap)
    t = SequenceAt(s, first)
    y = Mul(t, t)
}
"""


def built(text: str, **options) -> onnx.ModelProto:
    return onnxtrain.vjp(onnx.parser.parse_model(HEADER + text), **options)


def kinds(model: onnx.ModelProto) -> set[str]:
    return {n.op_type for n in nodes_of(model.graph)}


def has_sequences(model: onnx.ModelProto) -> bool:
    return any("Sequence" in op for op in kinds(model))


@pytest.mark.parametrize("position", [0, 2, -1, -3])
def test_chunks_of_unknown_number(position: int) -> None:
    model = built(CHUNKS, wrt="x", outputs=["y", "z"])
    assert not has_sequences(model)
    x = np.arange(10, dtype=np.float32).reshape(5, 2)
    parts = np.split(np.arange(5), [2, 4])
    rows, other = parts[position], parts[1]
    dy = np.ones((len(rows), 2), np.float32)
    y, z, n, dx = stock(model)([x, np.array(position), dy, 2 * np.ones((2, 2), np.float32)])
    np.testing.assert_array_equal(y, x[rows])
    np.testing.assert_array_equal(z, x[other])
    assert n == 3
    expected = np.zeros_like(x)
    expected[rows] += 1
    expected[other] += 2
    np.testing.assert_array_equal(dx, expected)


def test_loop_that_appends() -> None:
    model = built(APPENDING, wrt=["x", "w"], outputs=["y", "z", "last"])
    assert not has_sequences(model)
    rng = np.random.default_rng(0)
    x, w, dy, dz, dlast = (
        rng.standard_normal(s).astype(np.float32) for s in ((4, 3), (3,), (4, 3), (12,), (3,))
    )
    y, z, last, n, dx, dw = stock(model)([x, w, dy, dz, dlast])
    np.testing.assert_allclose(y, x * w, rtol=1e-5)
    np.testing.assert_allclose(z.reshape(4, 3), w + np.cumsum(x * w, axis=0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(last, x[-1] * w, rtol=1e-5)
    assert n == 4
    sums = dz.reshape(4, 3)
    part = dy + np.cumsum(sums[::-1], axis=0)[::-1]
    part[-1] += dlast
    np.testing.assert_allclose(dx, part * w, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(dw, (part * x).sum(0) + sums.sum(0), rtol=1e-4, atol=1e-5)


def test_loop_with_elements_of_different_shapes_raises() -> None:
    with pytest.raises(UndifferentiableError, match=r"Loop .* carries"):
        built(GROWING, wrt="x")


def test_no_sequences_remain() -> None:
    text = """
    g (float[2, 6] x) => (float[2, 2] y) <int64[3] sizes = {2, 2, 2}, int64 at = {1}> {
        s = SplitToSequence<axis = 1>(x, sizes)
        y = SequenceAt(s, at)
    }
    """
    assert kinds(built(text, wrt="x")) <= {"Split", "Concat", "ConstantOfShape", "Pad", "Slice"}


def test_sequence_output_stays() -> None:
    text = """
    g (float[2, 6] x) => (seq(float[2, 3]) s, float[2, 3] y) <int64 three = {3}, int64 at = {1}> {
        s = SplitToSequence<axis = 1>(x, three)
        p = SequenceAt(s, at)
        y = Mul(p, p)
    }
    """
    model = built(text, wrt="x", outputs="y")
    assert [v.name for v in model.graph.output] == ["s", "y", "x_grad"]
    assert "SplitToSequence" in kinds(model)


def test_loop_that_reads_a_sequence() -> None:
    values = [np.arange(1, n + 1, dtype=np.float32) for n in (3, 2, 1)]
    y, *grads = stock(built(READ_IN_LOOP, wrt=["a", "b", "c"]))([*values, np.array(3.0)])
    assert y == 14 + 5 + 1
    for x, dx in zip(values, grads, strict=True):
        np.testing.assert_allclose(dx, 6 * x)


@pytest.mark.parametrize("swap", [True, False])
def test_branches_that_return_a_sequence(swap: bool) -> None:
    a, b = np.arange(3, dtype=np.float32), np.arange(2, dtype=np.float32)
    x = b if swap else a
    _, da, db = stock(built(CHOSEN, wrt=["a", "b"]))([a, b, np.array(swap), np.ones(len(x))])
    np.testing.assert_allclose(da, 0 * a if swap else 2 * a)
    np.testing.assert_allclose(db, 2 * b if swap else 0 * b)
