"""onnxcustom's training classes on stock ONNX Runtime: change the import, keep the program.

Module paths are those of onnxcustom: ``onnxcustom.training.optimizers`` is
``onnxtrain.compat.onnxcustom.training.optimizers``. Three things differ on purpose: gradients of
the absolute and elastic losses have the right sign, penalties are scaled by the learning rate, and
weights need not be sorted.
"""

from onnxtrain.compat.onnxcustom.training.data_loader import OrtDataLoader
from onnxtrain.compat.onnxcustom.training.errors import (
    ConvergenceError,
    ConvergenceWarning,
    EvaluationError,
    ProviderError,
)
from onnxtrain.compat.onnxcustom.training.grad_helper import DerivativeOptions, onnx_derivative
from onnxtrain.compat.onnxcustom.training.optimizers import OrtGradientOptimizer
from onnxtrain.compat.onnxcustom.training.optimizers_partial import (
    OrtGradientForwardBackwardOptimizer,
)
from onnxtrain.compat.onnxcustom.training.ortgradient import (
    OrtGradientForwardBackward,
    OrtGradientForwardBackwardFunction,
)
from onnxtrain.compat.onnxcustom.training.sgd_learning_loss import (
    AbsoluteLearningLoss,
    BaseLearningLoss,
    ElasticLearningLoss,
    NegLogLearningLoss,
    SquareLearningLoss,
)
from onnxtrain.compat.onnxcustom.training.sgd_learning_penalty import (
    BaseLearningPenalty,
    ElasticLearningPenalty,
    NoLearningPenalty,
)
from onnxtrain.compat.onnxcustom.training.sgd_learning_rate import (
    BaseLearningRate,
    LearningRateSGD,
    LearningRateSGDNesterov,
)
from onnxtrain.compat.onnxcustom.utils.onnx_helper import onnx_rename_weights, save_onnx_graph
from onnxtrain.compat.onnxcustom.utils.orttraining_helper import (
    add_loss_output,
    get_train_initializer,
)

__all__ = [
    "AbsoluteLearningLoss",
    "BaseLearningLoss",
    "BaseLearningPenalty",
    "BaseLearningRate",
    "ConvergenceError",
    "ConvergenceWarning",
    "DerivativeOptions",
    "ElasticLearningLoss",
    "ElasticLearningPenalty",
    "EvaluationError",
    "LearningRateSGD",
    "LearningRateSGDNesterov",
    "NegLogLearningLoss",
    "NoLearningPenalty",
    "OrtDataLoader",
    "OrtGradientForwardBackward",
    "OrtGradientForwardBackwardFunction",
    "OrtGradientForwardBackwardOptimizer",
    "OrtGradientOptimizer",
    "ProviderError",
    "SquareLearningLoss",
    "add_loss_output",
    "get_train_initializer",
    "onnx_derivative",
    "onnx_rename_weights",
    "save_onnx_graph",
]
