"""What torch calls a parameter is one, whatever it looks like; a buffer is none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from onnxtrain import build, explain
from onnxtrain.errors import PrepareError

torch = pytest.importorskip("torch")

from onnxtrain.torch import from_torch  # noqa: E402
from onnxtrain.torch.export import rename_initializers  # noqa: E402


class Odd(torch.nn.Module):
    """Parameters that look like constants, and buffers that look like weights."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.exponent = torch.nn.Parameter(torch.tensor(2.0))
        angle = torch.arange(16)[:, None] / 10 ** (torch.arange(4) / 4)
        self.table = torch.nn.Parameter(torch.cat([angle.sin(), angle.cos()], 1))
        self.register_buffer("projection", torch.randn(8, 8))
        self.register_buffer("shift", torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x).abs() + 1.0
        return (h**self.exponent + self.table) @ self.projection + self.shift


def test_the_parameters_of_a_module_are_kept_exactly(tmp_path: Path):
    torch.manual_seed(0)
    module = Odd()
    model = from_torch(module, torch.randn(3, 16, 8))
    expected = {name for name, _ in module.named_parameters()}
    assert set(explain(model).parameters) == expected
    artifacts = build(model, loss="mse", optimizer="sgd")
    assert {w.name for w in artifacts.manifest.parameters} == expected
    model.save(tmp_path / "odd.onnx")
    assert set(explain(tmp_path / "odd.onnx").parameters) == expected


def test_a_damaged_list_of_parameters_is_refused():
    model = from_torch(torch.nn.Linear(2, 2), torch.from_numpy(np.zeros((1, 2), np.float32)))
    for text in ("{", "[1]", '"weight"'):
        model.metadata_props["onnxtrain.parameters"] = text
        with pytest.raises(PrepareError, match=r"onnxtrain\.parameters"):
            explain(model)


def _net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))


def test_a_list_whose_names_are_gone_freezes_nothing():
    model = from_torch(_net(), torch.randn(2, 3))
    for name in list(model.graph.initializers):  # as tools do that know nothing of the list
        value = model.graph.initializers.pop(name)
        value.name = f"net.{name}"
        model.graph.register_initializer(value)
    expected = {"net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias"}
    assert set(explain(model).parameters) == expected
    artifacts = build(model, loss="mse", optimizer="sgd")
    assert {w.name for w in artifacts.manifest.parameters} == expected


def test_a_list_with_some_names_gone_still_tells_of_the_others():
    model = from_torch(Odd(), torch.randn(3, 16, 8))
    value = model.graph.initializers.pop("linear.weight")
    value.name = "kernel"
    model.graph.register_initializer(value)
    parameters = set(explain(model).parameters)
    assert {"exponent", "table", "linear.bias", "kernel"} <= parameters


def test_renamed_initializers_stay_listed():
    model = from_torch(Odd(), torch.randn(3, 16, 8))
    expected = {f"inner.{n}" for n, _ in Odd().named_parameters()}
    rename_initializers(model, lambda name: f"inner.{name}")
    assert set(explain(model).parameters) == expected
