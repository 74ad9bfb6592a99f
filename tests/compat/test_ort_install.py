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
assert "torch" not in sys.modules
assert onnxruntime.training.is_ortmodule_available() is True  # torch is installed here
for name in ("blocks loss optim Block ForwardBlock TrainingBlock load_checkpoint_to_model "
             "save_checkpoint base custom_op_library empty_base").split():
    assert name in onnxblock.__all__ and hasattr(onnxblock, name), name
print("aliased")
"""


def test_import_changes_nothing_and_install_aliases_every_module():
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=1200
    )
    assert result.returncode == 0, result.stderr
    assert "aliased" in result.stdout


def test_the_real_package_is_not_replaced(monkeypatch):
    real = types.ModuleType("onnxruntime.training")
    monkeypatch.setitem(sys.modules, "onnxruntime.training", real)
    with pytest.raises(CompatError, match="already imported"):
        onnxtrain.compat.ort.install()
    assert sys.modules["onnxruntime.training"] is real
