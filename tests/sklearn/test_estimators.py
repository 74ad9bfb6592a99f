"""Estimators on data: what they learn, and that it can be stopped, resumed, searched and saved."""

import pickle

import numpy as np
import onnx
import pytest
from onnxruntime import InferenceSession
from sklearn.base import clone
from sklearn.datasets import load_iris, make_classification, make_regression
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.linear_model import ElasticNet, LogisticRegression, Ridge
from sklearn.model_selection import GridSearchCV
from sklearn.neural_network import MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from onnxtrain.errors import PrepareError
from onnxtrain.optim import SGD
from onnxtrain.sklearn import OnnxClassifier, OnnxRegressor

X, Y = make_regression(300, 6, noise=1.0, random_state=0)
Y = Y / 50
IRIS, KIND = load_iris(return_X_y=True)
NAMES = np.array(["setosa", "versicolor", "virginica"])[KIND]


def run(model: onnx.ModelProto, x: np.ndarray) -> list[np.ndarray]:
    session = InferenceSession(model.SerializeToString())
    return session.run(None, {session.get_inputs()[0].name: x.astype(np.float32)})


def test_linear_regression_finds_the_minimum():
    model = OnnxRegressor(
        optimizer="sgd", learning_rate=0.1, batch_size=300, max_iter=300, tol=None, random_state=0
    ).fit(X, Y)
    exact = np.linalg.lstsq(np.c_[X, np.ones(300)], Y, rcond=None)[0]
    parameters = model.parameters_
    np.testing.assert_allclose(parameters["coefs.0"].ravel(), exact[:-1], rtol=1e-4)
    np.testing.assert_allclose(parameters["intercepts.0"], exact[-1:], atol=1e-4)
    np.testing.assert_allclose(run(model.to_onnx(), X)[0].ravel(), model.predict(X), atol=1e-5)
    assert len(model.loss_curve_) == model.n_iter_ == 300
    assert model.score(X, Y) > 0.99


@pytest.mark.parametrize(
    ("penalty", "exact"),
    [
        ("l2", Ridge(alpha=300 * 0.5)),
        ("elasticnet", ElasticNet(alpha=0.5, l1_ratio=0.3, tol=1e-8)),
        ("l1", ElasticNet(alpha=0.5, l1_ratio=1.0, tol=1e-8)),
    ],
)
@pytest.mark.parametrize("rate", [0.02, 0.1])
def test_penalties_have_their_minimum_whatever_the_learning_rate(penalty, exact, rate):
    model = OnnxRegressor(
        optimizer="sgd",
        learning_rate=rate,
        batch_size=300,
        max_iter=int(40 / rate),
        tol=None,
        penalty=penalty,
        alpha=0.5,
        l1_ratio=0.3,
    ).fit(X, Y)
    exact.fit(X, Y)
    coefs = model.parameters_["coefs.0"].ravel()
    # A subgradient step of l1 swings around 0 by learning rate times alpha.
    np.testing.assert_allclose(coefs, exact.coef_, atol=5e-4 if penalty == "l2" else 0.06)
    np.testing.assert_allclose(model.parameters_["intercepts.0"], exact.intercept_, atol=0.02)


def test_nets_start_where_those_of_sklearn_do():
    ours = OnnxRegressor(hidden_layer_sizes=(5, 3), learning_rate=1e-12, max_iter=1, tol=None)
    theirs = MLPRegressor(hidden_layer_sizes=(5, 3), learning_rate_init=1e-12, max_iter=1)
    ours.set_params(random_state=3).fit(X, Y)
    with pytest.warns(ConvergenceWarning):
        theirs.set_params(random_state=3).fit(X, Y)
    for i in range(3):
        np.testing.assert_allclose(ours.parameters_[f"coefs.{i}"], theirs.coefs_[i], rtol=1e-6)


def test_several_targets():
    x, y = make_regression(200, 5, n_targets=3, random_state=0)
    y = y / 100
    model = OnnxRegressor(learning_rate=0.03, max_iter=150, tol=None, random_state=0).fit(x, y)
    assert model.predict(x).shape == (200, 3)
    assert model.score(x, y) > 0.99


