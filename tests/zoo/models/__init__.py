"""The zoo: small torch modules of our own in the shape of real architectures."""

from . import (
    cnn,
    control_flow,
    generative,
    graph_and_points,
    language,
    losses,
    mobile,
    old_exporter,
    plain,
    recommend,
    recurrent,
    signals,
    vision_transformers,
)
from .base import ZOO, ZooModel

__all__ = [
    "ZOO",
    "ZooModel",
    "cnn",
    "control_flow",
    "generative",
    "graph_and_points",
    "language",
    "losses",
    "mobile",
    "old_exporter",
    "plain",
    "recommend",
    "recurrent",
    "signals",
    "vision_transformers",
]
