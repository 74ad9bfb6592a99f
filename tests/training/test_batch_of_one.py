"""BatchNormalization in training mode needs more than one value per channel, as in torch."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest
import torch

from onnxtrain.artifacts import Artifacts
from onnxtrain.artifacts.build import build
from onnxtrain.errors import PrepareError, ShapeError
from onnxtrain.training import Trainer


def net(shape: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21]> g (float[{shape}] x) => (float[{shape}] y)
        <float[3] s = {{1, 2, 3}}, float[3] b = {{0, 0, 0}}, float[3] m = {{0, 0, 0}},
        float[3] v = {{1, 1, 1}}> {{ y = BatchNormalization(x, s, b, m, v) }}"""
    )


def built(shape: str, mode: str = "train", **dims: int) -> Artifacts:
    return build(net(shape), loss="mse", optimizer="sgd", mode=mode, dims=dims or None)


@pytest.mark.parametrize("layout", ["fused", "separate", "auto"])
def test_a_batch_of_one_row(layout: str) -> None:
    trainer = Trainer(built("batch, 3"), layout=layout)
    before = trainer.state_dict()
    row = np.ones((1, 3), np.float32)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        torch.nn.BatchNorm1d(3)(torch.ones(1, 3))
    for call in (trainer.step, trainer.gradients):
        with pytest.raises(ShapeError, match=r"batch of 1 give BatchNormalization one value"):
            call(row, row)
    assert all(np.array_equal(a, before[n]) for n, a in trainer.state_dict().items())
    assert np.isfinite(trainer.evaluate_batch(row, row).loss), "statistics are the running ones"
    assert trainer.step(np.eye(3, dtype=np.float32), np.eye(3, dtype=np.float32)).updated


def test_the_last_batch_of_an_epoch() -> None:
    x = np.random.default_rng(0).normal(size=(9, 3)).astype(np.float32)
    with pytest.raises(ShapeError, match=r"hint: .*drop_last=True"):
        Trainer(built("batch, 3")).fit((x, x), epochs=1, batch_size=4)
    history = Trainer(built("batch, 3")).fit((x, x), epochs=1, batch_size=4, drop_last=True)
    assert len(history.steps) == 2


def test_one_row_of_several_values() -> None:
    row = np.ones((1, 3, 2), np.float32)
    assert Trainer(built("batch, 3, 2")).step(row, row).updated
    trainer = Trainer(built("batch, 3, length"))
    assert trainer.step(row, row).updated
    with pytest.raises(ShapeError, match="batch and length of 1"):
        trainer.step(row[..., :1], row[..., :1])


def test_sizes_that_are_known() -> None:
    with pytest.raises(PrepareError, match=r"BatchNormalization .* \[1, 3\].*\nhint: use a larger"):
        built("batch, 3", batch=1)
    with pytest.raises(PrepareError, match="one value per channel"):
        built("1, 3, 1", **{"x[0]": 1})
    row = np.ones((1, 3), np.float32)
    assert Trainer(built("1, 3", mode="as-is")).step(row, row).updated
