"""The examples of README and docs run as written."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.io import save

ROOT = Path(__file__).resolve().parents[1]


def _blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


@pytest.fixture
def model_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make ``model.onnx``, image [batch, 64] -> logits [batch, 10], the working directory's."""
    rng = np.random.default_rng(0)
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="classifier")
    op = OpBuilder(graph)
    image = op.input("image", ir.DataType.FLOAT, ["batch", 64])
    weights = []
    for name, shape in {"w1": (64, 16), "b1": (16,), "w2": (16, 10), "b2": (10,)}.items():
        tensor = ir.Tensor((0.1 * rng.standard_normal(shape)).astype(np.float32), name=name)
        value = ir.Value(
            name=name, type=ir.TensorType(tensor.dtype), shape=tensor.shape, const_value=tensor
        )
        graph.register_initializer(value)
        weights.append(value)
    logits = op.Gemm(op.Relu(op.Gemm(image, *weights[:2])), *weights[2:])
    logits.name = "logits"
    graph.outputs.append(logits)
    save(ir.Model(graph, ir_version=10), tmp_path / "model.onnx")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_readme(model_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = _blocks("README.md")
    assert blocks
    scope: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), scope)
    printed = capsys.readouterr().out
    assert "differentiable" in printed
    assert "w1 (64, 16)" in printed


def test_first_screen_has_the_two_commands() -> None:
    first = (ROOT / "README.md").read_text().splitlines()[:25]
    assert any(line.startswith("make demo") for line in first)
    assert any(line.startswith("make test") for line in first)
