"""Differentiate and train any ONNX model in standard operators, on stock ONNX Runtime."""

import logging

from onnxtrain import examples, losses, optim, testing
from onnxtrain.adapters import Adapted, load_adapter, lora
from onnxtrain.artifacts import Artifacts, Clip, Precision, load_weights
from onnxtrain.artifacts.build import build
from onnxtrain.artifacts.distill import distill, teacher_logits
from onnxtrain.autodiff.explain import Report, explain
from onnxtrain.autodiff.gradients import expand_gradients, grad, jvp, parameters, vjp
from onnxtrain.autodiff.jacobians import hessian, hvp, jacobian, save_casadi, vmap
from onnxtrain.autodiff.rule_registry import register_vjp
from onnxtrain.autodiff.split import Split, split
from onnxtrain.finetuning.finetune import finetune
from onnxtrain.graph.io import load
from onnxtrain.heads import replace_head
from onnxtrain.lowering.lower import lower
from onnxtrain.optim.privacy import DP
from onnxtrain.planning import Plan, plan
from onnxtrain.quantization import fold_quantizers, quantize_aware
from onnxtrain.runtime.devices import register_device
from onnxtrain.text.generate import generate
from onnxtrain.training import (
    Callback,
    EarlyStopping,
    MlflowLogger,
    ReplayBuffer,
    Stream,
    Trainer,
    WandbLogger,
    find_lr,
)

__version__ = "0.2.0"

# Silent by default; logging.basicConfig(level="INFO") shows decisions of the library.
logging.getLogger(__name__).addHandler(logging.NullHandler())

__all__ = [
    "DP",
    "Adapted",
    "Artifacts",
    "Callback",
    "Clip",
    "EarlyStopping",
    "MlflowLogger",
    "Plan",
    "Precision",
    "ReplayBuffer",
    "Report",
    "Split",
    "Stream",
    "Trainer",
    "WandbLogger",
    "build",
    "distill",
    "examples",
    "expand_gradients",
    "explain",
    "find_lr",
    "finetune",
    "fold_quantizers",
    "generate",
    "grad",
    "hessian",
    "hvp",
    "jacobian",
    "jvp",
    "load",
    "load_adapter",
    "load_weights",
    "lora",
    "losses",
    "lower",
    "optim",
    "parameters",
    "plan",
    "quantize_aware",
    "register_device",
    "register_vjp",
    "replace_head",
    "save_casadi",
    "split",
    "teacher_logits",
    "testing",
    "vjp",
    "vmap",
]


def __dir__() -> list[str]:
    # Submodules become attributes when they are imported; they are not part of the API.
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
