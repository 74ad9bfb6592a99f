"""Losses and metrics as ONNX graphs."""

from onnxtrain.losses.attach import Attached, LossLike, LossTerm, MetricLike, attach_loss, resolve
from onnxtrain.losses.causal_lm import CausalLM
from onnxtrain.losses.classification import (
    BCE,
    NLL,
    BCEWithLogits,
    CrossEntropy,
    Hinge,
    HingeEmbedding,
    MultiMargin,
)
from onnxtrain.losses.ctc import CTC
from onnxtrain.losses.distillation import Distillation
from onnxtrain.losses.loss import LOSSES, Loss, TargetSpec
from onnxtrain.losses.metrics import MAE, METRICS, Accuracy, Metric, Perplexity, TopK
from onnxtrain.losses.preference import DPO, IPO, KTO, ORPO
from onnxtrain.losses.regression import (
    L1,
    MSE,
    CosineEmbedding,
    Huber,
    KLDiv,
    MultipleNegatives,
    SmoothL1,
    TripletMargin,
    TripletRows,
)

__all__ = [
    "BCE",
    "CTC",
    "DPO",
    "IPO",
    "KTO",
    "L1",
    "LOSSES",
    "MAE",
    "METRICS",
    "MSE",
    "NLL",
    "ORPO",
    "Accuracy",
    "Attached",
    "BCEWithLogits",
    "CausalLM",
    "CosineEmbedding",
    "CrossEntropy",
    "Distillation",
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
