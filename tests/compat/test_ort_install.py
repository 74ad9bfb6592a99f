"""``install`` aliases ``onnxruntime.training``; importing the package alone does not."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest

import onnxtrain.compat.ort
from onnxtrain.errors import CompatError

SCRIPT = """
import sys
import onnxtrain.compat.ort as compat
import onnxruntime
assert not hasattr(onnxruntime, "training") and "onnxruntime.training" not in sys.modules
compat.install()
compat.install()
import onnxruntime.training.onnxblock as onnxblock
import onnxruntime.training.onnxblock.blocks
from onnxruntime.training import artifacts
from onnxruntime.training.api import CheckpointState, LinearLRScheduler, Module, Optimizer
from onnxruntime.training.onnxblock.optim.optim import AdamWOptimizer, SGDOptimizer
import onnxruntime
assert onnxruntime.training is compat
assert artifacts is compat.artifacts and onnxblock is compat.onnxblock
assert onnxblock.blocks is compat.onnxblock.blocks
assert Module is compat.api.Module
from onnxruntime import SessionOptions, TrainingParameters, TrainingSession
from onnxruntime.capi._pybind_state import (
    OrtModuleGraphBuilder, OrtModuleGraphBuilderConfiguration, OrtValueCache,
    PartialGraphExecutionState, TrainingAgent, TrainingGraphTransformerConfiguration)
assert TrainingAgent is compat.agent.TrainingAgent
assert onnxruntime.training.TrainingParameters is TrainingParameters
options = onnxruntime.RunOptions()
assert options.training_mode is False
options.training_mode = True
assert options.training_mode is True
assert "torch" not in sys.modules
assert onnxruntime.training.is_ortmodule_available() is True  # torch is installed here
for name in ("blocks loss optim Block ForwardBlock TrainingBlock load_checkpoint_to_model "
             "save_checkpoint base custom_op_library empty_base").split():
    assert name in onnxblock.__all__ and hasattr(onnxblock, name), name
print("aliased")
"""

OLD_PATHS = """
import onnxtrain.compat.ort as compat
compat.install()
import onnxruntime
from onnxruntime.capi.ort_trainer import IODescription, ModelDescription, ORTTrainer
from onnxruntime.capi.training.training_session import TrainingSession
from onnxruntime.capi._pybind_state import GradientGraphBuilder
from onnxruntime.capi.onnxruntime_pybind11_state import TrainingAgent
from onnxruntime.training.api.checkpoint_state import CheckpointState
from onnxruntime.training.api.lr_scheduler import LinearLRScheduler
from onnxruntime.training.api.module import Module
from onnxruntime.training.api.optimizer import Optimizer
import onnxruntime.training.amp.loss_scaler
import onnxruntime.training.optim.lr_scheduler
from onnxruntime.training.optim.config import AdamConfig
from onnxruntime.training.optim import FusedAdam, lr_scheduler
from onnxruntime.training.optim.fused_adam import AdamWMode
from onnxruntime.training.orttrainer_options import ORTTrainerOptions
from onnxruntime.training.ortmodule.options import DebugOptions
from onnxruntime.training.ortmodule.ortmodule import ORTModule
from onnxruntime.training.onnxblock.onnxblock import TrainingBlock
from onnxruntime.training.onnxblock.model_accessor import ModelAccessor
from onnxruntime.training.experimental.gradient_graph import export_gradient_graph
from onnxruntime.training.utils import pytorch_type_to_onnx_dtype
# One module, whichever path leads to it.
assert Module is compat.api.Module and ORTTrainer is onnxruntime.training.ORTTrainer
assert onnxruntime.training.optim is compat.optim and compat.optim.FusedAdam is FusedAdam
assert lr_scheduler.LinearWarmupLRScheduler is compat.optim.LinearWarmupLRScheduler
assert TrainingSession is onnxruntime.TrainingSession and ORTModule is compat.ORTModule
assert compat.optim.__name__ == "onnxtrain.compat.ort.optim"
for line, hint in {
    "import onnxruntime.training.checkpoint": "use ORTTrainer.save_checkpoint",
    "from onnxruntime.training import checkpoint": "use ORTTrainer.save_checkpoint",
    "from onnxruntime.capi import checkpointing_utils": "use ORTTrainer.save_checkpoint",
    "from onnxruntime.training.ortmodule import _fallback": "public methods of ORTModule",
    "import onnxruntime.training.ortmodule.torch_cpp_extensions.install": "delete this import",
    "import onnxruntime.training.ortmodule.experimental.hierarchical_ortmodule": "fallback=True",
    "from onnxruntime.training.utils import hooks": "register_forward_hook",
    "import onnxruntime.training.anything": "coming-from-onnxruntime-training",
}.items():
    try:
        exec(line)
    except ImportError as error:
        assert "has no counterpart" in str(error) and hint in str(error), (line, error)
    else:
        raise AssertionError(line)
print("aliased")
"""


@pytest.mark.parametrize("script", [SCRIPT, OLD_PATHS], ids=["modules", "old_paths"])
def test_import_changes_nothing_and_install_aliases_every_module(script: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=1200
    )
    assert result.returncode == 0, result.stderr
    assert "aliased" in result.stdout


def test_the_real_package_is_not_replaced(monkeypatch):
    real = types.ModuleType("onnxruntime.training")
    monkeypatch.setitem(sys.modules, "onnxruntime.training", real)
    with pytest.raises(CompatError, match="already imported"):
        onnxtrain.compat.ort.install()
    assert sys.modules["onnxruntime.training"] is real
