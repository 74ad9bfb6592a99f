"""Compare linear regression with SGDRegressor, then continue training a fitted pipeline.

Prints the scores and writes the trained pipeline to runs/sklearn/regression.onnx.
"""

from pathlib import Path

import onnx
from sklearn.datasets import load_diabetes
from sklearn.linear_model import Ridge, SGDRegressor
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from onnxtrain.sklearn import OnnxRegressor

OUT = Path("runs/sklearn")


def main() -> dict[str, float]:
    X, y = load_diabetes(return_X_y=True)
    X, X_test, y, y_test = train_test_split(X, y / 100, random_state=0)
    scores = {}
    for name, model in {
        "SGDRegressor": SGDRegressor(random_state=0),
        "OnnxRegressor": OnnxRegressor(learning_rate=0.02, max_iter=100, tol=None, random_state=0),
    }.items():
        scores[name] = make_pipeline(StandardScaler(), model).fit(X, y).score(X_test, y_test)

    # A pipeline fitted on 20 rows; its last step is then trained on all data.
    pipeline = make_pipeline(StandardScaler(), Ridge()).fit(X[:20], y[:20])
    tuned = OnnxRegressor(pipeline, learning_rate=0.01, max_iter=100, tol=None, random_state=0)
    scores["pipeline before"] = pipeline.score(X_test, y_test)
    scores["pipeline after"] = tuned.fit(X, y).score(X_test, y_test)
    OUT.mkdir(parents=True, exist_ok=True)
    onnx.save(tuned.to_onnx(), OUT / "regression.onnx")
    for name, score in scores.items():
        print(f"{name:16} R2 {score:.3f}")
    return scores


if __name__ == "__main__":
    main()
