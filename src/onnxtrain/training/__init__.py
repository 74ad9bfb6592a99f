"""Training on stock ONNX Runtime."""

from onnxtrain.training.callbacks import Best, Callback, EarlyStopping, MlflowLogger, WandbLogger
from onnxtrain.training.continual import ReplayBuffer
from onnxtrain.training.data import Stream
from onnxtrain.training.data_files import DataFile, read_data
from onnxtrain.training.detection_metrics import CocoMAP, Detections
from onnxtrain.training.evaluation import Evaluation
from onnxtrain.training.fit import History, Run
from onnxtrain.training.lr_finder import LrCurve, find_lr
from onnxtrain.training.metrics import CharErrorRate, DiceScore, MeanIoU, WordErrorRate
from onnxtrain.training.results import Parameters, StepResult
from onnxtrain.training.trainer import Trainer

__all__ = [
    "Best",
    "Callback",
    "CharErrorRate",
    "CocoMAP",
    "DataFile",
    "Detections",
    "DiceScore",
    "EarlyStopping",
    "Evaluation",
    "History",
    "LrCurve",
    "MeanIoU",
    "MlflowLogger",
    "Parameters",
    "ReplayBuffer",
    "Run",
    "StepResult",
    "Stream",
    "Trainer",
    "WandbLogger",
    "WordErrorRate",
    "find_lr",
    "read_data",
]
