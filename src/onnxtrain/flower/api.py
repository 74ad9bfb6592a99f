"""The names of Flower that this package uses, from one place."""

from __future__ import annotations

from onnxtrain.errors import MissingExtraError

try:
    from flwr.app import (
        Array,
        ArrayRecord,
        ConfigRecord,
        Context,
        Message,
        MetricRecord,
        RecordDict,
    )
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg, Result, Strategy
except ImportError as error:
    raise MissingExtraError(
        f"Flower is not installed, or not a release from 1.40 on: {error}\n"
        "hint: pip install 'onnxtrain[flower]'"
    ) from error

__all__ = [
    "Array",
    "ArrayRecord",
    "ClientApp",
    "ConfigRecord",
    "Context",
    "FedAvg",
    "Grid",
    "Message",
    "MetricRecord",
    "RecordDict",
    "Result",
    "ServerApp",
    "Strategy",
]
