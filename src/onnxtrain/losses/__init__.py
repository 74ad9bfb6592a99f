"""Losses and metrics as ONNX graphs."""

from onnxtrain.deprecated import aliases
from onnxtrain.losses.attach import Attached, LossLike, MetricLike, attach_loss
from onnxtrain.losses.base import LOSSES, Loss, TargetSpec
from onnxtrain.losses.binary import BCE, BCEWithLogits, Hinge, HingeEmbedding
from onnxtrain.losses.causal_lm import CausalLM
from onnxtrain.losses.classification import NLL, CrossEntropy
from onnxtrain.losses.ctc import CTC
from onnxtrain.losses.embedding import CosineEmbedding, TripletMargin
from onnxtrain.losses.metrics import MAE, METRICS, Accuracy, Metric, Perplexity, TopK
from onnxtrain.losses.multi_margin import MultiMargin
from onnxtrain.losses.ranking import MultipleNegatives, TripletRows
from onnxtrain.losses.regression import L1, MSE, Huber, KLDiv, SmoothL1
from onnxtrain.losses.terms import LossTerm, resolve

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
    "CausalLM",
    "CosineEmbedding",
    "CrossEntropy",
    "Hinge",
    "HingeEmbedding",
    "Huber",
    "KLDiv",
    "Loss",
    "LossLike",
    "LossTerm",
    "Metric",
    "MetricLike",
    "MultiMargin",
    "MultipleNegatives",
    "Perplexity",
    "SmoothL1",
    "TargetSpec",
    "TopK",
    "TripletMargin",
    "TripletRows",
    "attach_loss",
    "resolve",
]

__getattr__ = aliases(
    __name__,
    {"Target": "onnxtrain.losses.TargetSpec", "Weighted": "onnxtrain.losses.LossTerm"},
)
