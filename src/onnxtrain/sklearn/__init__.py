"""Train ONNX graphs with scikit-learn's estimator API."""

from onnxtrain.sklearn.classifier import OnnxClassifier
from onnxtrain.sklearn.nets import convert
from onnxtrain.sklearn.regressor import OnnxRegressor

__all__ = ["OnnxClassifier", "OnnxRegressor", "convert"]
