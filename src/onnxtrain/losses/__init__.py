"""Losses and metrics as ONNX graphs."""

from onnxtrain.losses.attach import Attached, LossLike, MetricLike, attach_loss
from onnxtrain.losses.base import Loss, Target
from onnxtrain.losses.binary import BCE, BCEWithLogits, Hinge, HingeEmbedding
from onnxtrain.losses.ctc import CTC
from onnxtrain.losses.embedding import CosineEmbedding, TripletMargin
from onnxtrain.losses.expand import expand_label_losses
from onnxtrain.losses.labels import NLL, CrossEntropy, MultiMargin
from onnxtrain.losses.metrics import MAE, METRICS, Accuracy, Metric, Perplexity, TopK
from onnxtrain.losses.names import LOSSES
from onnxtrain.losses.regression import L1, MSE, Huber, KLDiv, SmoothL1
from onnxtrain.losses.terms import Weighted, resolve

__all__ = [
    "BCE",
    "CTC",
    "L1",
    "LOSSES",
    "MAE",
    "METRICS",
    "MSE",
    "NLL",
    "Accuracy",
    "Attached",
    "BCEWithLogits",
    "CosineEmbedding",
    "CrossEntropy",
    "Hinge",
    "HingeEmbedding",
    "Huber",
    "KLDiv",
    "Loss",
    "LossLike",
    "Metric",
    "MetricLike",
    "MultiMargin",
    "Perplexity",
    "SmoothL1",
    "Target",
    "TopK",
    "TripletMargin",
    "Weighted",
    "attach_loss",
    "expand_label_losses",
    "resolve",
]
