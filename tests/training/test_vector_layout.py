"""Updates over vectors equal updates of each tensor, bit for bit."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from onnxtrain import optim, thresholds
from onnxtrain.runtime import binding
from onnxtrain.runtime.ort_values import DeviceMemory, Values
from onnxtrain.training import engine
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
def test_vector_updates_equal_those_of_each_tensor(
    name: str, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thresholds, "UPDATE_CHUNK_ELEMENTS", piece)
    artifacts = made(optimizer=ALIKE[name], ema=0.9)
    same_steps(Trainer(artifacts, layout="vector"), Trainer(artifacts, layout="separate"))


def test_chunks_shared_by_threads_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thresholds, "UPDATE_CHUNK_ELEMENTS", 16)
    monkeypatch.setattr(thresholds, "UPDATE_CHUNKS_PER_THREAD", 1)
    artifacts = made(optimizer=ALIKE["adamw"], ema=0.9)
    vector = Trainer(artifacts, layout="vector", threads=3)
    assert vector._engine._pool.helpers == 2
    same_steps(vector, Trainer(artifacts, layout="separate"))


@pytest.mark.parametrize("name", ALIKE)
@pytest.mark.parametrize("piece", [1 << 24, 48])
def test_vector_updates_in_memory_of_a_device(
    piece: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thresholds, "DEVICE_UPDATE_CHUNK_ELEMENTS", piece)
    artifacts = made(optimizer=ALIKE[name], ema=0.9)
    plain = Trainer(artifacts, layout="separate")
    monkeypatch.setattr(engine, "Values", functools.partial(Values, on_host=False))
    monkeypatch.setattr(binding, "memory_for", lambda *_: DeviceMemory("cpu"))
    same_steps(Trainer(artifacts, layout="vector"), plain)


def same_steps(vector: Trainer, plain: Trainer) -> None:
    """Train both and compare everything bit for bit; set a tensor in between."""
    name = vector.manifest.parameters[0].name
    for seed in range(4):
        batch = data(8, seed=seed)
        assert vector.step(*batch).loss == plain.step(*batch).loss
        for trainer in (vector, plain):
            trainer.parameters[name] = trainer.parameters[name] * np.float32(0.5)
    ours, theirs = vector.state_dict(), plain.state_dict()
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
    values = Values(arrays, "cpu", on_host=False)
    for name, array in arrays.items():
        np.testing.assert_array_equal(values.view(name), array)
    values.write("b", np.full(4, 9, np.float32))
    line = values.flat_view(["a", "b"]).numpy()
    assert line.shape == (20,)  # two rows of 64 bytes, the second only as far as it is used
    np.testing.assert_array_equal(line, [0, 1, 2, 3, 4, 5, *[0] * 10, 9, 9, 9, 9])
    np.testing.assert_array_equal(arrays["b"], np.arange(4))


@pytest.mark.parametrize(
    "options",
    [{"clip": 1.0}, {"optimizer": "lamb"}, {"optimizer": "adafactor"}, {"accumulate": 2}],
    ids=str,
)
def test_updates_that_are_not_elementwise_have_no_vector_models(options: dict[str, object]) -> None:
    assert Trainer(made(**options)).layout != "vector"
