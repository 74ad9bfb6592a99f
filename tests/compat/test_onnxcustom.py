"""The examples of onnxcustom's documentation, with assertions on the loss."""

import importlib
import logging
import pickle
import warnings
from typing import Any

import numpy as np
import onnx
import pytest
from onnxruntime import InferenceSession
from sklearn.base import clone
from sklearn.datasets import make_classification, make_regression
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import GridSearchCV
from sklearn.neural_network import MLPClassifier, MLPRegressor

from onnxtrain.compat.onnxcustom import (
    ConvergenceError,
    ConvergenceWarning,
    LearningRateSGD,
    LearningRateSGDNesterov,
    NegLogLearningLoss,
    OrtGradientForwardBackward,
    OrtGradientForwardBackwardOptimizer,
    OrtGradientOptimizer,
    add_loss_output,
    get_train_initializer,
    onnx_rename_weights,
)
from onnxtrain.compat.onnxcustom.training.sgd_learning_penalty import ElasticLearningPenalty

pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")


def convert(model, x: np.ndarray, output: str | None = None) -> onnx.ModelProto:
    from skl2onnx import to_onnx

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = {"zipmap": False} if hasattr(model, "classes_") else None
        converted: Any = to_onnx(
            model, x[:1], black_op={"LinearRegressor"}, options=options, target_opset=18
        )
    if output is None:
        return converted
    needed, kept = {output}, []
    for node in reversed(converted.graph.node):
        if needed & set(node.output):
            needed |= set(node.input)
            kept.insert(0, node)
    constants = [t for t in converted.graph.initializer if t.name in needed]
    cut = onnx.ValueInfoProto(name=output)
    cut.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    for d in (None, 1):
        dim = cut.type.tensor_type.shape.dim.add()
        if d:
            dim.dim_value = d
    for field, items in (("node", kept), ("initializer", constants), ("output", [cut])):
        converted.graph.ClearField(field)
        getattr(converted.graph, field).extend(items)
    domains = [d for d in converted.opset_import if not d.domain]
    del converted.opset_import[:]
    converted.opset_import.extend(domains)
    return converted


@pytest.fixture
def linear():
    data: Any = make_regression(200, n_features=2, bias=2, random_state=0)
    x, y = data
    x, y = x.astype(np.float32), (y / 50).astype(np.float32)
    reg = LinearRegression().fit(x, y)
    np.random.seed(0)
    return x, y, reg, convert(reg, x)


def test_linear_regression_with_the_loss_in_the_graph(linear):
    x, y, reg, onx = linear
    with_loss = add_loss_output(onx)
    assert next(o.name for o in with_loss.graph.output) == "loss"
    weights = list(get_train_initializer(onx))
    assert weights == ["coef", "intercept"]
    session = OrtGradientOptimizer(
        with_loss, weights[::-1], learning_rate=5e-2, max_iter=60, batch_size=10
    )
    session.fit(x, y, X_val=x[:50], y_val=y[:50])
    assert session.train_losses_[-1] < 1e-3 < session.train_losses_[0]
    assert session.validation_losses_ is not None
    assert len(session.validation_losses_) == 10
    assert session.validation_losses_[-1] < 1e-3
    state = session.get_state()
    np.testing.assert_allclose(state["coef"].ravel(), reg.coef_.ravel(), atol=2e-2)
    trained = session.get_trained_onnx(onx)
    got = np.asarray(InferenceSession(trained.SerializeToString()).run(None, {"X": x})[0])
    np.testing.assert_allclose(got.ravel(), reg.predict(x), atol=0.1)


@pytest.mark.parametrize("loss", ["square_error", "absolute_error", "elastic_error"])
def test_forward_backward_linear_regression(linear, loss):
    x, y, reg, onx = linear
    # The gradient of an absolute error does not vanish: the last steps must be small.
    step, epochs = (0.01, 150) if loss == "absolute_error" else (0.1, 40)
    rate = LearningRateSGD(step, learning_rate="constant")
    session = OrtGradientForwardBackwardOptimizer(
        onx, learning_rate=rate, learning_loss=loss, max_iter=epochs, batch_size=10
    )
    session.fit(x, y)
    assert session.train_losses_[-1] < 0.1 * session.train_losses_[0]
    coef, _ = (v.numpy() for v in session.get_state())
    np.testing.assert_allclose(coef.ravel(), reg.coef_.ravel(), atol=5e-2)
    assert session.score(x, y) == pytest.approx(-np.mean(session.losses(x, y)))


