"""Peephole rewrites reduce the number of nodes and keep the results."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import parser

from onnxtrain.graph.simplify import simplify

HEAD = '<ir_version: 10, opset_import: ["": 21]>\n'


def both(text: str, *shapes: tuple[int, ...]) -> tuple[list[str], list[np.ndarray]]:
    """Return the operators after the rewrite; check that both graphs give the same results."""
    model = parser.parse_model(HEAD + text)
    model = onnx.shape_inference.infer_shapes(model)
    random = np.random.default_rng(0)
    feeds = {
        x.name: random.standard_normal(shape).astype(np.float32)
        for x, shape in zip(model.graph.input, shapes, strict=True)
    }
    simplified = ir.to_proto(simplify(ir.from_proto(model)))
    results = []
    for proto in (model, simplified):
        session = onnxruntime.InferenceSession(
            proto.SerializeToString(), providers=["CPUExecutionProvider"]
        )
        results.append(session.run(None, feeds)[0])
    np.testing.assert_allclose(results[0], results[1], rtol=1e-5, atol=1e-6)
    return [n.op_type for n in simplified.graph.node], results


@pytest.mark.parametrize("flags", ["transA=1", "transB=1", "transA=1, transB=1", "alpha=0.5"])
def test_transposed_gemm_merges(flags: str) -> None:
    a, b = ((4, 3) if "transA" in flags else (3, 4)), ((5, 4) if "transB" in flags else (4, 5))
    text = f"""g (float[{a[0]},{a[1]}] a, float[{b[0]},{b[1]}] b) => (float[5,3] y) {{
        p = Gemm<{flags}>(a, b)
        y = Transpose<perm=[1,0]>(p)
    }}"""
    assert both(text, a, b)[0] == ["Gemm"]


def test_gemm_with_bias_or_another_reader_stays() -> None:
    biased = """g (float[3,4] a, float[4,5] b, float[5] c) => (float[5,3] y) {
        p = Gemm(a, b, c)
        y = Transpose<perm=[1,0]>(p)
    }"""
    assert both(biased, (3, 4), (4, 5), (5,))[0] == ["Gemm", "Transpose"]
    shared = """g (float[3,4] a, float[4,3] b) => (float[3,3] y) {
        p = Gemm(a, b)
        t = Transpose<perm=[1,0]>(p)
        y = Add(p, t)
    }"""
    assert both(shared, (3, 4), (4, 3))[0] == ["Gemm", "Transpose", "Add"]


def test_gemm_cast_and_transposed_merges() -> None:
    text = """g (float[4,3] a, float[4,5] b) => (double[5,3] y) {
        p = Gemm<transA=1>(a, b)
        w = Cast<to=11>(p)
        y = Transpose<perm=[1,0]>(w)
    }"""
    assert both(text, (4, 3), (4, 5))[0] == ["Gemm", "Cast"]
    shared = """g (float[4,3] a, float[4,3] b) => (double[3,3] y) {
        p = Gemm<transA=1>(a, b)
        w = Cast<to=11>(p)
        t = Transpose<perm=[1,0]>(w)
        y = Add(w, t)
    }"""
    assert both(shared, (4, 3), (4, 3))[0] == ["Gemm", "Cast", "Transpose", "Add"]


def test_transpose_between_reshapes_is_unfolded() -> None:
    text = """g (float[2,6,3,4] x) => (float[2,6,4,3] y)
        <int64[3] joined = {12,3,4}, int64[4] split = {2,6,4,3}> {
        a = Reshape(x, joined)
        b = Transpose<perm=[0,2,1]>(a)
        y = Reshape(b, split)
    }"""
    assert both(text, (2, 6, 3, 4))[0] == ["Transpose"]


def test_transpose_between_other_reshapes_stays() -> None:
    text = """g (float[2,6,3,4] x) => (float[3,4,4,3] y)
        <int64[3] joined = {12,3,4}, int64[4] split = {3,4,4,3}> {
        a = Reshape(x, joined)
        b = Transpose<perm=[0,2,1]>(a)
        y = Reshape(b, split)
    }"""
    assert both(text, (2, 6, 3, 4))[0] == ["Reshape", "Transpose", "Reshape"]


@pytest.mark.parametrize(("bias", "left"), [(0, ["Conv"]), (1, ["Expand", "Conv"])])
def test_zero_bias_is_dropped(bias: int, left: list[str]) -> None:
    text = f"""g (float[1,2,5,5] x, float[3,2,3,3] w) => (float[1,3,3,3] y)
        <float[1] zero = {{{bias}}}, int64[1] sizes = {{3}}> {{
        b = Expand(zero, sizes)
        y = Conv(x, w, b)
    }}"""
    assert both(text, (1, 2, 5, 5), (3, 2, 3, 3))[0] == left


def test_transposed_batched_matmul_merges() -> None:
    text = """g (float[2,5,3] a, float[2,5,4] b) => (float[2,4,3] y) {
        t = Transpose<perm=[0,2,1]>(a)
        p = MatMul(t, b)
        y = Transpose<perm=[0,2,1]>(p)
    }"""
    assert both(text, (2, 5, 3), (2, 5, 4))[0] == ["Transpose", "MatMul"]


def test_batched_matmul_with_another_reader_stays() -> None:
    text = """g (float[2,4,4] a, float[2,4,4] b) => (float[2,4,4] y) {
        t = Transpose<perm=[0,2,1]>(a)
        p = MatMul(t, b)
        q = Transpose<perm=[0,2,1]>(p)
        y = Add(p, q)
    }"""
    assert both(text, (2, 4, 4), (2, 4, 4))[0] == ["Transpose", "MatMul", "Transpose", "Add"]


def test_unsqueezed_leading_axes_are_dropped() -> None:
    text = """g (float[3] x, float[2,3] z) => (float[2,3] y) <int64[1] first = {0}> {
        u = Unsqueeze(x, first)
        y = Mul(u, z)
    }"""
    assert both(text, (3,), (2, 3))[0] == ["Mul"]


@pytest.mark.parametrize("axis", [0, 1])
def test_axes_that_change_the_result_stay(axis: int) -> None:
    width = "3,3" if axis else "1,3"
    text = f"""g (float[3] x, float[3] z) => (float[{width}] y) <int64[1] a = {{{axis}}}> {{
        u = Unsqueeze(x, a)
        y = Mul(u, z)
    }}"""
    assert both(text, (3,), (3,))[0] == ["Unsqueeze", "Mul"]


@pytest.mark.parametrize(
    ("amounts", "left"),
    [("0,0,0,0", ["Neg"]), ("0,1,0,-1", ["Pad", "Neg"]), ("0,1,0,0", ["Pad", "Neg"])],
)
def test_noop_pad_is_removed(amounts: str, left: list[str]) -> None:
    width = 5 if amounts == "0,1,0,0" else 4
    text = f"""g (float[3,4] x) => (float[3,{width}] y) <int64[4] amounts = {{{amounts}}}> {{
        p = Pad(x, amounts)
        y = Neg(p)
    }}"""
    assert both(text, (3, 4))[0] == left


@pytest.mark.parametrize(
    ("numbers", "left"),
    [
        (("0", "9223372036854775807", "1"), ["Neg"]),
        (("-4", "4", "1"), ["Neg"]),
        (("-1", "-9223372036854775807", "-1"), ["Slice", "Neg"]),  # the axis turned round
        (("1", "4", "1"), ["Slice", "Neg"]),
    ],
)
def test_noop_slice_is_removed(numbers: tuple[str, str, str], left: list[str]) -> None:
    start, end, step = numbers
    width = 3 if start == "1" else 4
    text = f"""g (float[3,4] x) => (float[3,{width}] y)
    <int64[1] s = {{{start}}}, int64[1] e = {{{end}}}, int64[1] a = {{1}},
     int64[1] t = {{{step}}}> {{
        p = Slice(x, s, e, a, t)
        y = Neg(p)
    }}"""
    assert both(text, (3, 4))[0] == left


@pytest.mark.parametrize("half", [10, 16], ids=["float16", "bfloat16"])
def test_cast_round_trip_is_removed(half: int) -> None:
    text = f"""g (float[3,4] x) => (float[3,4] y) {{
        a = Cast<to = {half}>(x) b = Cast<to = 1>(a) c = Cast<to = {half}>(b) y = Cast<to = 1>(c)
    }}"""
    operators, results = both(text, (3, 4))
    assert operators == ["Cast", "Cast"], "the rounding itself stays"
    np.testing.assert_array_equal(*results)


def test_integer_cast_round_trip_stays() -> None:
    text = """g (float[3,4] x) => (float[3,4] y) {
        a = Cast<to = 7>(x) b = Cast<to = 1>(a) c = Cast<to = 7>(b) y = Cast<to = 1>(c)
    }"""
    assert both(text, (3, 4))[0].count("Cast") == 4
