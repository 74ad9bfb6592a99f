"""Progress displays: a bar, or lines."""

from __future__ import annotations

import io
import re

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


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_bar_fits_the_terminal(width: int) -> None:
    out = io.StringIO()
    bar = Bar(Console(file=out, force_terminal=True, width=width, color_system=None))
    bar.start(20, 9999, 9554)
    bar.step(12, 0.01153, 1e-3, 32)
    bar._throughput._samples, bar._throughput._seconds = 24000.0, 1.0
    bar.step(12, 0.01153, 1e-3, 32)
    bar.line("epoch 12/20  step 9555  loss 0.0115  accuracy 1.0000  val_loss 0.0115  val_f1 1.0000")
    bar.stop()
    lines = re.sub("\x1b[^A-Za-z]*[A-Za-z]", "", out.getvalue()).replace("\r", "\n").splitlines()
    assert "…" not in out.getvalue()
    assert any("9556/9999" in line and "loss 0.0115" in line for line in lines)
    assert ("lr 1.00e-03" in out.getvalue()) == (width > 80)
    first = next(i for i, line in enumerate(lines) if "step 9555  loss" in line)
    values = f"{lines[first]} {lines[first + 1]}" if width <= 80 else lines[first]
    assert values.split() == [
        *("epoch", "12/20", "step", "9555", "loss", "0.0115", "accuracy", "1.0000"),
        *("val_loss", "0.0115", "val_f1", "1.0000"),
    ]


def test_lines_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    Trainer(made()).fit(data(16), epochs=2, progress="plain")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("epoch 1/2  step 1  loss ")
