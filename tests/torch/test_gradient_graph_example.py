"""The example that writes two graphs learns, and learns what torch learns."""

from __future__ import annotations

import gzip
import runpy
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "gradient_graph.py"


@pytest.fixture(scope="module")
def example() -> dict:
    return runpy.run_path(str(SCRIPT))


@pytest.mark.parametrize(("model", "accuracy"), [("mymodel", 0.8), ("mnist", 0.9)])
def test_example_learns(example: dict, model: str, accuracy: float, tmp_path: Path) -> None:
    report = example["main"](["--model", model, "--epochs", "3", "--out", str(tmp_path)])
    assert report["last"] < 0.8 * report["first"]
    assert report["accuracy"] > accuracy
    for name in ("gradient_graph.onnx", "optimizer_graph.onnx"):
        graph = onnx.load(tmp_path / model / name)
        assert [(o.domain, o.version) for o in graph.opset_import] == [("", 21)]
        assert graph.ir_version == 10


def test_steps_are_torchs(example: dict, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, loss_fn = example["MyModel"](), example["binary_cross_entropy"]
    (x, y), _ = example["points"]()
    example["write"](model, loss_fn, (x, y), 32, tmp_path, 15)
    weights = {n: p.detach().numpy().copy() for n, p in model.named_parameters()}
    loop = example["Loop"](tmp_path, weights, 0.01)
    twin = torch.optim.Adam(model.parameters(), lr=0.01)
    for i in range(0, 320, 32):
        a, b = x[i : i + 32], y[i : i + 32]
        loss = loss_fn(model(torch.from_numpy(a)), torch.from_numpy(b))
        twin.zero_grad()
        loss.backward()
        twin.step()
        assert loop.step(a, b) == pytest.approx(loss.item(), rel=1e-4)
    for name, p in model.named_parameters():
        np.testing.assert_allclose(loop.weights[name], p.detach().numpy(), rtol=1e-3, atol=1e-5)


def test_reads_mnist_files(example: dict, tmp_path: Path) -> None:
    pixels = np.arange(3 * 28 * 28, dtype=np.uint8).reshape(3, 28, 28)
    head = bytes([0, 0, 8, 3]) + np.array(pixels.shape, ">i4").tobytes()
    labels = bytes([0, 0, 8, 1]) + np.array([3], ">i4").tobytes() + bytes([7, 2, 9])
    for part in ("train", "t10k"):
        (tmp_path / f"{part}-images-idx3-ubyte.gz").write_bytes(
            gzip.compress(head + pixels.tobytes())
        )
        (tmp_path / f"{part}-labels-idx1-ubyte").write_bytes(labels)
    (x, y), test = example["mnist"](tmp_path)
    np.testing.assert_allclose(x, pixels.reshape(3, -1) / 255, rtol=1e-6)
    assert y.tolist() == test[1].tolist() == [7, 2, 9]