@pytest.mark.parametrize("loss", ["absolute_error", "huber", "smooth_l1:beta=0.5"])
def test_losses(loss):
    model = OnnxRegressor(loss=loss, learning_rate=0.02, max_iter=80, tol=None, random_state=0)
    assert model.fit(X, Y).score(X, Y) > 0.97


def test_a_loss_function():
    def quantile(op, prediction, target):
        d = op.Sub(target, prediction)
        return op.Max(op.Mul(d, 0.9), op.Mul(d, -0.1))

    rng = np.random.RandomState(0)
    x, y = rng.rand(500, 1), rng.rand(500)
    model = OnnxRegressor(loss=quantile, learning_rate=0.01, max_iter=100, tol=None).fit(x, y)
    assert 0.85 < np.mean(y < model.predict(x)) < 0.95


def test_weights_stand_for_repeated_rows():
    rng = np.random.RandomState(0)
    weight = rng.randint(0, 4, 300)
    settings = {"batch_size": 2000, "learning_rate": 0.05, "max_iter": 50, "tol": None}
    one = OnnxRegressor(**settings, random_state=0).fit(X, Y, sample_weight=weight)
    two = OnnxRegressor(**settings, random_state=0).fit(
        np.repeat(X, weight, axis=0), np.repeat(Y, weight)
    )
    np.testing.assert_allclose(one.predict(X), two.predict(X), rtol=1e-4, atol=1e-5)


def test_classifier_with_names():
    model = OnnxClassifier(hidden_layer_sizes=(8,), learning_rate=0.02, max_iter=60, tol=None)
    model.set_params(random_state=0).fit(IRIS, NAMES)
    assert model.score(IRIS, NAMES) > 0.95
    p = model.predict_proba(IRIS)
    np.testing.assert_allclose(p.sum(1), 1, rtol=1e-9)
    label, probabilities = run(model.to_onnx(), IRIS)
    np.testing.assert_array_equal(label, model.predict(IRIS))
    np.testing.assert_allclose(probabilities, p, atol=1e-6)


def test_logistic_regression_finds_the_minimum():
    x, y = make_classification(200, 5, flip_y=0.2, random_state=0)
    exact = LogisticRegression(C=1 / (200 * 0.1), tol=1e-8).fit(x, y)
    model = OnnxClassifier(
        optimizer=SGD(momentum=0.9, nesterov=True),
        learning_rate=0.1,
        batch_size=200,
        max_iter=300,
        tol=None,
        penalty="l2",
        alpha=0.1,
    ).fit(x, y)
    np.testing.assert_allclose(model.parameters_["coefs.0"].T, exact.coef_, atol=1e-4)
    label, probabilities = run(model.to_onnx(), x)
    np.testing.assert_array_equal(label, model.predict(x))
    np.testing.assert_allclose(probabilities, exact.predict_proba(x), atol=1e-4)


def test_class_weights_act_as_row_weights():
    settings = {"learning_rate": 0.02, "max_iter": 20, "tol": None, "random_state": 0}
    table = {"setosa": 1.0, "versicolor": 2.0, "virginica": 5.0}
    by_class = OnnxClassifier(class_weight=table, **settings).fit(IRIS, NAMES)
    by_row = OnnxClassifier(**settings).fit(IRIS, NAMES, [table[n] for n in NAMES])
    np.testing.assert_array_equal(by_class.predict_proba(IRIS), by_row.predict_proba(IRIS))
    balanced = OnnxClassifier(class_weight="balanced", **settings).fit(IRIS[:120], NAMES[:120])
    assert balanced.predict(IRIS).shape == (150,)


def test_hinge_has_no_probabilities():
    x, y = make_classification(200, 5, random_state=0)
    model = OnnxClassifier(loss="hinge", learning_rate=0.02, max_iter=50, tol=None).fit(x, y)
    assert model.score(x, y) > 0.85
    assert not hasattr(model, "predict_proba")


