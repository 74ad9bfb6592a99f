"""Losses by name."""

from __future__ import annotations

from onnxtrain.losses.base import Loss
from onnxtrain.losses.binary import BCE, BCEWithLogits, Hinge, HingeEmbedding
from onnxtrain.losses.classification import NLL, CrossEntropy, MultiMargin
from onnxtrain.losses.ctc import CTC
from onnxtrain.losses.embedding import CosineEmbedding, TripletMargin
from onnxtrain.losses.regression import L1, MSE, Huber, KLDiv, SmoothL1
from onnxtrain.options import make

LOSSES: dict[str, type[Loss]] = {
    "mse": MSE,
    "l1": L1,
    "huber": Huber,
    "smooth_l1": SmoothL1,
    "cross_entropy": CrossEntropy,
    "nll": NLL,
    "bce": BCE,
    "bce_with_logits": BCEWithLogits,
    "kl_div": KLDiv,
    "cosine_embedding": CosineEmbedding,
    "hinge": Hinge,
    "hinge_embedding": HingeEmbedding,
    "multi_margin": MultiMargin,
    "triplet_margin": TripletMargin,
    "ctc": CTC,
}


def loss_by_name(name: str) -> Loss:
    """Return the loss that a name, or a name with options, stands for.

    >>> loss_by_name("cross_entropy:label_smoothing=0.1,axis=-1").label_smoothing
    0.1
    """
    return make(LOSSES, name, "loss", {})
