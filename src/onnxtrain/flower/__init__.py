"""Federations of Flower: ClientApps and ServerApps over artifacts (extra ``onnxtrain[flower]``)."""

from onnxtrain.flower.checked_strategy import CheckedStrategy, Refusal
from onnxtrain.flower.client import client_app
from onnxtrain.flower.server import server_app
from onnxtrain.flower.updates import accumulated, pseudo_gradient

__all__ = [
    "CheckedStrategy",
    "Refusal",
    "accumulated",
    "client_app",
    "pseudo_gradient",
    "server_app",
]