def test_grid_search_over_learning_rates():
    pipeline = make_pipeline(
        StandardScaler(), OnnxClassifier(max_iter=20, tol=None, random_state=0)
    )
    rates = [1e-5, 1e-3, 3e-2]
    search = GridSearchCV(pipeline, {"onnxclassifier__learning_rate": rates}, cv=3)
    search.fit(IRIS, NAMES)
    assert search.best_params_ == {"onnxclassifier__learning_rate": 3e-2}
    assert search.best_score_ > 0.85


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "lamb", "rmsprop"])
def test_pickled_estimators_predict_and_resume_alike(optimizer):
    model = OnnxRegressor(
        hidden_layer_sizes=(5,), optimizer=optimizer, learning_rate=0.01, random_state=0
    )
    for _ in range(3):
        model.partial_fit(X, Y)
    copy = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(copy.predict(X), model.predict(X))
    for _ in range(3):
        model.partial_fit(X, Y)
        copy.partial_fit(X, Y)
    np.testing.assert_array_equal(copy.predict(X), model.predict(X))
    assert copy.loss_curve_ == model.loss_curve_
    assert model.t_ == 6 * 5


def test_partial_fit_is_fit_in_pieces():
    settings = {"learning_rate": 0.01, "tol": None, "random_state": 0}
    whole = OnnxClassifier(max_iter=5, **settings).fit(IRIS, NAMES)
    pieces = OnnxClassifier(**settings)
    for _ in range(5):
        pieces.partial_fit(IRIS, NAMES, classes=np.unique(NAMES))
    np.testing.assert_array_equal(whole.predict_proba(IRIS), pieces.predict_proba(IRIS))


def test_warm_start_goes_on():
    model = OnnxRegressor(warm_start=True, max_iter=10, tol=None, learning_rate=0.01)
    model.fit(X, Y)
    first = model.loss_curve_[-1]
    model.fit(X, Y)
    assert model.n_iter_ == 20
    assert model.loss_curve_[10] < first


def test_early_stopping_keeps_the_best():
    x, y = make_classification(300, 20, n_informative=3, flip_y=0.3, random_state=0)
    model = OnnxClassifier(
        hidden_layer_sizes=(50,),
        learning_rate=0.02,
        early_stopping=True,
        n_iter_no_change=5,
        random_state=0,
    ).fit(x, y)
    scores = model.validation_scores_
    assert len(scores) == model.n_iter_ < 200
    assert model.best_validation_score_ == max(scores)


def test_reaching_max_iter_warns():
    with pytest.warns(ConvergenceWarning, match="max_iter=3 reached"):
        OnnxRegressor(max_iter=3, learning_rate=0.1).fit(X, Y)


def test_schedules_change_the_rate():
    settings = {"optimizer": "sgd", "learning_rate": 0.05, "max_iter": 20, "tol": None}
    one = OnnxRegressor(**settings, random_state=0).fit(X, Y)
    two = OnnxRegressor(**settings, random_state=0, schedule="cosine").fit(X, Y)
    assert one.score(X, Y) != two.score(X, Y)
    assert two.score(X, Y) > 0.99


def test_clone_copies_settings_only():
    model = OnnxClassifier(hidden_layer_sizes=(3,), class_weight={"setosa": 2.0}, max_iter=2)
    model.set_params(tol=None).fit(IRIS, NAMES)
    copy = clone(model)
    assert copy.get_params() == model.get_params()
    with pytest.raises(NotFittedError):
        copy.predict(IRIS)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"learning_rate": -1}, "learning_rate must be positive"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"penalty": "l3"}, "unknown penalty"),
        ({"loss": "squared"}, "unknown loss"),
        ({"optimizer": "adamm"}, "unknown optimizer"),
        ({"activation": "relu6", "hidden_layer_sizes": (3,)}, "unknown activation"),
    ],
)
def test_invalid_settings_are_reported(settings, message):
    with pytest.raises(PrepareError, match=message):
        OnnxRegressor(**settings).fit(X, Y)


def test_a_loss_that_grows_is_an_error():
    with pytest.raises(ValueError, match="the loss is"):
        OnnxRegressor(optimizer="sgd", learning_rate=1e12, max_iter=50).fit(X, Y)
