"""Number of nodes in the gradient of a decoder of fused operators."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

import onnxtrain
from onnxtrain.autodiff.gradients import load_normalized
from onnxtrain.graph.simplify import simplify
from onnxtrain.text.model_folder import without_cache

WIDTH, HEADS, GROUPS, SIZE, HIDDEN, WORDS, POSITIONS = 64, 4, 2, 16, 48, 64, 16
IMPORTS = {"": 23, "com.microsoft": 1}
FLOAT, INT64, INT32 = ir.DataType.FLOAT, ir.DataType.INT64, int(ir.DataType.INT32)
LAST = np.array([1], np.int64)
MAX_RATIO, MAX_RATIO_PER_LAYER = 6.4, 5.9
"""Nodes of the gradient graph, forward and backward, per node of the file."""
MAX_RATIO_TRAINED = 5.5
"""The same for the training graph, which has no cache; also for each further layer."""
MAX_ADDED = 2.8
"""Nodes that differentiation adds, per node of the file."""


class Decoder:
    """A decoder as language-model exporters write it, with a KV cache and packed projections."""

    def __init__(self, layers: int) -> None:
        self.rng = np.random.default_rng(5)
        self.graph = ir.Graph([], [], nodes=[], opset_imports=IMPORTS, name="decoder")
        self.ids, self.mask = (
            self.input("input_ids", INT64, "B", "S"),
            self.input("attention_mask", INT64, "B", "T"),
        )
        x = self.node("Gather", self.weight("embed", WORDS, WIDTH), self.ids)
        one = self.constant("one", np.array(1, np.int64))
        token_count = self.node("ReduceSum", self.mask, self.constant("last", LAST), keepdims=0)
        self.lengths = self.node("Cast", self.node("Sub", token_count, one), to=INT32)
        size = self.node("Gather", self.node("Shape", self.mask), one)
        self.total = self.node("Cast", size, to=INT32)
        angles = np.outer(np.arange(POSITIONS), 0.5 ** np.arange(SIZE // 2))
        self.tables = [
            self.constant(n, f(angles).astype(np.float32))
            for n, f in (("cos_cache", np.cos), ("sin_cache", np.sin))
        ]
        normal = self.node("RMSNormalization", x, self.weight("norm", WIDTH), axis=-1)
        for i in range(layers):
            x, normal = self.layer(i, x, normal)
        logits = self.node("MatMul", normal, self.transposed("head", WORDS, WIDTH))
        self.output("logits", logits, "B", "S", WORDS)
        self.model = ir.to_proto(ir.Model(self.graph, ir_version=11))

    def layer(self, i: int, x: ir.Value, normal: ir.Value) -> tuple[ir.Value, ir.Value]:
        weights = [
            self.weight(f"{i}.{n}", h * SIZE, WIDTH)
            for n, h in (("q", HEADS), ("k", GROUPS), ("v", GROUPS))
        ]
        qkv = self.node("Transpose", self.node("Concat", *weights, axis=0), perm=[1, 0])
        past = [self.input(f"past_{n}{i}", FLOAT, "B", GROUPS, "P", SIZE) for n in "kv"]
        packed = self.node("MatMul", normal, qkv)
        inputs = [packed, None, None, *past, self.lengths, self.total, *self.tables]
        y, *present = self.fused(
            "GroupQueryAttention", inputs, 3, num_heads=HEADS, kv_num_heads=GROUPS, do_rotary=1
        )
        for n, value in zip("kv", present, strict=True):
            self.output(f"present.{i}.{n}", value, "B", GROUPS, "T", SIZE)
        y = self.node("MatMul", y, self.transposed(f"{i}.o", WIDTH, HEADS * SIZE))
        x, normal = self.skip(f"{i}.post", x, y)
        gate = self.node("MatMul", normal, self.transposed(f"{i}.gate", HIDDEN, WIDTH))
        up = self.node("MatMul", normal, self.transposed(f"{i}.up", HIDDEN, WIDTH))
        hidden = self.node("Mul", self.node("Mul", gate, self.node("Sigmoid", gate)), up)
        down = self.node("MatMul", hidden, self.transposed(f"{i}.down", WIDTH, HIDDEN))
        return self.skip(f"{i}.next", x, down)

    def skip(self, name: str, x: ir.Value, y: ir.Value) -> tuple[ir.Value, ir.Value]:
        inputs = [x, y, self.weight(f"{name}.norm", WIDTH)]
        normal, mean, inverse, total = self.fused(
            "SkipSimplifiedLayerNormalization", inputs, 4, epsilon=1e-6
        )
        mean.name = inverse.name = ""
        return total, normal

    def transposed(self, name: str, *shape: int) -> ir.Value:
        return self.node("Transpose", self.weight(name, *shape), perm=[1, 0])

    def weight(self, name: str, *shape: int) -> ir.Value:
        array = self.rng.standard_normal(shape, np.float32) / np.float32(np.sqrt(shape[-1]))
        return self.constant(f"{name}.weight", array)

    def constant(self, name: str, array: np.ndarray) -> ir.Value:
        value = ir.Value(name=name, const_value=ir.tensor(array, name=name))
        self.graph.register_initializer(value)
        return value

    def node(self, kind: str, *inputs: ir.Value, **attributes: object) -> ir.Value:
        (y,) = self.fused(kind, list(inputs), 1, domain="", **attributes)
        return y

    def fused(
        self, kind: str, inputs: list, number: int, domain: str = "com.microsoft", **attributes
    ) -> list[ir.Value]:
        node = ir.node(kind, inputs, attributes, domain=domain, num_outputs=number)
        for i, y in enumerate(node.outputs):
            y.name = f"{kind}{len(self.graph)}_{i}"
        self.graph.append(node)
        return list(node.outputs)

    def input(self, name: str, kind: ir.DataType, *dims: int | str) -> ir.Value:
        value = ir.Value(name=name, type=ir.TensorType(kind), shape=ir.Shape(dims))
        self.graph.inputs.append(value)
        return value

    def output(self, name: str, value: ir.Value, *dims: int | str) -> None:
        value.name, value.type, value.shape = name, ir.TensorType(FLOAT), ir.Shape(dims)
        self.graph.outputs.append(value)


@pytest.fixture(scope="module")
def sizes() -> dict[int, tuple[int, int, int]]:
    """Return node counts (file, standard operators, gradient graph) by number of layers."""
    counts = {}
    for layers in (1, 2):
        model = Decoder(layers).model
        plain = simplify(load_normalized(model).model)
        vjp = onnxtrain.vjp(model, outputs="logits")
        counts[layers] = (len(model.graph.node), len(plain.graph), len(vjp.graph.node))
    return counts


@pytest.fixture(scope="module")
def trained() -> dict[int, tuple[int, int]]:
    """Return node counts (file, gradient graph without a cache) by number of layers."""
    counts = {}
    for layers in (1, 2):
        model = Decoder(layers).model
        vjp = onnxtrain.vjp(without_cache(model), outputs="logits")
        counts[layers] = (len(model.graph.node), len(vjp.graph.node))
    return counts


def test_node_count_of_the_gradient_without_a_cache(trained) -> None:
    for file, vjp in trained.values():
        assert vjp <= MAX_RATIO_TRAINED * file, trained
    file, vjp = (b - a for a, b in zip(trained[1], trained[2], strict=True))
    assert vjp <= MAX_RATIO_TRAINED * file, trained


def test_node_count_of_the_gradient(sizes) -> None:
    file, plain, vjp = sizes[2]
    assert vjp <= MAX_RATIO * file, sizes
    assert vjp - plain <= MAX_ADDED * file, sizes


def test_node_count_of_a_further_layer(sizes) -> None:
    file, plain, vjp = (b - a for a, b in zip(sizes[1], sizes[2], strict=True))
    assert vjp <= MAX_RATIO_PER_LAYER * file, (file, plain, vjp)
    assert vjp - plain <= MAX_ADDED * file, (file, plain, vjp)


def random_inputs() -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return feeds with an empty cache, and a gradient of the logits."""
    rng = np.random.default_rng(0)
    feeds: dict[str, np.ndarray] = {
        "input_ids": rng.integers(0, WORDS, (2, 5)),
        "attention_mask": np.array([[1] * 5, [1, 1, 1, 0, 0]]),
    }
    for i in range(2):
        for n in "kv":
            feeds[f"past_{n}{i}"] = np.zeros((2, GROUPS, 0, SIZE), np.float32)
    dy = rng.standard_normal((2, 5, WORDS)).astype(np.float32)
    dy[1, 3:] = 0  # padding tokens have no loss
    return feeds, dy


