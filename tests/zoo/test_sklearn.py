"""Gradients of models that skl2onnx writes, against differences in float64."""

import warnings

import numpy as np
import onnx
import onnxruntime
import pytest
from sklearn.datasets import load_diabetes, load_iris
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import onnxtrain

from .check import evaluate_double

ROWS = 6
PLAIN = {"LinearRegressor", "LinearClassifier", "Scaler", "Normalizer"}


def _iris(classes: int = 3):
    x, y = load_iris(return_X_y=True)
    return x[y < classes].astype(np.float32), y[y < classes]


def _diabetes():
    x, y = load_diabetes(return_X_y=True)
    return (10 * x).astype(np.float32), (y / 100).astype(np.float32)


CASES = {
    "linear": (LinearRegression(), _diabetes, {"coef", "intercept"}),
    "logistic": (LogisticRegression(), _iris, {"coef", "intercept"}),
    "logistic-binary": (LogisticRegression(), lambda: _iris(2), {"coef", "intercept"}),
    "scaled-logistic": (
        make_pipeline(StandardScaler(), LogisticRegression()),
        _iris,
        {"coef", "intercept"},  # the scaling of features is not a weight
    ),
    "mlp-classifier": (
        MLPClassifier(hidden_layer_sizes=(8,), max_iter=20, random_state=0),
        _iris,
        {"coefficient", "intercepts", "coefficient1", "intercepts1"},
    ),
    "mlp-regressor": (
        MLPRegressor(hidden_layer_sizes=(6,), activation="tanh", max_iter=20, random_state=0),
        _diabetes,
        {"coefficient", "intercepts", "coefficient1", "intercepts1"},
    ),
}


def _convert(estimator, x: np.ndarray) -> onnx.ModelProto:
    """The fitted estimator in plain operators, its label branch cut off."""
    from skl2onnx import to_onnx

    classifier = hasattr(estimator, "classes_")
    options = {"zipmap": False} if classifier else None
    model = to_onnx(estimator, x[:1], black_op=PLAIN, options=options, target_opset=20)
    return _keep_output(model, "probabilities" if classifier else model.graph.output[0].name)


def _keep_output(model: onnx.ModelProto, name: str) -> onnx.ModelProto:
    """The model with this one output and without the nodes and constants it does not need."""
    graph, needed, kept = model.graph, {name}, []
    for node in reversed(graph.node):
        if needed & set(node.output):
            needed |= set(node.input)
            kept.insert(0, node)
    outputs = [value for value in graph.output if value.name == name]
    constants = [tensor for tensor in graph.initializer if tensor.name in needed]
    for field, items in (("node", kept), ("output", outputs), ("initializer", constants)):
        graph.ClearField(field)
        getattr(graph, field).extend(items)
    domains = [entry for entry in model.opset_import if not entry.domain]
    del model.opset_import[:]
    model.opset_import.extend(domains)
    return model


def _differences(gradient: onnx.ModelProto, feeds: dict, name: str, step: float = 1e-6):
    """Central differences of the contracted output with respect to one parameter."""
    cotangent = feeds[gradient.graph.input[-1].name]

    def loss(value: np.ndarray) -> float:
        return float((evaluate_double(gradient, {**feeds, name: value})[0] * cotangent).sum())

    derivatives = np.zeros_like(feeds[name])
    for index in np.ndindex(derivatives.shape):
        move = np.zeros_like(derivatives)
        move[index] = step
        derivatives[index] = (loss(feeds[name] + move) - loss(feeds[name] - move)) / (2 * step)
    return derivatives


@pytest.mark.parametrize("case", list(CASES))
def test_gradients_equal_differences(case):
    estimator, data, names = CASES[case]
    x, y = data()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # not converged, and the converter's own deprecations
        estimator.fit(x, y)
        model = _convert(estimator, x)
    parameters = onnxtrain.parameters(model)
    assert set(parameters) == names

    gradient = onnxtrain.vjp(model)
    slots = [slot.name for slot in gradient.graph.input]
    rows = x[:: len(x) // ROWS][:ROWS]
    shape = (ROWS, len(estimator.classes_)) if hasattr(estimator, "classes_") else (ROWS, 1)
    cotangent = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    feeds = dict(zip(slots, [rows, *parameters.values(), cotangent], strict=True))
    session = onnxruntime.InferenceSession(gradient.SerializeToString())
    predicted, *gradients = session.run(None, feeds)

    method = "predict_proba" if hasattr(estimator, "classes_") else "predict"
    expected = getattr(estimator, method)(rows).reshape(shape)
    np.testing.assert_allclose(predicted, expected, rtol=1e-4, atol=1e-5)
    wide = {name: value.astype(np.float64) for name, value in feeds.items()}
    for name, g in zip(parameters, gradients, strict=True):
        wanted = _differences(gradient, wide, name)
        scale = max(np.linalg.norm(wanted), 1e-3)
        assert np.linalg.norm(g - wanted) <= 1e-4 * scale, name
