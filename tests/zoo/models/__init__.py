"""The zoo: small torch modules of our own in the shape of real architectures."""

from . import (
    cnn,
    generative,
    graph_and_points,
    language,
    losses,
    mobile,
    plain,
    recommend,
    recurrent,
    vision_transformers,
)
from .base import ZOO, ZooModel

FAMILIES = (
    plain,
    cnn,
    mobile,
    generative,
    vision_transformers,
    language,
    recurrent,
    graph_and_points,
    recommend,
    losses,
)

__all__ = ["FAMILIES", "ZOO", "ZooModel"]