def test_nesterov_and_a_penalty(linear):
    x, y, _, onx = linear
    settings = {"max_iter": 20, "batch_size": 10, "warm_start": True}
    rate = LearningRateSGDNesterov(1e-2, learning_rate="constant")
    free = OrtGradientForwardBackwardOptimizer(onx, learning_rate=rate, **settings).fit(x, y)
    held = OrtGradientForwardBackwardOptimizer(
        onx, learning_rate=rate, learning_penalty=ElasticLearningPenalty(0.0, 0.5), **settings
    ).fit(x, y)
    size = [np.linalg.norm(s.trained_coef_["coef"].numpy()) for s in (free, held)]
    # At the minimum of mean (p - y)^2 / 2 + |w|^2 / 2, whitened features halve the weights.
    assert 0.3 * size[0] < size[1] < 0.7 * size[0]
    assert free.needs_grad
    assert free.get_state("grad")[0].numpy().shape == (2, 1)


def test_weights_of_rows(linear):
    x, y, reg, onx = linear
    wrong = y.copy()
    wrong[100:] = 100
    weight = np.ones(200, np.float32)
    weight[100:] = 0
    session = OrtGradientForwardBackwardOptimizer(
        onx, learning_rate=0.1, weight_name="weight", max_iter=30
    ).fit(x, wrong, sample_weight=weight)
    np.testing.assert_allclose(
        session.trained_coef_["coef"].numpy().ravel(), reg.coef_.ravel(), atol=5e-2
    )


def mlp_data(classes: bool):
    x = (np.arange(30).reshape(-1, 3) / 100).astype(np.float32)
    y = np.arange(10).astype(np.float32).reshape(-1, 1)
    return x, (y >= 5).astype(np.int64) if classes else y


@pytest.mark.parametrize("kind", [MLPRegressor, MLPClassifier])
def test_mlp_gradients_equal_back_propagation_of_sklearn(kind):
    classes = kind is MLPClassifier
    x, y = mlp_data(classes)
    settings = {"hidden_layer_sizes": (5,), "activation": "logistic", "alpha": 0.0}
    mlp = kind(**settings, max_iter=2, random_state=0).fit(x, y.ravel())
    onx = onnx_rename_weights(convert(mlp, x, "add_result1" if classes else None))
    names = ["I0_coefficient", "I1_intercepts", "I2_coefficient1", "I3_intercepts1"]
    assert list(get_train_initializer(onx))[:4] == names
    session = OrtGradientForwardBackwardOptimizer(
        onx,
        names,
        learning_rate=1e-5,
        warm_start=True,
        max_iter=2,
        learning_loss=NegLogLearningLoss() if classes else "square_error",
    )
    session.fit(x, y)
    state = [v.numpy().astype(np.float64) for v in session.get_state()]
    mlp.coefs_, mlp.intercepts_ = state[::2], [s.ravel() for s in state[1::2]]

    few = x[:4].astype(np.float64) * 10
    target = np.array([[0], [1], [1], [0]])
    activations, deltas = [few, None, None], [None, None]
    coefs, intercepts = [None, None], [None, None]
    loss, coefs, intercepts = mlp._backprop(
        few, target, None, activations, deltas, coefs, intercepts
    )
    function = session.train_function_
    inputs = [few.astype(np.float32), *(v.numpy() for v in session.get_state())]
    predicted = function.forward(inputs, training=True)
    total, grad = session.learning_loss.loss_gradient(session.device, target, predicted[0])
    gradients = [g.numpy() / len(few) for g in function.backward([grad])][1:]
    assert total.numpy().item() / len(few) == pytest.approx(loss, rel=1e-5)
    for ours, theirs in zip(
        gradients, [coefs[0], intercepts[0], coefs[1], intercepts[1]], strict=True
    ):
        np.testing.assert_allclose(ours.ravel(), theirs.ravel(), rtol=1e-5, atol=1e-6)


