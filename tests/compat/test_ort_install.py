"""The alias ``onnxruntime.training``, which exists only when asked for."""

from __future__ import annotations

import subprocess
import sys

ALIASED = """
import onnxtrain.compat.ort as compat
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
assert onnxruntime.training.is_ortmodule_available() is False
for name in ("blocks loss optim Block ForwardBlock TrainingBlock load_checkpoint_to_model "
             "save_checkpoint base custom_op_library empty_base").split():
    assert name in onnxblock.__all__ and hasattr(onnxblock, name), name
print("aliased")
"""

UNTOUCHED = """
import sys
import onnxtrain.compat.ort
import onnxruntime
assert not hasattr(onnxruntime, "training")
assert "onnxruntime.training" not in sys.modules
print("untouched")
"""

TAKEN = """
import sys, types
import onnxtrain.compat.ort as compat
sys.modules["onnxruntime.training"] = types.ModuleType("onnxruntime.training")
try:
    compat.install()
except Exception as error:
    print(type(error).__name__, error)
"""


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_install_aliases_every_module():
    assert "aliased" in run(ALIASED)


def test_import_alone_changes_nothing():
    assert "untouched" in run(UNTOUCHED)


def test_the_real_package_is_not_replaced():
    assert "CompatError" in run(TAKEN)
