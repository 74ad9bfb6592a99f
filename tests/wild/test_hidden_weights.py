"""Weights that are not initializers of the graph are detected, trained and exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import onnxtrain
from onnxtrain import build, losses
from onnxtrain.errors import OnnxTrainError, PrepareError
from onnxtrain.graph.io import load
from onnxtrain.importer import expose_weights
from tests.wild.graphs import (
    BOOL,
    INT64,
    STRING,
    body,
    constant,
    falls,
    info,
    model,
    node,
    random,
    run,
    train,
    trained,
)

X = {"x": ["batch", 4]}


def in_constants() -> onnx.ModelProto:
    """A net all of whose weights are Constant nodes, batch normalization included."""
    nodes = [
        constant("conv.w", random(3, 2, 3)),
        constant("conv.b", random(3)),
        constant("bn.scale", np.ones(3, np.float32)),
        constant("bn.bias", np.zeros(3, np.float32)),
        constant("bn.mean", random(3)),
        constant("bn.var", np.ones(3, np.float32)),
        constant("half", np.float32(0.5)),
        node("Conv", "x conv.w conv.b", "h"),
        node("BatchNormalization", "h bn.scale bn.bias bn.mean bn.var", "n"),
        node("Mul", "n half", "y"),
    ]
    return model(nodes, {"x": ["batch", 2, 7]}, {"y": None})


def in_branches() -> onnx.ModelProto:
    """Two nets behind an input that chooses between them; one name in both branches."""

    def branch(name: str) -> onnx.GraphProto:
        nodes = [constant("w", random(4, 2)), node("MatMul", "x w", "h"), node("Add", "h b", name)]
        return body(nodes, {name: ["batch", 2]}, weights={"b": random(2)})

    chosen = node("If", "first", "y", then_branch=branch("p"), else_branch=branch("q"))
    return model([chosen], {**X, "first": []}, {"y": ["batch", 2]}, types={"first": BOOL})


def in_a_loop() -> onnx.ModelProto:
    """A weight that a Loop multiplies with three times."""
    step = body(
        [
            constant("w", 0.3 * random(4, 4)),
            node("MatMul", "s w", "t"),
            node("Tanh", "t", "u"),
            node("Identity", "go", "more"),
        ],
        {"more": [], "u": ["batch", 4]},
        [info("i", [], INT64), info("go", [], BOOL), info("s", ["batch", 4])],
    )
    step.output[0].type.tensor_type.elem_type = BOOL
    nodes = [
        constant("count", np.int64(3)),
        constant("true", np.array(True)),
        node("Loop", "count true x", "y", body=step),
    ]
    return model(nodes, X, {"y": ["batch", 4]})


def in_a_function() -> onnx.ModelProto:
    """A local function that holds its weight."""
    function = onnx.FunctionProto(
        name="Layer",
        domain="local",
        input=["a"],
        output=["c"],
        node=[constant("w", random(4, 5)), node("MatMul", "a w", "c")],
        opset_import=[onnx.OperatorSetIdProto(domain="", version=17)],
    )
    call = node("Layer", "x", "y", domain="local")
    return model([call], X, {"y": ["batch", 5]}, functions=[function])


PLACES = {
    "Constant nodes": (in_constants, {"x": random(3, 2, 7)}, 4),
    "branches of If": (in_branches, {"x": random(3, 4), "first": np.array(True)}, 4),
    "the body of a Loop": (in_a_loop, {"x": random(3, 4)}, 1),
    "a local function": (in_a_function, {"x": random(3, 4)}, 1),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("mode", ["as-is", "train"])
def test_weights_are_trained_in(place: str, mode: str, tmp_path: Path):
    make, feeds, count = PLACES[place]
    proto = make()
    report = onnxtrain.explain(proto)
    assert report.differentiable
    artifacts, curve, trainer = train(proto, feeds, mode=mode, optimizer="adamw:lr=1e-2")
    assert len(trained(artifacts)) == count == len(report.parameters)
    assert falls(curve)
    assert any("became initializers" in line for line in artifacts.manifest.options["repairs"])
    trainer.export(tmp_path / "trained.onnx")
    (exported,) = run(onnx.load(tmp_path / "trained.onnx"), feeds)
    (original,) = run(proto, feeds)
    assert np.abs(exported - original).max() > 1e-3


@pytest.mark.parametrize("place", PLACES)
def test_the_gradient_is_that_of_the_file(place: str):
    """Against central differences of the original in stock onnxruntime, along the gradient."""
    make, feeds, _ = PLACES[place]
    proto = make()
    names = list(onnxtrain.parameters(proto))
    made = onnxtrain.vjp(proto, names)
    (y,) = run(proto, feeds)
    weights = onnxtrain.parameters(proto)
    cotangent = random(*y.shape)
    inputs = [i.name for i in made.graph.input]
    values = [*feeds.values(), *weights.values(), cotangent]
    given = dict(zip(inputs, values, strict=True))
    _, *gradients = run(made, given)
    square = sum(float((g.astype(np.float64) ** 2).sum()) for g in gradients)
    lifted, _ = expose_weights(load(proto))

    def value(step: float) -> float:
        for name, g in zip(names, gradients, strict=True):
            moved = weights[name] + np.float32(step) * g
            lifted.graph.initializers[name].const_value = ir.Tensor(moved, name=name)
        (out,) = run(ir.to_proto(lifted), feeds)
        return float((out.astype(np.float64) * cotangent).sum())

    step = 1e-3 / max(1.0, square**0.5)
    derivative = (value(step) - value(-step)) / (2 * step)
    assert derivative == pytest.approx(square, rel=1e-2)


LABEL = {"label": INT64}
FEEDS = {"x": random(6, 4)}


def linear_classifier(transform: str, rows: int, names: bool) -> onnx.ModelProto:
    labels = ["no", "yes", "perhaps"] if names else [2, 5, 9]
    count = max(rows, 2)
    key = "classlabels_strings" if names else "classlabels_ints"
    made = node(
        "LinearClassifier",
        "x",
        "label y",
        domain="ai.onnx.ml",
        coefficients=random(rows, 4).reshape(-1).tolist(),
        intercepts=random(rows).tolist(),
        post_transform=transform,
        **{key: labels[:count]},
    )
    outputs = {"label": ["batch"], "y": ["batch", count]}
    kinds = {"label": STRING if names else INT64}
    return model([made], X, outputs, machine_learning=3, types=kinds)


@pytest.mark.parametrize("transform", ["NONE", "LOGISTIC", "SOFTMAX"])
@pytest.mark.parametrize(("rows", "names"), [(1, False), (2, True), (3, False)])
def test_a_linear_classifier_is_what_it_was_and_trains(transform: str, rows: int, names: bool):
    proto = linear_classifier(transform, rows, names)
    artifacts, curve, _ = train(proto, FEEDS, optimizer="adamw:lr=1e-2")
    assert {n.rpartition(".")[2] for n in trained(artifacts)} == {"coefficients", "intercepts"}
    assert falls(curve)
    label, scores = run(proto, FEEDS)
    new_label, new_scores = run(artifacts.models["infer"], FEEDS)
    np.testing.assert_array_equal(new_label, label)
    np.testing.assert_allclose(new_scores, scores, atol=1e-6)


def regressor(op: str, **attributes: Any) -> onnx.ModelProto:
    made = node(op, "x", "y", domain="ai.onnx.ml", **attributes)
    return model([made], X, {"y": ["batch", attributes.get("targets", 1)]}, machine_learning=3)


REGRESSORS = {
    "LinearRegressor": {
        "coefficients": random(8).tolist(),
        "intercepts": random(2).tolist(),
        "targets": 2,
    },
    "SVMRegressor": {
        "coefficients": random(5).tolist(),
        "support_vectors": random(20).tolist(),
        "n_supports": 5,
        "kernel_type": "LINEAR",
        "kernel_params": [0.5, 0.0, 3.0],
        "rho": [0.25],
    },
}


@pytest.mark.parametrize("op", REGRESSORS)
def test_a_linear_regressor_is_what_it_was_and_trains(op: str):
    proto = regressor(op, **REGRESSORS[op])
    artifacts, curve, _ = train(proto, FEEDS, optimizer="adamw:lr=1e-2")
    assert len(trained(artifacts)) == 2
    assert falls(curve)
    np.testing.assert_allclose(
        run(artifacts.models["infer"], FEEDS)[0], run(proto, FEEDS)[0], atol=1e-5
    )


@pytest.mark.parametrize("classes", [2, 3, 4])
def test_a_linear_support_vector_classifier_trains(classes: int):
    count, pairs = 3 * classes, classes * (classes - 1) // 2
    made = node(
        "SVMClassifier",
        "x",
        "label y",
        domain="ai.onnx.ml",
        coefficients=random((classes - 1) * count).tolist(),
        support_vectors=random(4 * count).tolist(),
        vectors_per_class=[3] * classes,
        kernel_type="LINEAR",
        kernel_params=[0.5, 0.0, 3.0],
        rho=random(pairs).tolist(),
        classlabels_ints=list(range(3, 3 + classes)),
        post_transform="NONE",
    )
    outputs = {"label": ["batch"], "y": ["batch", max(pairs, 2)]}
    proto = model([made], X, outputs, machine_learning=3, types=LABEL)
    artifacts, curve, _ = train(proto, FEEDS, optimizer="adamw:lr=1e-2")
    assert falls(curve)
    for old, new in zip(run(proto, FEEDS), run(artifacts.models["infer"], FEEDS), strict=True):
        np.testing.assert_allclose(new, old, atol=1e-5)


FEATURES = {
    "Scaler": {"offset": random(4).tolist(), "scale": [2.0, 3.0, 0.5, 1.0]},
    "Normalizer": {"norm": "L2"},
    "Imputer": {"imputed_value_floats": [0.5], "replaced_value_float": float("nan")},
    "Binarizer": {"threshold": 0.1},
}


@pytest.mark.parametrize("op", FEATURES)
def test_what_prepares_features_passes_through(op: str):
    nodes = [
        node(op, "x", "f", domain="ai.onnx.ml", **FEATURES[op]),
        node("MatMul", "f w", "y"),
    ]
    proto = model(nodes, X, {"y": ["batch", 2]}, {"w": random(4, 2)}, machine_learning=3)
    feeds = {"x": random(6, 4)}
    if op == "Imputer":
        feeds["x"][1, 2] = np.nan
    artifacts, curve, _ = train(proto, feeds, optimizer="adamw:lr=1e-2")
    assert trained(artifacts) == {"w"}
    assert falls(curve)
    np.testing.assert_allclose(
        run(artifacts.models["infer"], feeds)[0], run(proto, feeds)[0], atol=1e-5
    )


def test_columns_chosen_by_number_pass_through():
    nodes = [
        node("ArrayFeatureExtractor", "x at", "f", domain="ai.onnx.ml"),
        node("MatMul", "f w", "y"),
    ]
    weights = {"at": np.array([[0, 3]]), "w": random(2, 2)}
    proto = model(nodes, X, {"y": ["batch", 2]}, weights, machine_learning=3)
    artifacts, curve, _ = train(proto, FEEDS, optimizer="adamw:lr=1e-2")
    assert falls(curve)
    np.testing.assert_allclose(
        run(artifacts.models["infer"], FEEDS)[0], run(proto, FEEDS)[0], atol=1e-6
    )


def tree() -> onnx.NodeProto:
    return node(
        "TreeEnsembleRegressor",
        "h",
        "y",
        domain="ai.onnx.ml",
        n_targets=1,
        nodes_falsenodeids=[2, 0, 0],
        nodes_truenodeids=[1, 0, 0],
        nodes_featureids=[0, 0, 0],
        nodes_modes=["BRANCH_LEQ", "LEAF", "LEAF"],
        nodes_nodeids=[0, 1, 2],
        nodes_treeids=[0, 0, 0],
        nodes_values=[0.5, 0.0, 0.0],
        target_ids=[0, 0],
        target_nodeids=[1, 2],
        target_treeids=[0, 0],
        target_weights=[1.0, 2.0],
    )


def test_a_tree_says_that_it_has_no_gradient():
    alone = model([node("Identity", "x", "h"), tree()], X, {"y": ["batch", 1]}, machine_learning=3)
    report = onnxtrain.explain(alone)
    assert not report.differentiable
    with pytest.raises(PrepareError, match="TreeEnsembleRegressor x1: a tree has no gradient"):
        build(alone, loss=losses.LossTerm("mse", output="y"), optimizer="sgd")
    behind = model(
        [node("MatMul", "x w", "h"), tree()],
        X,
        {"y": ["batch", 1]},
        {"w": random(4, 4)},
        machine_learning=3,
    )
    with pytest.raises(OnnxTrainError, match="a tree has no gradient with respect to its input"):
        build(behind, loss=losses.LossTerm("mse", output="y"), optimizer="sgd")


def test_the_model_that_is_given_stays_as_it_is():
    given = ir.from_proto(in_constants())
    before = ir.to_proto(given).SerializeToString(deterministic=True)
    build(given, loss=losses.LossTerm("mse", output="y"), optimizer="sgd")
    onnxtrain.explain(given)
    assert ir.to_proto(given).SerializeToString(deterministic=True) == before
