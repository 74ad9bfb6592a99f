"""Estimators on given models: ONNX graphs and fitted pipelines; gradients against scikit-learn."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnxruntime import InferenceSession
from sklearn.base import clone
from sklearn.datasets import load_diabetes, load_iris
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import KBinsDiscretizer, PolynomialFeatures, StandardScaler

from onnxtrain.autodiff.gradients import load_normalized
from onnxtrain.errors import PrepareError
from onnxtrain.optim import SGD
from onnxtrain.runtime import session as runtime
from onnxtrain.sklearn import OnnxClassifier, OnnxRegressor, convert
from onnxtrain.sklearn.epochs import classification_loss, epoch_model, objective, regression_loss
from onnxtrain.sklearn.nets import dense_net, dense_weights

IRIS, KIND = load_iris(return_X_y=True)
NAMES = np.array(["setosa", "versicolor", "virginica"])[KIND]
DIABETES, SUGAR = load_diabetes(return_X_y=True)
SUGAR = SUGAR / 100

pytestmark = [
    pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def run(model: onnx.ModelProto, x: np.ndarray) -> list[np.ndarray]:
    session = InferenceSession(model.SerializeToString())
    return session.run(None, {session.get_inputs()[0].name: x.astype(np.float32)})


CASES = {
    "regression": (MLPRegressor, 1),
    "two-classes": (MLPClassifier, 1),
    "three-classes": (MLPClassifier, 3),
}


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("activation", ["relu", "tanh", "logistic"])
def test_mlp_gradients_equal_back_propagation_of_sklearn(case, activation):
    kind, columns = CASES[case]
    rng = np.random.RandomState(0)
    x = rng.normal(size=(20, 7))
    y = {
        "regression": rng.normal(size=20),
        "two-classes": np.arange(20) % 2,
        "three-classes": np.arange(20) % 3,
    }[case]
    mlp = kind(hidden_layer_sizes=(6, 4), activation=activation, alpha=0.0, max_iter=1)
    mlp.set_params(random_state=0).fit(x, y)
    target = y.reshape(-1, 1) if columns == 1 else np.eye(3)[y]
    depth = len(mlp.coefs_)
    loss, coefs, intercepts = mlp._backprop(
        x, target, None, [x, *[None] * depth], [None] * depth, [None] * depth, [None] * depth
    )

    weights = {}
    for i in range(depth):
        weights[f"coefs.{i}"] = mlp.coefs_[i].astype(np.float32)
        weights[f"intercepts.{i}"] = mlp.intercepts_[i].astype(np.float32)
    chosen = (
        regression_loss("squared_error")
        if kind is MLPRegressor
        else classification_loss("log_loss", columns, "logits")
    )
    function = objective(chosen, weighted=False, penalty=None, weights=())
    base = load_normalized(dense_net(activation, weights))
    names = list(base.graph.initializers)
    epoch = epoch_model(base, function, SGD(), names, chosen_by_user=True)
    session = runtime.create(epoch.model.SerializeToString(), threads=1)
    labels = y.astype(np.int64) if columns == 3 else target.astype(np.float32)
    *updated, losses = runtime.run(
        session,
        None,
        {
            "epoch/X": x.astype(np.float32),
            "epoch/target": labels,
            "epoch/order": np.arange(20),
            "epoch/batches": np.array(1),
            "epoch/rows_per_batch": np.array([20]),
            "epoch/rates": np.ones(1, np.float32),
            "epoch/steps_before": np.array(0),
            **{f"epoch/{n}": a for n, a in weights.items()},
        },
    )
    # With a learning rate of 1 the step of plain descent is the gradient.
    gradients = {
        n: weights[n].astype(np.float64) - a for n, a in zip(epoch.parameters, updated, strict=True)
    }
    assert losses[0] == pytest.approx(loss, rel=1e-5)
    for i in range(depth):
        np.testing.assert_allclose(gradients[f"coefs.{i}"], coefs[i], atol=1e-5)
        np.testing.assert_allclose(gradients[f"intercepts.{i}"], intercepts[i], atol=1e-5)


def test_training_follows_torch():
    rng = np.random.RandomState(0)
    x = rng.normal(size=(300, 12)).astype(np.float32)
    y = np.tanh(x[:, 0] + x[:, 1] * x[:, 2]).astype(np.float32)
    model = OnnxRegressor(hidden_layer_sizes=(16, 8), max_iter=20, tol=None, random_state=5)
    model.fit(x, y)

    random = np.random.RandomState(5)
    layers = []
    weights = list(dense_weights([12, 16, 8, 1], "relu", random).values())
    for w, b in zip(weights[::2], weights[1::2], strict=True):
        linear = torch.nn.Linear(*w.shape)
        linear.weight.data, linear.bias.data = torch.from_numpy(w.T.copy()), torch.from_numpy(b)
        layers += [linear, torch.nn.ReLU()]
    net = torch.nn.Sequential(*layers[:-1])
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    curve = []
    for _ in range(20):
        total = 0.0
        for pick in torch.from_numpy(random.permutation(300)).split(64):
            optimizer.zero_grad()
            error = net(torch.from_numpy(x)[pick]) - torch.from_numpy(y)[pick, None]
            loss = (error**2).mean() / 2
            loss.backward()
            optimizer.step()
            total += loss.item() * len(pick)
        curve.append(total / 300)
    np.testing.assert_allclose(model.loss_curve_, curve, rtol=1e-5)


PIPELINES = {
    "plain": lambda: LogisticRegression(),
    "scaled": lambda: make_pipeline(StandardScaler(), LogisticRegression()),
    "bins": lambda: make_pipeline(
        KBinsDiscretizer(4, encode="ordinal", quantile_method="averaged_inverted_cdf"),
        LogisticRegression(),
    ),
    "many": lambda: make_pipeline(
        StandardScaler(),
        PCA(3),
        PolynomialFeatures(2),
        MLPClassifier((8,), max_iter=20, random_state=0),
    ),
}


@pytest.mark.parametrize("case", list(PIPELINES))
def test_the_last_step_of_a_pipeline_is_trained(case):
    pipeline = PIPELINES[case]().fit(IRIS, NAMES)
    model = OnnxClassifier(pipeline, learning_rate=0.02, max_iter=60, tol=None, random_state=0)
    before = model.max_iter
    model.fit(IRIS, NAMES)
    assert model.loss_curve_[-1] < model.loss_curve_[0]
    assert model.score(IRIS, NAMES) >= pipeline.score(IRIS, NAMES)
    label, probabilities = run(model.to_onnx(), IRIS)
    np.testing.assert_array_equal(label, model.predict(IRIS))
    np.testing.assert_allclose(probabilities, model.predict_proba(IRIS), atol=1e-5)
    # Pre-processing is what it was.
    old, new = (
        {t.name: ir.from_proto(t).numpy() for t in m.graph.initializer}
        for m in (convert(pipeline, IRIS), model.to_onnx())
    )
    changed = {n for n in old if not np.array_equal(old[n], new[n])}
    assert changed == set(model.parameters_)
    assert not any(n.startswith("pre/") for n in changed)
    assert clone(model).fit(IRIS, NAMES).n_iter_ == before


def test_a_pipeline_of_numbers():
    pipeline = make_pipeline(StandardScaler(), Ridge()).fit(DIABETES[:50], SUGAR[:50])
    model = OnnxRegressor(pipeline, learning_rate=0.01, max_iter=60, tol=None, random_state=0)
    model.fit(DIABETES, SUGAR)
    assert model.score(DIABETES, SUGAR) > 0.5 > pipeline.score(DIABETES, SUGAR)
    np.testing.assert_allclose(
        run(model.to_onnx(), DIABETES)[0].ravel(), model.predict(DIABETES), rtol=1e-4
    )


def test_unfitted_pipeline_is_an_error():
    with pytest.raises(PrepareError, match="Pipeline is not fitted"):
        OnnxClassifier(make_pipeline(StandardScaler(), LogisticRegression())).fit(IRIS, NAMES)


NET = """
<ir_version: 10, opset_import: ["": 21]>
net (float[n, 4] x) => (float[n, 3] p)
<float[4, 3] w = {0.1, 0.2, 0.3, 0.1, -0.2, 0.3, 0.5, -0.1, 0.3, 0.1, 0.2, 0.1},
 float[3] b = {0, 0, 0}, float[4] scale = {0.5, 0.5, 0.5, 0.5}>
{ s = Mul(x, scale)  h = MatMul(s, w)  z = Add(h, b)  p = Softmax <axis = 1> (z) }
"""


def test_any_graph_with_a_frozen_part():
    graph = onnx.parser.parse_model(NET)
    settings = {"learning_rate": 0.1, "max_iter": 60, "tol": None, "random_state": 0}
    model = OnnxClassifier(graph, freeze=["scale"], **settings).fit(IRIS, KIND)
    assert set(model.parameters_) == {"w", "b"}
    assert model.score(IRIS, KIND) > 0.95
    (p,) = run(model.to_onnx(), IRIS)
    np.testing.assert_allclose(p, model.predict_proba(IRIS), atol=1e-6)
    whole = OnnxClassifier(graph, **settings).fit(IRIS, KIND)
    assert set(whole.parameters_) == {"w", "b", "scale"}
    assert whole.loss_curve_[-1] < whole.loss_curve_[0]


@pytest.mark.parametrize(
    ("settings", "labels", "message"),
    [
        ({"output": "q"}, KIND, "unknown output: 'q'"),
        ({"train": ["v"]}, KIND, "no such parameter"),
        ({}, KIND > 0, r"3 column\(s\) for 2 classes"),
    ],
)
def test_settings_that_do_not_match_the_graph(settings, labels, message):
    with pytest.raises(PrepareError, match=message):
        OnnxClassifier(onnx.parser.parse_model(NET), **settings).fit(IRIS, labels)


def test_dropout_and_batch_normalization_train():
    text = """
    <ir_version: 10, opset_import: ["": 21]>
    net (float[n, 10] x) => (float[n, 1] y)
    <float[8] s = {1, 1, 1, 1, 1, 1, 1, 1}, float[8] b = {0, 0, 0, 0, 0, 0, 0, 0},
     float[8] m = {0, 0, 0, 0, 0, 0, 0, 0}, float[8] v = {1, 1, 1, 1, 1, 1, 1, 1},
     float r = {0.2}, bool off = {0}>
    { h = MatMul(x, w)  n = BatchNormalization(h, s, b, m, v)  a = Relu(n)
      d = Dropout(a, r, off)  y = MatMul(d, u) }
    """
    graph = onnx.parser.parse_model(text)
    rng = np.random.RandomState(0)
    for name, shape in (("w", (10, 8)), ("u", (8, 1))):
        array = (rng.normal(size=shape) / 3).astype(np.float32)
        graph.graph.initializer.append(ir.to_proto(ir.Tensor(array, name=name)))
    model = OnnxRegressor(graph, learning_rate=0.01, max_iter=60, tol=None, random_state=0)
    x = 20 * DIABETES
    model.fit(x, SUGAR)
    assert model.loss_curve_[-1] < 0.5 * model.loss_curve_[0]
    trained = {t.name: ir.from_proto(t).numpy() for t in model.to_onnx().graph.initializer}
    assert np.abs(trained["m"]).max() > 0  # running statistics moved
    np.testing.assert_allclose(
        run(model.to_onnx(), x)[0].ravel(), model.predict(x), rtol=1e-4, atol=1e-4
    )