def weights_of(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {t.name: ir.serde.deserialize_tensor(t).numpy() for t in model.graph.initializer}


def gradients_of(vjp: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    session: Any = onnxruntime.InferenceSession(vjp.SerializeToString())
    outputs = [y.name for y in session.get_outputs()]
    names = {x.name for x in session.get_inputs()}
    results = session.run(outputs, {n: x for n, x in feeds.items() if n in names})
    return {n: g for n, g in zip(outputs, results, strict=True) if n.endswith("_grad")}


def test_gradient_without_a_cache_is_the_same() -> None:
    model = Decoder(2).model
    feeds, dy = random_inputs()
    feeds = {**feeds, **weights_of(model), "logits_grad": dy}
    expected = gradients_of(onnxtrain.vjp(model, outputs="logits"), feeds)
    actual = gradients_of(onnxtrain.vjp(without_cache(model), outputs="logits"), feeds)
    assert actual.keys() == expected.keys()
    for n, g in actual.items():
        atol = 1e-5 * np.abs(expected[n]).max()
        np.testing.assert_allclose(g, expected[n], rtol=1e-4, atol=atol)


def test_gradient_equals_finite_differences() -> None:
    model = Decoder(2).model
    vjp = onnxtrain.vjp(model, outputs="logits")
    assert {n.domain for n in vjp.graph.node} <= {"", "ai.onnx"}
    feeds, dy = random_inputs()
    initializers = weights_of(model)
    weights = {x.name: initializers[x.name] for x in vjp.graph.input if x.name in initializers}
    gradients = gradients_of(vjp, {**feeds, **weights, "logits_grad": dy})
    assert len(gradients) == len(weights) == 1 + 1 + 1 + 2 * (3 + 1 + 3 + 2)

    with_inputs = onnx.ModelProto()
    with_inputs.CopyFrom(model)
    with_inputs.graph.input.extend(x for x in vjp.graph.input if x.name in weights)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    original: Any = onnxruntime.InferenceSession(with_inputs.SerializeToString(), options)

    def loss(changed: dict[str, np.ndarray]) -> float:
        return float((original.run(["logits"], {**feeds, **changed})[0].astype(float) * dy).sum())

    errors = collections.defaultdict(list)
    for n, w in weights.items():
        g = gradients[f"{n}_grad"].astype(float)
        direction = (g / np.abs(g).max() * np.abs(w).max()).astype(np.float32)
        for h in (1e-2, 1e-3):
            up, down = w + np.float32(h) * direction, w - np.float32(h) * direction
            difference = loss({n: up}) - loss({n: down})
            expected = float((g * (up.astype(float) - down)).sum())
            errors[n].append(abs(difference - expected) / abs(expected))
    assert max(min(e) for e in errors.values()) < 2e-3, dict(errors)
