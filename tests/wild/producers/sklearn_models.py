"""Estimators of scikit-learn by skl2onnx. Runs in the producers' venv."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from skl2onnx import to_onnx
from sklearn import (
    decomposition,
    ensemble,
    linear_model,
    naive_bayes,
    neural_network,
    pipeline,
    preprocessing,
    svm,
)

ESTIMATORS = {
    "logistic": linear_model.LogisticRegression(),
    "linear": linear_model.LinearRegression(),
    "ridge": linear_model.Ridge(),
    "mlp": neural_network.MLPClassifier(hidden_layer_sizes=(16,), max_iter=50),
    "mlp-regressor": neural_network.MLPRegressor(hidden_layer_sizes=(16,), max_iter=50),
    "linear-svm": svm.LinearSVC(),
    "naive-bayes": naive_bayes.GaussianNB(),
    "scaled": pipeline.make_pipeline(
        preprocessing.StandardScaler(), linear_model.LogisticRegression()
    ),
    "pca": pipeline.make_pipeline(decomposition.PCA(4), linear_model.LinearRegression()),
    "normalized": pipeline.make_pipeline(preprocessing.Normalizer(), linear_model.Ridge()),
    "forest": ensemble.RandomForestClassifier(4),
    "rbf-svm": svm.SVR(),
}


def main(folder: Path) -> None:
    """Write all of them; say what cannot be made."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((120, 6)).astype(np.float32)
    y = (x @ rng.standard_normal(6) > 0).astype(np.int64) + (x[:, 0] > 1)
    for name, estimator in ESTIMATORS.items():
        try:
            estimator.fit(x, y)
            last = estimator[-1] if hasattr(estimator, "steps") else estimator
            options = {id(last): {"zipmap": False}} if hasattr(last, "classes_") else None
            if name == "linear-svm":
                options = None
            model = to_onnx(estimator, x[:1], options=options)
            (folder / f"{name}.onnx").write_bytes(model.SerializeToString())
        except Exception as error:  # a tool that fails on one model still makes the others
            print(f"not made: {name}: {type(error).__name__}: {str(error)[:150]}", flush=True)
        else:
            print(f"{name}: made", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
