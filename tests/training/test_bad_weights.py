"""A finite loss whose update overflows: the run fails, and no file contains the weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from onnxtrain import optim
from onnxtrain.checkpoint import load_checkpoint
from onnxtrain.errors import NonFiniteError
from onnxtrain.training import Callback, Run, StepResult, Trainer
from tests.artifacts.models import data

from .made import made


class Overflow(Callback):
    """Make the update of one step overflow."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, run: Run, result: StepResult) -> None:
        if result.step == self.step:
            run.trainer.parameters["fc1.bias"] = np.full(8, np.nan, np.float32)


@pytest.mark.parametrize("step", [6, 8, 12])
@pytest.mark.parametrize("every", [None, 1, 2])
def test_no_checkpoint_contains_nonfinite_weights(
    tmp_path: Path, step: int, every: int | None
) -> None:
    options = {"batch_size": 16, "keep": 1, "checkpoint_every": every, "progress": False}
    with pytest.raises(NonFiniteError, match=r"fc1\.bias"):
        Trainer(made()).fit(
            data(64), epochs=3, directory=tmp_path, callbacks=[Overflow(step)], **options
        )
    paths = sorted((tmp_path / "checkpoints").glob("*.safetensors"))
    assert len(paths) == 2  # the last one and the best
    for path in paths:
        tensors, meta = load_checkpoint(path)
        assert meta["step"] < step
        assert all(np.isfinite(a).all() for a in tensors.values())
    again = Trainer(made())
    assert len(again.fit(data(64), directory=tmp_path, resume=True, progress=False).steps) == 12


@pytest.mark.parametrize("layout", ["fused", "separate"])
def test_nonfinite_weights_after_the_last_step(layout: str) -> None:
    trainer = Trainer(made(optimizer=optim.SGD(lr=1e38, weight_decay=1e3)), layout=layout)
    x, labels = data(16)
    with pytest.raises(
        NonFiniteError, match=r"not finite after step 1, although its loss was:\n  'fc"
    ):
        trainer.fit((x, labels), batch_size=16, progress=False)


def test_weights_that_are_infinite_from_the_start() -> None:
    trainer = Trainer(made(freeze="fc2.bias"))
    assert trainer.fit(data(16), progress=False).losses
    trainer = Trainer(made())
    bias = trainer.parameters["fc2.bias"]
    bias[2] = -np.inf
    trainer.parameters["fc2.bias"] = bias
    x, labels = data(16)
    assert np.isfinite(trainer.fit((x, np.minimum(labels, 1)), progress=False).losses).all()
