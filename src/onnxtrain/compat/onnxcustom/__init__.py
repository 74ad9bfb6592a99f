"""onnxcustom's training classes on stock ONNX Runtime: change the import, keep the program.

Module paths are those of onnxcustom: ``onnxcustom.training.optimizers`` is
``onnxtrain.compat.onnxcustom.training.optimizers``. The guide "Coming from onnxcustom" lists what
differs on purpose.
"""

from onnxtrain.compat.onnxcustom.training.data_loader import OrtDataLoader
from onnxtrain.compat.onnxcustom.training.excs import (
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

__max_supported_opset__ = 15
"""The opset that programs pass to skl2onnx; models of all opsets train."""
__max_supported_opsets__ = {"": __max_supported_opset__, "ai.onnx.ml": 2}


def get_max_opset() -> int:
    """Return the opset that programs pass to skl2onnx."""
    return __max_supported_opset__


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
    "get_max_opset",
    "get_train_initializer",
    "onnx_derivative",
    "onnx_rename_weights",
    "save_onnx_graph",
]
