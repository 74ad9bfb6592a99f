"""Decisions are logged under the name ``onnxtrain``; nothing is printed by default."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from onnxtrain.torch import TrainableModule
from onnxtrain.training import Trainer
from tests.artifacts.models import data
from tests.training.made import made


def test_layout_and_checkpoints(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "onnxtrain"):
        trainer = Trainer(made())
        x, labels = data(8)
        trainer.fit((x, labels), epochs=3, keep=1, directory=tmp_path, progress=False)
    assert "layout 'vector' on cpu: the artifacts have update models" in caplog.text
    assert "wrote checkpoint" in caplog.text
    assert "removed checkpoint" in caplog.text
    assert {r.name.partition(".")[0] for r in caplog.records} == {"onnxtrain"}


def test_another_export(caplog: pytest.LogCaptureFixture) -> None:
    class Mean(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mean(1)

    module = TrainableModule(Mean())
    with caplog.at_level(logging.INFO, "onnxtrain"):
        module(torch.ones(2, 3))
        assert "again" not in caplog.text
        module(torch.ones(2, 5))
    assert "exporting Mean again: input shapes are [(2, 5)]" in caplog.text


def test_silent_by_default() -> None:
    script = "import logging, onnxtrain; logging.getLogger('onnxtrain.training').warning('loud')"
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert not result.stderr
    assert not result.stdout


def test_the_null_handler_is_the_only_one() -> None:
    handlers = logging.getLogger("onnxtrain").handlers
    assert [type(h) for h in handlers] == [logging.NullHandler]
