"""Updates over one long vector give what updates of each tensor give, bit for bit."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from onnxtrain import optim, thresholds
from onnxtrain.runtime import binding
from onnxtrain.runtime.ort_values import DeviceMemory, Values
from onnxtrain.training import engine as descent
from onnxtrain.training import engine as flat
from onnxtrain.training.engine import SeparateEngine, VectorEngine, create_vector_engine
from onnxtrain.training.trainer import Trainer
from tests.artifacts.models import data
from tests.training.test_trainer import made

ALIKE = {
    "sgd": optim.SGD(lr=0.1),
    "momentum": optim.SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": optim.Adam(lr=0.01, amsgrad=True),
    "adamw": optim.AdamW(lr=0.01),
    "groups": optim.AdamW(
        lr=0.01, groups=[optim.ParamGroup("*bias", weight_decay=0.0, lr_factor=2.0)]
    ),
    "adagrad": optim.Adagrad(lr=0.1, lr_decay=0.1),
    "rmsprop": optim.RMSprop(lr=0.01, momentum=0.5, centered=True),
    "lion": optim.Lion(lr=0.01),
}


@pytest.mark.parametrize("name", ALIKE)
@pytest.mark.parametrize("piece", [16, 1 << 15])
def test_flat_updates_equal_those_of_each_tensor(
    name: str, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thresholds, "UPDATE_CHUNK_ELEMENTS", piece)
    artifacts = made(optimizer=ALIKE[name], ema=0.9)
    long, plain = Trainer(artifacts, layout="separate"), Trainer(artifacts, layout="separate")
    plain._engine = SeparateEngine(artifacts, device="cpu", threads=1)
    same_steps(long, plain)


def test_pieces_shared_by_threads_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thresholds, "UPDATE_CHUNK_ELEMENTS", 16)
    monkeypatch.setattr(thresholds, "UPDATE_CHUNKS_PER_THREAD", 1)
    artifacts = made(optimizer=ALIKE["adamw"], ema=0.9)
    long = Trainer(artifacts, layout="separate", threads=3)
    engine = long._engine
    assert isinstance(engine, VectorEngine)
    assert isinstance(engine._updater, descent.VectorUpdater)
    assert engine._updater._crew.helpers == 2
    plain = Trainer(artifacts, layout="separate")
    plain._engine = SeparateEngine(artifacts, device="cpu", threads=1)
    same_steps(long, plain)


@pytest.mark.parametrize("name", ALIKE)
@pytest.mark.parametrize("piece", [1 << 24, 48])
def test_flat_updates_in_memory_of_a_device(
    piece: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thresholds, "DEVICE_UPDATE_CHUNK_ELEMENTS", piece)
    artifacts = made(optimizer=ALIKE[name], ema=0.9)
    plain = Trainer(artifacts, layout="separate")

    def on_device(updates, values, gradients, **_):
        return descent.DeviceVectorUpdater(updates, values, gradients, "cpu", capture=False)

    monkeypatch.setattr(flat, "Values", functools.partial(Values, shared=False))
    monkeypatch.setattr(binding, "memory_for", DeviceMemory)
    monkeypatch.setattr(flat, "VectorUpdater", on_device)
    same_steps(Trainer(artifacts, layout="separate"), plain)


def same_steps(long: Trainer, plain: Trainer) -> None:
    """Train both and compare everything bit for bit; set a tensor in between."""
    assert isinstance(long._engine, VectorEngine)
    name = long.manifest.parameters[0].name
    for seed in range(4):
        batch = data(8, seed=seed)
        assert long.step(*batch).loss == plain.step(*batch).loss
        for trainer in (long, plain):
            trainer.parameters[name] = trainer.parameters[name] * np.float32(0.5)
    ours, theirs = long.state_dict(), plain.state_dict()
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        np.testing.assert_array_equal(value, theirs[key], err_msg=key)


def test_values_in_memory_of_their_own() -> None:
    arrays = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.arange(4, dtype=np.float32),
        "n": np.array(7, np.int64),
        "none": np.zeros((0, 3), np.float32),
    }
    values = Values(arrays, "cpu", shared=False)
    for name, array in arrays.items():
        np.testing.assert_array_equal(values.view(name), array)
    values.write("b", np.full(4, 9, np.float32))
    line = values.line_value(["a", "b"]).numpy()
    assert line.shape == (20,)  # two rows of 64 bytes, the second only as far as it is used
    np.testing.assert_array_equal(line, [0, 1, 2, 3, 4, 5, *[0] * 10, 9, 9, 9, 9])
    np.testing.assert_array_equal(arrays["b"], np.arange(4))


@pytest.mark.parametrize(
    "options",
    [{"clip": 1.0}, {"optimizer": "lamb"}, {"optimizer": "adafactor"}, {"accumulate": 2}],
    ids=str,
)
def test_what_is_not_elementwise_is_left_alone(options: dict[str, object]) -> None:
    assert create_vector_engine(made(**options), threads=1) is None
