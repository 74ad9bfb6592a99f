"""Metrics files of a run that was killed and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from onnxtrain.training.run_files import MetricsWriter

COLUMNS = ["kind", "epoch", "step", "loss"]


def row(kind: str, epoch: int, step: int) -> dict[str, Any]:
    return {"kind": kind, "epoch": epoch, "step": step, "loss": 0.5}


@pytest.mark.parametrize(("epochs", "kept"), [(0, 2), (1, 3)], ids=["before", "after"])
def test_a_repeated_epoch_has_one_row(tmp_path: Path, epochs: int, kept: int) -> None:
    # The last step of an epoch has a checkpoint of its own, before the one at the epoch's end.
    rows = [row("step", 1, 1), row("step", 1, 2), row("epoch", 1, 2), row("step", 2, 3)]
    first = MetricsWriter(tmp_path, COLUMNS, tensorboard=False)
    for r in rows:
        first.add(r)
    first.flush()
    again = MetricsWriter(tmp_path, COLUMNS, resume_at=2, epochs=epochs, tensorboard=False)
    assert again.rows == rows[:kept]
    again.close()
    first.close()
