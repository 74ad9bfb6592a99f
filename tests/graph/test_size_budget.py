"""Symbolic sizes of many terms, and splits into many parts, are fast."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest

import onnxtrain
from onnxtrain.errors import PrepareError
from onnxtrain.graph.shapes import dims as D
from tests.soon import is_soon

HEAD = '<ir_version: 8, opset_import: ["": 17]> g'
ENTRY_POINTS: dict[str, Callable[[onnx.ModelProto], object]] = {
    "explain": onnxtrain.explain,
    "vjp": lambda m: onnxtrain.vjp(m, ["x"]),
    "lower": lambda m: onnxtrain.lower(m, opset=13),
}


def named(size: str) -> onnx.ModelProto:
    model = onnx.parser.parse_model(f"{HEAD}(float[n, 4] x) => (float[n, 4] y) {{ y = Relu(x) }}")
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = size
    return model


def pieces(count: int) -> onnx.ModelProto:
    return onnx.parser.parse_model(
        f"{HEAD}(float[{count}, 1] x) => (float[a, b] y) "
        "{ s = SplitToSequence(x) y = ConcatFromSequence<axis = 0>(s) }"
    )


@pytest.mark.parametrize("entry_point", ENTRY_POINTS)
@pytest.mark.parametrize("factors", [16, 40])
def test_a_product_of_sums_as_a_name(factors: int, entry_point: str):
    model = named("*".join(f"(a{i}+b{i})" for i in range(factors)))
    assert is_soon(lambda: ENTRY_POINTS[entry_point](model))


@pytest.mark.parametrize("entry_point", ENTRY_POINTS)
@pytest.mark.parametrize("count", [1500, 100_000])
def test_many_parts(count: int, entry_point: str):
    model = pieces(count)
    assert is_soon(lambda: ENTRY_POINTS[entry_point](model))


def test_many_parts_give_the_same_result():
    x = np.arange(1500, dtype=np.float32).reshape(1500, 1)
    lowered = onnxtrain.lower(pieces(1500), opset=13)
    session = onnxruntime.InferenceSession(lowered.SerializeToString())
    np.testing.assert_array_equal(session.run(None, {"x": x})[0], x)


def test_parts_without_a_size():
    model = onnx.parser.parse_model(
        f"{HEAD}(float[6, 1] x) => (float[a, b] y) <int64 k = {{0}}> "
        "{ s = SplitToSequence(x, k) y = ConcatFromSequence<axis = 0>(s) }"
    )
    with pytest.raises(PrepareError):
        onnxtrain.explain(model)


def test_sizes_over_the_budget_are_unknown():
    def grow() -> None:
        square: D.Dim = "n"
        half: D.Dim = "n"
        number: D.Dim = 3
        for _ in range(60):
            square = D.mul(square, square)
            half = D.floordiv(D.add(D.mul(half, half), 1), 2)
            number = D.mul(number, number)
        assert square is None
        assert half is None
        assert number is None

    assert is_soon(grow)


def test_ordinary_sizes_are_unchanged():
    assert D.mul(D.add("a", "b"), D.add("a", "c")) == "a*a + a*b + a*c + b*c"
    assert D.product(["a"] * 20) == "*".join(["a"] * 20)
    assert D.dim("(a + 1)*(a + 1)") == "2*a + a*a + 1"


@pytest.mark.parametrize("name", ["True", "None", "if"])
def test_python_keywords_as_names(name: str):
    double = D.mul(D.dim(name), 2)
    assert D.floordiv(double, 2) == D.dim(name) == D.symbol(name)
    assert D.substitute(double, {D.symbol(name): 3}) == 6
