"""Zero-initialized optimizer state takes no host memory, for any number of parameters."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SIZE = 4096
SCRIPT = f"""
import numpy as np, onnx
from onnx import helper
import onnxtrain

def resident():
    lines = open("/proc/self/status").read().splitlines()
    return int(next(x for x in lines if x.startswith("RssAnon")).split()[1]) * 1024

weight = np.full(({SIZE}, {SIZE}), 0.01, np.float32)
x, y = (helper.make_tensor_value_info(n, 1, [2, {SIZE}]) for n in "xy")
graph = helper.make_graph(
    [helper.make_node("MatMul", ["x", "w"], ["y"])], "g", [x], [y],
    [onnx.numpy_helper.from_array(weight, "w")],
)
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
before = resident()
made = onnxtrain.build(model, loss="mse", optimizer="adamw", check=False)
assert all(not a.any() for a in made.state.values()) and len(made.state) == 2
print((resident() - before) / weight.nbytes)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks Linux for the memory")
def test_zero_initialized_moments_are_not_written() -> None:
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=300
    )
    # The model that was given, its weights, and the model to export; two averages more are five.
    assert float(run.stdout) < 4
