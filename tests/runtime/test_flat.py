"""Updates over one long vector give what updates of each tensor give, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from onnxtrain import optim
from onnxtrain.runtime import flat as module
from onnxtrain.runtime.flat import Flat, flat_of
from onnxtrain.runtime.layouts import Separate
from onnxtrain.runtime.trainer import Trainer
from tests.artifacts.models import data
from tests.runtime.test_trainer import made

ALIKE = {
    "sgd": optim.SGD(lr=0.1),
    "momentum": optim.SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": optim.Adam(lr=0.01, amsgrad=True),
    "adamw": optim.AdamW(lr=0.01),
    "groups": optim.AdamW(lr=0.01, groups=[optim.Group("*bias", weight_decay=0.0, lr_factor=2.0)]),
    "adagrad": optim.Adagrad(lr=0.1, lr_decay=0.1),
    "rmsprop": optim.RMSprop(lr=0.01, momentum=0.5, centered=True),
    "lion": optim.Lion(lr=0.01),
}


@pytest.mark.parametrize("name", ALIKE)
@pytest.mark.parametrize("piece", [16, 1 << 15])
def test_flat_updates_equal_those_of_each_tensor(
    name: str, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PIECE", piece)
    artifacts = made(optimizer=ALIKE[name], ema=0.9)
    flat, plain = Trainer(artifacts, layout="separate"), Trainer(artifacts, layout="separate")
    assert isinstance(flat._engine, Flat)
    plain._engine = Separate(artifacts, device="cpu", threads=1)
    for seed in range(4):
        batch = data(8, seed=seed)
        assert flat.step(*batch).loss == plain.step(*batch).loss
    ours, theirs = flat.state_dict(), plain.state_dict()
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        np.testing.assert_array_equal(value, theirs[key], err_msg=key)


@pytest.mark.parametrize(
    "options",
    [{"clip": 1.0}, {"optimizer": "lamb"}, {"optimizer": "adafactor"}, {"accumulate": 2}],
    ids=str,
)
def test_what_is_not_elementwise_is_left_alone(options: dict[str, object]) -> None:
    assert flat_of(made(**options), threads=1) is None