def test_classifier_with_nesterov_and_penalty():
    data: Any = make_classification(300, n_features=10, random_state=0)
    x, y = data
    x = x.astype(np.float32)
    mlp = MLPClassifier((10,), max_iter=1, random_state=0).fit(x, y)
    onx = onnx_rename_weights(convert(mlp, x, "add_result1"))
    session = OrtGradientForwardBackwardOptimizer(
        onx,
        learning_rate=LearningRateSGDNesterov(1e-1, momentum=0.9, nesterov=True),
        learning_loss=NegLogLearningLoss(),
        learning_penalty=ElasticLearningPenalty(l1=0, l2=1e-4),
        warm_start=True,
        max_iter=40,
        batch_size=15,
    ).fit(x, y.astype(np.int64))
    assert session.train_losses_[-1] < 0.7 * session.train_losses_[0]
    trained = InferenceSession(session.get_trained_onnx().SerializeToString())
    got = np.asarray(trained.run(None, {"X": x})[0])
    assert ((got.ravel() > 0) == y).mean() > 0.9


def test_grid_search(linear):
    x, y, _, onx = linear
    base = OrtGradientForwardBackwardOptimizer(onx, learning_rate=1e-6, max_iter=5)
    search = GridSearchCV(base, {"learning_rate": [1e-6, 1e-3, 3e-2]}, cv=3).fit(x, y)
    assert search.best_params_ == {"learning_rate": 3e-2}


