"""Federated learning with Flower: ClientApp and ServerApp (extra ``onnxtrain[flower]``)."""

from onnxtrain.flower.client import client_app
from onnxtrain.flower.messages import pseudo_gradient, weighted_mean
from onnxtrain.flower.server import CheckedStrategy, Refusal, server_app

__all__ = [
    "CheckedStrategy",
    "Refusal",
    "client_app",
    "pseudo_gradient",
    "server_app",
    "weighted_mean",
]
