"""Train with onnxcustom on ``install()`` and with the changed import: the weights are equal.

``make upstream`` runs this program where a checkout of onnxcustom is.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
from skl2onnx import to_onnx
from sklearn.datasets import make_regression
from sklearn.linear_model import LinearRegression
from sklearn.neural_network import MLPRegressor

ORIGINAL, OURS = "onnxcustom", "onnxtrain.compat.onnxcustom"
SCHEDULES = ("constant", "invscaling", "optimal")
data: Any = make_regression(203, n_features=3, bias=2, random_state=0)
X, Y = (array.astype(np.float32) for array in (data[0], data[1] / 50))


class Library:
    """The classes of one of the two packages."""

    def __init__(self, package: str) -> None:
        names = {
            "training.optimizers": ["OrtGradientOptimizer"],
            "training.optimizers_partial": ["OrtGradientForwardBackwardOptimizer"],
            "training.sgd_learning_rate": ["LearningRateSGD", "LearningRateSGDNesterov"],
            "training.sgd_learning_loss": ["NegLogLearningLoss"],
            "utils.orttraining_helper": ["add_loss_output"],
            "utils.onnx_helper": ["onnx_rename_weights"],
        }
        self.names = {
            name: getattr(importlib.import_module(f"{package}.{module}"), name)
            for module, some in names.items()
            for name in some
        }

    def __getattr__(self, name: str) -> Any:
        return self.names[name]


def linear() -> Any:
    model = LinearRegression().fit(X, Y)
    return to_onnx(model, X, target_opset=15, black_op={"LinearRegressor"})


def mlp(lib: Library) -> Any:
    model = MLPRegressor(hidden_layer_sizes=(5,), max_iter=2, random_state=0).fit(X, Y)
    return lib.onnx_rename_weights(to_onnx(model, X, target_opset=15))


def with_loss(lib: Library, **settings: Any) -> Any:
    onx, names = lib.add_loss_output(linear()), ["coef", "intercept"]
    return lib.OrtGradientOptimizer(onx, names, max_iter=20, **settings)


def forward_backward(lib: Library, onx: Any = None, **settings: Any) -> Any:
    return lib.OrtGradientForwardBackwardOptimizer(
        linear() if onx is None else onx, max_iter=20, **settings
    )


def programs() -> dict[str, Callable[[Library], Any]]:
    """Return functions that train, by name."""
    held = {"X_val": X[:50], "y_val": Y[:50]}
    rows = np.random.default_rng(0).random(len(X)).astype(np.float32)
    classes = (Y > 0).astype(np.int64).reshape(-1, 1)
    made: dict[str, Callable[[Library], Any]] = {}
    for kind in SCHEDULES:
        made[f"loss in the model, {kind}"] = lambda lib, kind=kind: with_loss(
            lib, learning_rate=lib.LearningRateSGD(1e-2, learning_rate=kind)
        ).fit(X, Y, **held)
        made[f"Nesterov, {kind}"] = lambda lib, kind=kind: forward_backward(
            lib, learning_rate=lib.LearningRateSGDNesterov(1e-3, learning_rate=kind)
        ).fit(X, Y, **held)
    made["from the weights of the model"] = lambda lib: with_loss(
        lib, learning_rate=1e-2, warm_start=True
    ).fit(X, Y)
    made["multi-layer perceptron"] = lambda lib: forward_backward(
        lib, mlp(lib), learning_rate=1e-2
    ).fit(X, Y)
    made["weights of rows"] = lambda lib: forward_backward(
        lib, learning_rate=1e-2, weight_name="weight"
    ).fit(X, Y, rows)
    made["log loss"] = lambda lib: forward_backward(
        lib, learning_rate=1e-1, learning_loss=lib.NegLogLearningLoss()
    ).fit(X, classes)
    return made


def arrays(estimator: Any) -> list[np.ndarray]:
    state = estimator.get_state()
    values = [state[n] for n in sorted(state)] if isinstance(state, dict) else state
    return [np.array(v if isinstance(v, np.ndarray) else v.numpy()) for v in values]


def main() -> None:
    for name, train in programs().items():
        trained = []
        for package in (ORIGINAL, OURS):
            np.random.seed(0)
            trained.append(train(Library(package)))
        first, second = trained
        for a, b in zip(arrays(first), arrays(second), strict=True):
            np.testing.assert_array_equal(a, b, err_msg=name)
        for what in ("train_losses_", "validation_losses_"):
            losses = [np.ravel(getattr(t, what) or [0.0]) for t in trained]
            np.testing.assert_allclose(*losses, rtol=1e-5, atol=1e-6, err_msg=f"{name}, {what}")


if __name__ == "__main__":
    main()
