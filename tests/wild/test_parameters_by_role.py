"""Parameter detection goes by a tensor's use, not by its type."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import onnxtrain
from onnxtrain import build
from onnxtrain.errors import OnnxTrainError, PrepareError
from tests.wild.graphs import BOOL, INT64, constant, falls, model, node, random, train, trained

X = {"x": ["batch", 8]}
Y = {"y": ["batch", 8]}


def layer_norm_by_hand() -> onnx.ModelProto:
    """Layer normalization and Gelu, every number an initializer, as optimizers leave them."""
    nodes = [
        node("MatMul", "x w", "h"),
        node("Add", "h b", "hb"),
        node("ReduceMean", "hb", "mean", axes=[-1]),
        node("Sub", "hb mean", "centered"),
        node("Pow", "centered two", "squares"),
        node("ReduceSum", "squares axes", "sum"),
        node("Mul", "sum one_nth", "variance"),
        node("Add", "variance eps", "safe"),
        node("Sqrt", "safe", "deviation"),
        node("Div", "centered deviation", "scaled"),
        node("Mul", "scaled gamma", "g"),
        node("Add", "g beta", "n"),
        node("Div", "n root_two", "inner"),
        node("Erf", "inner", "erf"),
        node("Add", "erf one", "shifted"),
        node("Mul", "n shifted", "product"),
        node("Mul", "product half", "y"),
    ]
    weights = {
        "w": random(8, 8),
        "b": random(8),
        "two": np.float32(2),
        "axes": np.array([-1]),
        "one_nth": np.float32(1 / 8),
        "eps": np.float32(1e-5),
        "gamma": np.ones(8, np.float32),
        "beta": np.zeros(8, np.float32),
        "root_two": np.float32(2**0.5),
        "one": np.float32(1),
        "half": np.array([0.5], np.float32),
    }
    return model(nodes, X, Y, weights)


def test_numbers_of_a_formula_stay_as_they_are_and_training_stays_finite():
    """A trained exponent is NaN after one step: its gradient is a logarithm of what is negative."""
    proto = layer_norm_by_hand()
    artifacts, curve, trainer = train(proto, {"x": random(4, 8)})
    assert trained(artifacts) == {"w", "b", "gamma", "beta"}
    assert falls(curve)
    assert all(np.isfinite(a).all() for a in trainer.parameters.values())


def test_explain_and_build_agree_and_say_why():
    proto = layer_norm_by_hand()
    report = onnxtrain.explain(proto)
    artifacts = build(proto, loss="mse", optimizer="sgd")
    assert report.differentiable
    assert set(report.parameters) == trained(artifacts)
    assert report.roles == {"w": "weight", "b": "bias", "gamma": "scale", "beta": "bias"}
    assert report.frozen["two"] == "an exponent"
    assert report.frozen["eps"] == "a single number in arithmetic"
    repairs = artifacts.manifest.options["repairs"]
    assert "not trained, an exponent: 1: two" in repairs
    assert any("a single number in arithmetic: 5: one_nth, eps" in line for line in repairs)
    assert "an exponent" in str(report)


def test_what_is_named_is_trained():
    artifacts = build(layer_norm_by_hand(), loss="mse", optimizer="sgd", train=["w", "half"])
    assert trained(artifacts) == {"w", "half"}
    everything = build(layer_norm_by_hand(), loss="mse", optimizer="sgd", train="*")
    assert trained(everything) == {"w", "b", "gamma", "beta"}, "a pattern matches weights"
    numbers = build(layer_norm_by_hand(), loss="mse", optimizer="sgd", train="hal*")
    assert trained(numbers) == {"half"}, "unless it matches no weight"


def test_a_constant_node_can_be_named():
    proto = model(
        [
            constant("factor", np.float32(2)),
            node("MatMul", "x w", "h"),
            node("Mul", "h factor", "y"),
        ],
        X,
        Y,
        {"w": random(8, 8)},
    )
    assert trained(build(proto, loss="mse", optimizer="sgd")) == {"w"}
    named = build(proto, loss="mse", optimizer="sgd", train=["w", "factor"])
    assert trained(named) == {"w", "factor"}


def upsampled(names: list[str]) -> onnx.ModelProto:
    nodes = [node("Conv", "x k", "h0", pads=[1, 1, 1, 1])]
    weights = {"k": random(2, 2, 3, 3)}
    for i, name in enumerate(names):
        nodes.append(node("Resize", f"h{i} roi {name}", f"h{i + 1}", mode="nearest"))
        weights[name] = np.array([1, 1, 2, 2], np.float32)
    nodes.append(node("Relu", f"h{len(names)}", "y"))
    weights["roi"] = np.zeros(0, np.float32)
    return model(nodes, {"x": ["n", 2, 4, 4]}, {"y": None}, weights)


def test_scales_and_regions_of_resize_are_no_parameters():
    proto = upsampled(["scales"])
    assert onnxtrain.explain(proto).differentiable
    artifacts, curve, _ = train(proto, {"x": random(2, 2, 4, 4)})
    assert trained(artifacts) == {"k"}
    assert falls(curve)


def test_all_offenders_are_named_at_once_in_words_of_the_call():
    proto = upsampled(["scales_1", "scales_2", "scales_3"])
    with pytest.raises(OnnxTrainError) as refusal:
        build(proto, loss="mse", optimizer="sgd", train=["k", "scales_1", "scales_2", "scales_3"])
    text = str(refusal.value)
    assert all(f"scales_{i}" in text.splitlines()[-1] for i in (1, 2, 3))
    assert "`freeze`" in text
    assert "wrt" not in text
    with pytest.raises(OnnxTrainError, match="out of `wrt`"):
        onnxtrain.vjp(proto, ["scales_1"])


def sinusoids(rows: int, columns: int) -> np.ndarray:
    angle = np.arange(rows)[:, None] / 100 ** (np.arange(columns // 2) / (columns // 2))
    return np.concatenate([np.sin(angle), np.cos(angle)], axis=1).astype(np.float32)


def windowed_fourier_basis(n: int) -> np.ndarray:
    angle = 2 * np.pi * np.outer(np.arange(n // 2 + 1), np.arange(n)) / n
    basis = np.concatenate([np.cos(angle), np.sin(angle)]) * np.hanning(n)
    return basis[:, None].astype(np.float32)


def triangles(bins: int, bands: int) -> np.ndarray:
    centres = np.linspace(0, bins, bands + 2)
    width = centres[1]
    at = np.arange(bins)[:, None]
    return np.maximum(0, 1 - np.abs(at - centres[None, 1:-1]) / width).astype(np.float32)


def mask(n: int) -> np.ndarray:
    return np.triu(np.full((n, n), -1e4, np.float32), 1)


_W = {"w": random(8, 8)}
CASES = {
    "kernel": ([node("Conv", "x t", "y")], {"x": ["n", 2, 5]}, random(3, 2, 3), "weight"),
    "bias of a product": (
        [node("MatMul", "x w", "h"), node("Add", "h t", "y")],
        X,
        random(8),
        "bias",
    ),
    "bias of one column": (
        [node("MatMul", "x w1", "h"), node("Add", "h t", "y")],
        X,
        random(1),
        "bias",
    ),
    "embedding": ([node("Gather", "t ids", "y")], {"ids": ["n"]}, random(9, 4), "embedding"),
    "slope": ([node("PRelu", "x t", "y")], X, random(1), "slope"),
    "normalization": ([node("LayerNormalization", "x t", "y")], X, random(8), "normalization"),
    "recurrent weight": (
        [node("LSTM", "x3 t r8", "y", hidden_size=2)],
        {"x3": ["t", "n", 4]},
        random(1, 8, 4),
        "recurrent weight",
    ),
    "learned positions": (
        [node("MatMul", "x w", "h"), node("Relu", "h", "r"), node("Add", "r t", "y")],
        {"x": ["n", 6, 8]},
        random(6, 8),
        "table",
    ),
    "class token": ([node("Concat", "t x", "y", axis=0)], X, random(1, 8), "token"),
    "followed through moves": (
        [
            node("Transpose", "t", "u", perm=[1, 0]),
            node("Cast", "u", "v", to=1),
            node("MatMul", "x v", "y"),
        ],
        X,
        random(8, 8),
        "weight",
    ),
    "norm of a weight": (
        [
            node("ReduceL2", "t", "norm", axes=[0]),
            node("Div", "t norm", "unit"),
            node("MatMul", "x unit", "y"),
        ],
        X,
        random(8, 8),
        "weight",
    ),
    "weights that start as zeros": ([node("MatMul", "x t", "y")], X, np.zeros((8, 8)), "weight"),
    "exponent": ([node("Pow", "x t", "y")], X, np.float32(2), None),
    "number": ([node("Mul", "x t", "y")], X, np.float32(0.5), None),
    "bound": ([node("Clip", "x t", "y")], X, np.float32(0), None),
    "filler": ([node("Where", "c t x", "y")], {**X, "c": [8]}, np.float32(-1e9), None),
    "rotary table": (
        [node("Gather", "t ids", "cos"), node("Mul", "x cos", "y")],
        {"x": ["n", 16], "ids": ["n"]},
        sinusoids(40, 16),
        None,
    ),
    "sinusoidal positions": (
        [node("MatMul", "x w16", "h"), node("Relu", "h", "r"), node("Add", "r t", "y")],
        {"x": ["n", 32, 8]},
        sinusoids(32, 16),
        None,
    ),
    "Fourier basis": (
        [node("Conv", "x t", "y")],
        {"x": ["n", 1, 99]},
        windowed_fourier_basis(64),
        None,
    ),
    "bias of a fixed filter": (
        [node("Conv", "x basis t", "y")],
        {"x": ["n", 1, 99]},
        random(66),
        None,
    ),
    "window": (
        [node("STFT", "x step t", "s"), node("ReduceSum", "s", "y")],
        {"x": ["n", 99]},
        np.hanning(16).astype(np.float32),
        None,
    ),
    "mel filters": ([node("MatMul", "x t", "y")], {"x": ["n", 80]}, triangles(80, 20), None),
    "attention mask": (
        [node("MatMul", "x w", "h"), node("Add", "h t", "s"), node("Softmax", "s", "y")],
        X,
        mask(8),
        None,
    ),
    "anchors": (
        [node("MatMul", "x w", "h"), node("Add", "h t", "y")],
        X,
        (np.arange(16).reshape(2, 8) + 0.5).astype(np.float32),
        None,
    ),
    "numbers of bins": (
        [node("Softmax", "x", "p"), node("MatMul", "p t", "y")],
        X,
        np.arange(8, dtype=np.float32),
        None,
    ),
    "mean of an input": ([node("Sub", "x t", "y")], X, random(8), None),
    "initial state": (
        [node("LSTM", "x3 w3 r8 - - t", "y", hidden_size=2)],
        {"x3": ["t", 1, 4]},
        np.zeros((1, 1, 2)),
        None,
    ),
}
_OTHERS = {
    **_W,
    "w1": random(8, 1),
    "w16": random(8, 16),
    "r8": random(1, 8, 2),
    "w3": random(1, 8, 4),
    "step": np.int64(4),
    "basis": windowed_fourier_basis(64),
}


@pytest.mark.parametrize("case", CASES)
def test_role_of(case: str):
    nodes, inputs, tensor, kind = CASES[case]
    read = {name for n in nodes for name in n.input}
    weights = {n: a for n, a in _OTHERS.items() if n in read}
    proto = model(
        nodes,
        inputs,
        {"y": None},
        {**weights, "t": np.asarray(tensor, np.float32)},
        types={"ids": INT64, "c": BOOL},
    )
    report = onnxtrain.explain(proto)
    assert report.roles.get("t") == kind
    assert ("t" in report.frozen) == (kind is None)


@pytest.mark.parametrize(
    ("name", "learned"),
    [
        ("logit_scale", True),
        ("blocks.0.scale", True),
        ("learnable_affine_block_3.w_0", True),
        ("onnx::Mul_123", False),
        ("/layer/Constant_output_0", False),
        ("val_12", False),
        ("temperature_of_boiling", False),
    ],
)
def test_a_single_number_trains_only_by_a_name_that_says_so(name: str, learned: bool):
    proto = model(
        [node("MatMul", "x w", "h"), node("Mul", f"h {name}", "y")],
        X,
        Y,
        {"w": random(8, 8), name: np.float32(2)},
    )
    assert (name in onnxtrain.explain(proto).parameters) == learned


def test_quantization_scales_are_no_parameters():
    nodes = [
        node("DequantizeLinear", "q scale zero", "w", axis=1),
        node("MatMul", "x w", "h"),
        node("Add", "h b", "y"),
    ]
    weights = {
        "q": np.arange(-8, 8, dtype=np.int8).reshape(8, 2),
        "scale": np.array([0.1, 0.2], np.float32),
        "zero": np.zeros(2, np.int8),
        "b": random(2),
    }
    proto = model(nodes, X, {"y": ["batch", 2]}, weights)
    assert trained(build(proto, loss="mse", optimizer="sgd")) == {"b"}


def test_nothing_left_says_why_for_each_tensor():
    proto = model(
        [node("Pow", "x two", "p"), node("Mul", "p half", "y")],
        X,
        Y,
        {"two": np.float32(2), "half": np.float32(0.5)},
    )
    report = onnxtrain.explain(proto)
    assert not report.differentiable
    assert "no parameters" in str(report)
    with pytest.raises(PrepareError) as refusal:
        build(proto, loss="mse", optimizer="sgd")
    text = str(refusal.value)
    assert "not trained, an exponent: 1: two" in text
    assert "not trained, a single number in arithmetic: 1: half" in text
    assert "hint: name the tensors to train: train=['two', 'half']" in text
    build(proto, loss="mse", optimizer="sgd", train=["two", "half"])


def test_weights_without_a_path_to_an_output_are_told():
    nodes = [node("MatMul", "x w", "h"), node("ArgMax", "h", "at"), node("Cast", "at", "y", to=1)]
    proto = model(nodes, X, {"y": None}, {"w": random(8, 8)})
    with pytest.raises(PrepareError, match="no differentiable path from w"):
        build(proto, loss="mse", optimizer="sgd")


@pytest.mark.parametrize("variant", ["Reciprocal", "Div"])
def test_a_logistic_function_that_is_written_out_does_not_overflow(variant: str):
    """The derivative of ``1 / (1 + exp(-h))`` is zero, not NaN, where exp is infinite."""
    last = node("Reciprocal", "d", "y") if variant == "Reciprocal" else node("Div", "one d", "y")
    nodes = [
        node("MatMul", "x w", "h"),
        node("Mul", "h minus", "n"),
        node("Exp", "n", "e"),
        node("Add", "e one", "d"),
        last,
    ]
    weights = {"w": 50 * random(8, 8), "minus": np.float32(-1), "one": np.float32(1)}
    proto = model(nodes, X, Y, weights)
    _, curve, trainer = train(proto, {"x": random(16, 8)})
    assert falls(curve)
    assert np.isfinite(trainer.parameters["w"]).all()
