"""Parameter detection follows long and cyclic paths of values."""

from __future__ import annotations

import sys

import onnx

from onnxtrain.graph.io import load
from onnxtrain.importer.parameters import classify_parameters
from tests.wild.graphs import model, node, random


def _of(proto: onnx.ModelProto) -> dict[str, bool]:
    return {name: role.trains for name, role in classify_parameters(load(proto)).items()}


def test_path_longer_than_the_stack():
    count = 2 * sys.getrecursionlimit()
    chain = [node("Identity", f"w{i}", f"w{i + 1}") for i in range(count)]
    proto = model(
        [*chain, node("MatMul", f"x w{count}", "y")],
        {"x": ["batch", 8]},
        {"y": ["batch", 8]},
        {"w0": random(8, 8)},
    )
    assert _of(proto) == {"w0": True}


def test_kernel_that_is_its_own_bias():
    proto = model(
        [node("Gemm", "x w w", "y")],
        {"x": [8, 8]},
        {"y": [8, 8]},
        {"w": random(8, 8)},
    )
    assert _of(proto) == {"w": True}


def test_two_kernels_that_are_each_other_s_biases():
    proto = model(
        [node("Gemm", "x a b", "h"), node("Gemm", "h b a", "y")],
        {"x": [8, 8]},
        {"y": [8, 8]},
        {"a": random(8, 8), "b": random(8, 8)},
    )
    assert _of(proto) == {"a": True, "b": True}
