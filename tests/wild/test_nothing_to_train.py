"""Models without trainable parameters raise an error that says what to do instead."""

from __future__ import annotations

import ast
from typing import Any

import numpy as np
import pytest

import onnxtrain
from onnxtrain import Trainer, build
from onnxtrain.errors import PrepareError
from tests.wild.graphs import RNG, falls, model, node, random

X = {"x": ["batch", 8]}
Y = {"y": ["batch", 8]}


def test_integer_weights_are_told_and_the_hint_trains():
    nodes = [
        node("DequantizeLinear", "q s z", "w"),
        node("MatMul", "x w", "h"),
        node("QuantizeLinear", "h s z", "r"),
        node("DequantizeLinear", "r s z", "y"),
    ]
    numbers = RNG.integers(-90, 90, (8, 8)).astype(np.int8)
    weights = {"q": numbers, "s": np.float32(0.01), "z": np.int8(0)}
    proto = model(nodes, X, Y, weights, opset=21)
    with pytest.raises(PrepareError) as refusal:
        build(proto, loss="mse", optimizer="sgd")
    text = str(refusal.value)
    assert "stored as integers: 1: q" in text
    assert "onnxtrain.lora" in text
    assert "straight_through=True" in text
    adapted = onnxtrain.lora(proto, targets=["*"], rank=2)
    options: dict[str, Any] = {"optimizer": "adamw:lr=1e-2", "straight_through": True}
    trainer = Trainer(build(adapted, loss="mse", **options))
    x = 0.1 * random(16, 8)
    goal = trainer.predict(x=x)["y"] + np.float32(0.1) * x
    curve = [float(trainer.step(x=x, target=goal).loss) for _ in range(20)]
    assert falls(curve)


def test_a_model_without_tensors_is_not_told_to_name_some():
    proto = model([node("Relu", "x", "y")], X, Y)
    with pytest.raises(PrepareError, match="no float tensor") as refusal:
        build(proto, loss="mse", optimizer="sgd")
    assert "`train`" not in str(refusal.value)


def test_the_tensors_of_the_hint_train_when_they_are_named() -> None:
    nodes = [node("Sub", "x offset", "h"), node("Div", "h scale", "y")]
    weights = {"scale": random(8), "offset": random(8), "unused": random(8)}
    proto = model(nodes, X, Y, weights)
    with pytest.raises(PrepareError) as refusal:
        build(proto, loss="mse", optimizer="sgd")
    _, _, names = str(refusal.value).partition("train=")
    artifacts = build(proto, loss="mse", optimizer="sgd", train=ast.literal_eval(names))
    assert {p.name for p in artifacts.manifest.parameters} == {"scale", "offset"}


def test_integer_arithmetic_is_not_sent_to_adapters() -> None:
    """No adapter fits beside QLinearMatMul: the advice is another than for DequantizeLinear."""
    weights = {
        "s": np.float32(0.1),
        "z": np.uint8(3),
        "t": np.int8(0),
        "w": np.arange(-6, 6, dtype=np.int8).reshape(4, 3),
    }
    first, last = node("QuantizeLinear", "x s z", "q"), node("DequantizeLinear", "p s z", "y")
    product = node("QLinearMatMul", "q s z w s t s z", "p")
    computed = model([first, product, last], {"x": (2, 4)}, {"y": (2, 3)}, weights)
    with pytest.raises(PrepareError, match="stored as integers: 1: w") as refusal:
        build(computed, loss="mse", optimizer="sgd")
    assert "QDQ format" in str(refusal.value)
    floats = [node("DequantizeLinear", "w s t", "v"), node("MatMul", "x v", "y")]
    stored = model(floats, {"x": (2, 4)}, {"y": (2, 3)}, weights)
    with pytest.raises(PrepareError, match=r"onnxtrain\.lora\(\.\.\.\) adds float adapters"):
        build(stored, loss="mse", optimizer="sgd")
    onnxtrain.lora(stored, targets="all-linear", rank=1)
    with pytest.raises(PrepareError, match="no layer"):
        onnxtrain.lora(computed, targets="all-linear", rank=1)