def test_pickled_estimators_go_on_alike(linear):
    x, y, _, onx = linear
    session = OrtGradientForwardBackwardOptimizer(
        onx, learning_rate="SGDNesterov", max_iter=3, warm_start=True
    ).fit(x, y)
    copy = pickle.loads(pickle.dumps(session))
    assert copy.train_losses_ == session.train_losses_
    for one in (session, copy):
        np.random.seed(1)
        one.fit(x, y)
    for a, b in zip(session.get_state(), copy.get_state(), strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
    first = OrtGradientOptimizer(add_loss_output(onx), ["intercept", "coef"], max_iter=2)
    again = pickle.loads(pickle.dumps(first.fit(x, y)))
    np.testing.assert_array_equal(again.get_state()["coef"], first.get_state()["coef"])


def test_divergence_is_an_error_or_a_warning(linear):
    x, y, _, onx = linear
    settings = {"learning_rate": 1e9, "max_iter": 20}
    with np.errstate(all="ignore"):
        with pytest.raises(ConvergenceError, match="the loss is"):
            OrtGradientForwardBackwardOptimizer(onx, **settings).fit(x, y)
        with pytest.warns(ConvergenceWarning, match="the loss is"):
            OrtGradientForwardBackwardOptimizer(onx, exc=False, **settings).fit(x, y)


def test_several_forward_passes_before_backward(linear):
    x, _, reg, onx = linear
    builder = pickle.loads(pickle.dumps(OrtGradientForwardBackward(onx, ["coef", "intercept"])))
    assert builder.cls_type_._onx_inp == ["X", "coef", "intercept"]
    assert builder.cls_type_._onx_out == ["X_grad", "coef_grad", "intercept_grad"]
    weights = [builder.get_initializer(n) for n in ("coef", "intercept")]
    function = builder.new_instance()
    (y,) = function.forward([x[:5], *weights], training=True)
    np.testing.assert_allclose(y.numpy().ravel(), reg.predict(x[:5]), rtol=1e-5)
    function.forward([x[:3], *weights], training=True)
    for rows in (3, 5):
        _, dw, db = function.backward([np.ones((rows, 1), np.float32)])
        assert db.numpy().item() == rows
        np.testing.assert_allclose(dw.numpy().ravel(), x[:rows].sum(0), rtol=1e-5)
    with pytest.raises(RuntimeError, match="no forward pass is left"):
        function.backward([np.ones((5, 1), np.float32)])


def test_clones_and_repr(linear):
    x, y, _, onx = linear
    rate = LearningRateSGD(1e-3)
    session = OrtGradientForwardBackwardOptimizer(onx, ["coef", "intercept"], learning_rate=rate)
    copy: Any = clone(session)
    assert copy.learning_rate == rate
    assert copy.learning_rate is not rate
    assert copy.get_params()["device"] == "cpu"
    assert "learning_rate=LearningRateSGD(eta0=0.001, alpha=0.0001" in repr(copy)
    assert "learning_rate='invscaling'" in repr(copy)
    rates = [LearningRateSGD(r) for r in (1e-6, 3e-2)]
    session.set_params(max_iter=5)
    search = GridSearchCV(session, {"learning_rate": rates}, cv=2).fit(x, y)
    assert search.best_params_["learning_rate"].eta0 == 3e-2


def test_logs_of_iterations(linear, caplog):
    x, y, _, onx = linear
    for logged in (False, True):
        with caplog.at_level(logging.DEBUG, "onnxcustom"):
            OrtGradientForwardBackwardOptimizer(onx, enable_logging=logged, max_iter=1).fit(x, y)
            OrtGradientForwardBackward(onx, enable_logging=logged)
        messages = [r.getMessage() for r in caplog.records]
        assert bool(messages) is logged
    name = "[OrtGradientForwardBackwardOptimizer"
    assert f"{name}.fit] weights_to_train=['coef', 'intercept']" in messages
    assert sum(m.startswith(f"{name}._iteration] batch ") for m in messages) == 20
    assert "[OrtGradientForwardBackward] weights_to_train=['coef', 'intercept']" in messages


def test_saved_gradient(linear, tmp_path):
    x, y, _, onx = linear
    path = tmp_path / "gradient.onnx"
    settings = {"max_iter": 1, "saved_gradient": str(path)}
    OrtGradientOptimizer(add_loss_output(onx), ["coef"], **settings).fit(x, y)
    step = onnx.load(f"{path}.training.onnx")
    assert "coef.out" in {v.name for v in step.graph.output}
    assert {"X", "label", "coef"} < {v.name for v in onnx.load(path).graph.input}


def test_results_are_values_of_onnxruntime(linear):
    """Programs call .numpy() on elements of vectors, and pass them back."""
    x, y, _, onx = linear
    native = importlib.import_module("onnxruntime.capi._pybind_state")
    session = OrtGradientForwardBackwardOptimizer(onx, max_iter=1).fit(x, y)
    state, function = session.get_state(), session.train_function_
    assert all(type(v) is native.OrtValue for v in [*state, *session.trained_coef_.values()])
    assert session.get_full_state()[0] is None
    device = session.device
    batch = native.OrtValue.ortvalue_from_numpy(x[:4], device)
    label = native.OrtValue.ortvalue_from_numpy(y[:4].reshape(-1, 1), device)
    outputs: Any = None
    gradients: Any = None
    for _ in range(2):
        outputs = function.forward([batch, *state], training=True, forward_outputs_cache=outputs)
        loss, pull = session.learning_loss.loss_gradient(device, label, outputs[0])
        gradients = function.backward([pull], backward_outputs_cache=gradients)
        assert isinstance(outputs, native.OrtValueVector)
        assert isinstance(gradients, native.OrtValueVector)
        error = outputs[0].numpy() - y[:4, None]
        np.testing.assert_allclose(loss.numpy(), (error**2).sum(keepdims=True) / 2, rtol=1e-5)
        np.testing.assert_allclose(gradients[1].numpy(), x[:4].T @ error, rtol=1e-4)
    again = function.forward([batch, *state])
    np.testing.assert_array_equal(again[0].numpy(), outputs[0].numpy())


def test_unsorted_weights_are_refused_by_fit(linear):
    """Programs catch the ValueError, and rename the weights."""
    x, y, _, onx = linear
    swapped = onnx.ModelProto()
    swapped.CopyFrom(onx)
    swapped.graph.initializer.sort(key=lambda tensor: tensor.name, reverse=True)
    with pytest.raises(ValueError, match="alphabetical order"):
        OrtGradientForwardBackwardOptimizer(swapped, max_iter=1).fit(x, y)
    renamed = onnx_rename_weights(swapped)
    assert OrtGradientForwardBackwardOptimizer(renamed, max_iter=1).fit(x, y).train_losses_
