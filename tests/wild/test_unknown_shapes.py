"""Unknown ranks and sizes are inferred from their consumers, or the error names them."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import onnxtrain
from onnxtrain import build
from onnxtrain.errors import OnnxTrainError, PrepareError, ShapeError
from tests.wild.graphs import (
    BOOL,
    INT64,
    body,
    falls,
    info,
    model,
    node,
    random,
    run,
    tensor,
    train,
    trained,
)

LSTM = {"w": random(1, 8, 4), "r": random(1, 8, 2), "last": np.array([3])}
DEEP = {"x": ["t", "n", 4, "width"]}


def squeezed_if_one(names: bool = True) -> onnx.ModelProto:
    """What a script of torch makes of ``x.squeeze(-1)`` before an LSTM: an If of two ranks."""
    nodes = [
        node("Shape", "x", "shape"),
        node("Gather", "shape last", "size"),
        node("Equal", "size one", "is_one"),
        node(
            "If",
            "is_one",
            "h",
            then_branch=body([node("Squeeze", "x last", "a")], {"a": None}),
            else_branch=body([node("Identity", "x", "b")], {"b": None}),
        ),
        node("LSTM", "h w r", "y", hidden_size=2),
    ]
    shape = ["t", "n", 4, "width"] if names else [None, None, 4, None]
    return model(nodes, {"x": shape}, {"y": None}, {**LSTM, "one": np.array([1])})


@pytest.mark.parametrize("names", [True, False])
def test_the_branch_is_taken_that_has_the_rank_an_lstm_reads(names: bool):
    proto = squeezed_if_one(names)
    feeds = {"x": random(5, 3, 4, 1)}
    assert onnxtrain.explain(proto).differentiable
    artifacts, curve, _ = train(proto, feeds)
    assert trained(artifacts) == {"w", "r"}
    assert falls(curve)
    assert any("the rank that is read" in line for line in artifacts.manifest.options["repairs"])


def test_a_branch_in_a_body_is_taken_by_its_rank():
    inner = squeezed_if_one().graph
    other = body([node("LSTM", "x3 w r", "q", hidden_size=2)], {"q": None})
    nodes = body(list(inner.node), {"y": None})
    choice = node("If", "first", "z", then_branch=nodes, else_branch=other)
    proto = model(
        [choice],
        {**DEEP, "x3": ["t", "n", 4], "first": []},
        {"z": None},
        {**LSTM, "one": np.array([1])},
        types={"first": BOOL},
    )
    feeds = {"x": random(5, 3, 4, 1), "x3": random(5, 3, 4), "first": np.array(True)}
    _, curve, _ = train(proto, feeds, output="z")
    assert falls(curve)


def test_squeeze_without_axes_gets_those_that_its_readers_need():
    nodes = [
        node("MatMul", "x w", "h"),
        node("Squeeze", "h", "s"),
        node("Sigmoid", "s", "p"),
        node("Mul", "p five", "y"),
    ]
    weights = {"w": random(4, 2), "five": np.float32(5)}
    proto = model(nodes, {"x": ["n", 1, 4]}, {"y": ["scores"]}, weights)
    feeds = {"x": random(1, 1, 4)}
    artifacts, curve, _ = train(proto, feeds)
    assert falls(curve)
    np.testing.assert_allclose(
        run(artifacts.models["infer"], feeds)[0], run(proto, feeds)[0], rtol=1e-6
    )


def of_open_rank() -> onnx.ModelProto:
    nodes = [node("MatMul", "x w", "h"), node("Squeeze", "h", "s"), node("ReduceMax", "s", "y")]
    return model(nodes, {"x": ["n", None, 4]}, {"y": None}, {"w": random(4, 2)})


def test_a_lost_rank_is_told_by_the_value_the_cause_and_sizes_that_help():
    with pytest.raises(ShapeError) as refusal:
        build(of_open_rank(), loss="mse", optimizer="sgd")
    text = str(refusal.value)
    assert "the rank of value 's' is unknown" in text
    assert "Squeeze without axes removes every axis of size 1" in text
    assert "dims={'n': 1, 'x[1]': 1}" in text
    assert "prepare/" not in text


def test_sizes_without_names_are_fixed_by_their_place():
    dims = {"n": 3, "x[1]": 5}
    assert onnxtrain.explain(of_open_rank(), dims=dims).differentiable
    artifacts = build(of_open_rank(), loss="mse", optimizer="sgd", dims=dims)
    step = next(m for m in artifacts.manifest.models if m.role == "step")
    (x,) = [i for i in step.inputs if i.role == "input"]
    assert list(x.shape) == [3, 5, 4]


@pytest.mark.parametrize("name", ["x[7]", "z[0]", "x[2]", "x[]", "x"])
def test_a_place_that_is_not_there_is_refused(name: str):
    with pytest.raises(PrepareError, match="unknown dimension") as refusal:
        build(of_open_rank(), loss="mse", optimizer="sgd", dims={name: 2})
    assert "n, x[1]" in str(refusal.value)


@pytest.mark.parametrize("length", [False, True])
@pytest.mark.parametrize("onesided", [0, 1])
def test_sizes_of_stft_are_those_of_the_runtime(length: bool, onesided: int):
    """onnx infers both sides of the spectrum without frame_length."""
    bins = 9 if onesided else 16
    nodes = [
        node("STFT", f"x step window {'length' if length else ''}", "s", onesided=onesided),
        node("Slice", "s zero one last", "real"),
        node("Squeeze", "real last", "spectrum"),
        node("MatMul", "spectrum mel", "y"),
    ]
    weights = {
        "step": np.int64(4),
        "window": np.hanning(16).astype(np.float32),
        "length": np.int64(16),
        "zero": np.array([0]),
        "one": np.array([1]),
        "last": np.array([3]),
        "mel": random(bins, 5),
    }
    read = {name for n in nodes for name in n.input}
    proto = model(
        nodes,
        {"x": ["n", 64, 1]},
        {"y": None},
        {n: a for n, a in weights.items() if n in read},
    )
    feeds = {"x": random(2, 64, 1)}
    artifacts, curve, _ = train(proto, feeds)
    assert trained(artifacts) == {"mel"}
    assert falls(curve)
    untrained = onnxtrain.Trainer(artifacts).predict(**feeds)["y"]
    np.testing.assert_allclose(untrained, run(proto, feeds)[0], atol=1e-4)


def test_a_shape_that_a_loop_changes_is_refused_with_a_hint():
    step = body(
        [node("Concat", "s w", "t", axis=0), node("Identity", "go", "more")],
        {"more": [], "t": [None, 4]},
    )
    step.output[0].type.tensor_type.elem_type = BOOL
    step.input.extend(
        [
            onnx.ValueInfoProto(name="i"),
            onnx.ValueInfoProto(name="go"),
            onnx.ValueInfoProto(name="s"),
        ]
    )
    for value, kind in zip(step.input, (7, 9, 1), strict=True):
        value.type.tensor_type.elem_type = kind
    nodes = [node("Loop", "count true x", "y", body=step)]
    weights = {"count": np.int64(3), "true": np.array(True), "w": random(1, 4)}
    proto = model(nodes, {"x": ["n", 4]}, {"y": None}, weights)
    with pytest.raises(OnnxTrainError) as refusal:
        build(proto, loss="mse", optimizer="sgd")
    text = str(refusal.value)
    assert "may change the shape of a state" in text
    assert "hint:" in text
    assert "`freeze`" in text


def repeated(rank: int) -> onnx.ModelProto:
    """A Loop whose count and condition are numbers or vectors of one, as files have both."""
    shape = [1] * rank
    step = body(
        [node("MatMul", "s w", "t"), node("Tanh", "t", "u"), node("Identity", "go", "more")],
        {"more": shape, "u": ["other", 4]},
        [info("i", shape, INT64), info("go", shape, BOOL), info("s", ["rows", 4])],
    )
    step.output[0].type.tensor_type.elem_type = BOOL
    weights = {
        "count": np.full(shape, 3),
        "true": np.full(shape, True),
        "w": 0.3 * random(4, 4),
    }
    proto = model([node("Loop", "count true x", "y", body=step)], {"x": ["n", 4]}, {"y": None})
    proto.graph.initializer.extend(tensor(n, a) for n, a in weights.items())
    return proto


@pytest.mark.parametrize("rank", [0, 1])
def test_count_and_condition_of_a_loop_may_be_vectors_of_one(rank: int):
    proto = repeated(rank)
    feeds = {"x": random(3, 4)}
    (y,) = run(proto, feeds)
    cotangent = random(*y.shape)
    (w,) = onnxtrain.parameters(proto).values()
    made = onnxtrain.vjp(proto, ["w"])
    names = [i.name for i in made.graph.input]
    gradient = run(made, dict(zip(names, [feeds["x"], w, cotangent], strict=True)))[1]

    def value(step: float) -> float:
        h = feeds["x"].astype(np.float64)
        for _ in range(3):
            h = np.tanh(h @ (w + step * gradient))
        return float((h * cotangent).sum())

    derivative = (value(1e-5) - value(-1e-5)) / 2e-5
    assert derivative == pytest.approx(float((gradient**2).sum()), rel=5e-3)
    assert falls(train(proto, feeds)[1])


def test_a_rank_lost_in_a_body_names_sizes_of_the_models_inputs():
    inner = [node("MatMul", "x w", "h"), node("Squeeze", "h", "s"), node("ReduceMax", "s", "a")]
    branches = {
        "then_branch": body(inner, {"a": None}),
        "else_branch": body([node("ReduceMax", "x", "b")], {"b": None}),
    }
    proto = model(
        [node("If", "first", "y", **branches)],
        {"x": ["n", None, 4], "first": []},
        {"y": None},
        {"w": random(4, 2)},
        types={"first": BOOL},
    )
    with pytest.raises(ShapeError, match=r"dims=\{'n': 1, 'x\[1\]': 1\}"):
        build(proto, loss="mse", optimizer="sgd")
