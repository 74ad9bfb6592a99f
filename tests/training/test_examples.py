"""The example data trains as documented."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from sklearn.datasets import load_digits

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    spec = importlib.util.spec_from_file_location("digits", EXAMPLES / "digits.py")
    assert spec is not None
    assert spec.loader is not None
    digits = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(digits)
    assert digits.main() > 0.95
    out = tmp_path / "runs" / "demo"
    assert {p.name for p in out.iterdir()} >= {"model.onnx", "loss.png", "artifacts", "metrics.csv"}
    session = onnxruntime.InferenceSession(out / "model.onnx")
    data = load_digits()
    (logits,) = session.run(None, {"image": (data.data / 16).astype(np.float32)})
    assert (logits.argmax(1) == data.target).mean() > 0.95
    assert {n.domain for n in onnx.load(out / "model.onnx").graph.node} == {""}
