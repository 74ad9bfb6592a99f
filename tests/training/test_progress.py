"""Progress displays: a bar, or lines."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from onnxtrain.training import Trainer
from onnxtrain.training.progress import Bar, Lines, display
from tests.artifacts.models import data
from tests.training.test_fit import made


def test_bar_and_lines() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120)
    assert isinstance(display(True, console), Bar)
    bar = display("bar", console)
    bar.start(3, 10, 0)
    bar.step(1, 0.5, 1e-3, 32)
    bar.line("epoch 1/3  loss 0.5")
    bar.stop()
    text = out.getvalue()
    for part in ("epoch 1/3", "1/10", "loss 0.5000", "lr 1.00e-03", "/s"):
        assert part in text
    out = io.StringIO()
    console = Console(file=out, width=40)
    lines = display(True, console)
    assert isinstance(lines, Lines)
    lines.start(3, 10, 0)
    lines._last_printed -= 100
    lines.step(1, 0.5, 1e-3, 32)
    assert out.getvalue().startswith("epoch 1/3  step 1/10  loss 0.5000  lr 1.00e-03  ")
    assert "eta 0:00" in out.getvalue()
    assert out.getvalue().count("\n") == 1


def test_lines_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    Trainer(made()).fit(data(16), epochs=2, progress="plain")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("epoch 1/2  step 1  loss ")
