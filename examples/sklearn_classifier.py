"""Classify digits with a scikit-learn estimator: grid search, early stopping, ONNX export.

Writes the trained model to runs/sklearn/digits.onnx, with label and probabilities as outputs.
"""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from sklearn.datasets import load_digits
from sklearn.model_selection import GridSearchCV, train_test_split

from onnxtrain.sklearn import OnnxClassifier

OUT = Path("runs/sklearn")


def main() -> float:
    data = load_digits()
    X, X_test, y, y_test = train_test_split(
        (data.data / 16).astype(np.float32), data.target, random_state=0
    )
    search = GridSearchCV(
        OnnxClassifier(hidden_layer_sizes=(50,), max_iter=10, tol=None, random_state=0),
        {"learning_rate": [1e-4, 1e-3, 1e-2]},
        cv=3,
    ).fit(X, y)
    print("best:", search.best_params_)
    model = OnnxClassifier(
        hidden_layer_sizes=(50,),
        early_stopping=True,
        penalty="l2",
        random_state=0,
        **search.best_params_,
    ).fit(X, y)
    OUT.mkdir(parents=True, exist_ok=True)
    onnx.save(model.to_onnx(), OUT / "digits.onnx")
    label, _ = onnxruntime.InferenceSession(OUT / "digits.onnx").run(None, {"X": X_test})
    accuracy = float((label == y_test).mean())
    print(f"{model.n_iter_} epochs, accuracy on held-out digits: {accuracy:.1%}")
    return accuracy


if __name__ == "__main__":
    main()
