"""Compare OnnxRegressor with MLPRegressor: same data, network, batch size and epochs."""

import time

from sklearn.datasets import make_regression
from sklearn.neural_network import MLPRegressor
from sklearn.preprocessing import scale

from onnxtrain.sklearn import OnnxRegressor


def main(epochs: int = 60) -> dict[str, float]:
    X, y = make_regression(1000, 100, noise=5.0, random_state=0)
    X, y = X.astype("float32"), scale(y).astype("float32")
    common = {"hidden_layer_sizes": (50, 10), "batch_size": 64, "max_iter": epochs}
    models = {
        "MLPRegressor": MLPRegressor(
            **common, alpha=0.0, tol=0.0, n_iter_no_change=epochs + 1, random_state=0
        ),
        "OnnxRegressor": OnnxRegressor(**common, tol=None, random_state=0),
    }
    losses = {}
    for name, model in models.items():
        start = time.perf_counter()
        model.fit(X, y)
        seconds = time.perf_counter() - start
        losses[name] = model.loss_curve_[-1]
        print(f"{name:14} {seconds:6.2f} s  loss {model.loss_curve_[0]:.4f} -> {losses[name]:.5f}")
    return losses


if __name__ == "__main__":
    import warnings

    from sklearn.exceptions import ConvergenceWarning

    warnings.simplefilter("ignore", ConvergenceWarning)
    main()
