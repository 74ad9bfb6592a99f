"""``ORTModule``: what programs written for onnxruntime-training expect of it."""

from __future__ import annotations

import inspect
import pickle
from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

from onnxtrain.compat.ort.ortmodule import DebugOptions, LogLevel, ORTModule


class Branch(nn.Module):
    """Branches on a tensor in Python; the exporter drops the flag and writes one branch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(3, 3)

    def forward(self, flag: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x) if flag else -self.fc(x)

    def step(self, x: torch.Tensor) -> torch.Tensor:
        return self(torch.tensor(True), x)


def test_a_flag_that_the_module_branches_on_exports_each_branch() -> None:
    module = Branch()
    ours, x = ORTModule(module), torch.randn(2, 3)
    for flag in (True, False, True):
        expected = module(torch.tensor(flag), x)
        torch.testing.assert_close(ours(torch.tensor(flag), x), expected, rtol=1e-5, atol=1e-6)
    assert sum(len(calls or ()) for calls in ours._compiled_calls.values()) == 2


def test_methods_run_on_onnxruntime_and_attributes_are_those_of_the_module() -> None:
    module = Branch()
    ours, x = ORTModule(module), torch.randn(2, 3)
    assert inspect.signature(ours.forward) == inspect.signature(module.forward)
    assert ours.step.__func__ is Branch.step
    torch.testing.assert_close(ours.step(x), module.step(x), rtol=1e-5, atol=1e-6)
    assert ours._compiled_calls  # `self(...)` in the method called this module
    ours.scale = 2
    ours.register_buffer("count", torch.ones(1))
    ours.step = print
    assert (module.scale, "scale" in ours.__dict__, ours._compiled_calls) == (2, False, {})
    assert [name for name, _ in ours.named_buffers()] == ["count"]
    assert (ours.step, module.step.__func__) == (print, Branch.step)
    again = pickle.loads(pickle.dumps(ORTModule(module)))
    torch.testing.assert_close(again.step(x), module.step(x), rtol=1e-5, atol=1e-6)


class Chunks(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.chunk(3, dim=0)


def test_sequences_between_the_passes() -> None:
    """With a symbolic size the export of chunk is a sequence, which the backward pass reads."""
    x = torch.randn(4, 5, requires_grad=True)
    first, second = ORTModule(Chunks())(x)
    assert (first.shape, second.shape) == ((2, 5), (2, 5))
    (first.sum() + 2 * second.sum()).backward()
    assert x.grad is not None
    assert x.grad[:, 0].tolist() == [1, 1, 2, 2]


def test_debug_options_write_the_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTMODULE_SAVE_ONNX_PATH", str(tmp_path))
    ours = ORTModule(nn.Linear(2, 2), DebugOptions(save_onnx=True, onnx_prefix="p"))
    ours(torch.randn(1, 2))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "p_execution_model_training.onnx",
        "p_optimized_pre_grad_training.onnx",
        "p_optimized_training.onnx",
        "p_torch_exported_training.onnx",
    ]
    for path in tmp_path.iterdir():
        onnx.checker.check_model(path)
    with pytest.raises(ValueError, match="onnx_prefix must be provided"):
        DebugOptions(save_onnx=True)
    with pytest.raises(TypeError, match="name prefix of type str"):
        DebugOptions(save_onnx=True, onnx_prefix=3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="log_level of type LogLevel"):
        DebugOptions(log_level="INFO")  # pyright: ignore[reportArgumentType]
    monkeypatch.setenv("ORTMODULE_LOG_LEVEL", "INFO")
    assert DebugOptions().log_level is LogLevel.INFO
    monkeypatch.setenv("ORTMODULE_SAVE_ONNX_PATH", "/non/existent")
    with pytest.raises(OSError, match="Directory /non/existent is not writable"):
        DebugOptions(save_onnx=True, onnx_prefix="p")
