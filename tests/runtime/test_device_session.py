"""Device bindings simulated on the CPU, and obstacles to CUDA graph capture."""

from __future__ import annotations

import numpy as np
import pytest

from onnxtrain import optim
from onnxtrain.errors import MissingExtraError, OnnxTrainError
from onnxtrain.runtime import binding
from onnxtrain.runtime.binding import check_capture
from onnxtrain.runtime.ort_values import DeviceMemory
from onnxtrain.runtime.session import placement
from onnxtrain.training import Trainer
from tests.artifacts.models import data
from tests.training.made import made


@pytest.mark.parametrize("layout", ["fused", "separate", "vector"])
def test_bindings_of_a_device_give_the_same_steps(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Trainer(made(optimizer=optim.AdamW(lr=0.01)), layout=layout)

    monkeypatch.setattr(binding, "memory_for", DeviceMemory)
    device = Trainer(made(optimizer=optim.AdamW(lr=0.01)), layout=layout)
    for seed, size in enumerate((8, 8, 5, 8)):
        batch = data(size, seed=seed)
        kept = [np.array(a) for a in batch]
        assert plain.step(*batch).loss == device.step(*batch).loss
        for a, b in zip(batch, kept, strict=True):
            np.testing.assert_array_equal(a, b)  # the caller's arrays are not written
    device.lr = plain.lr = 0.5
    assert plain.step(*batch).loss == device.step(*batch).loss
    for name, array in plain.state_dict().items():
        np.testing.assert_array_equal(array, device.state_dict()[name], err_msg=name)


def test_symbolic_sizes_are_an_obstacle_to_capture() -> None:
    symbolic, fixed = (
        (a.source("step"), a.manifest.model("step")) for a in (made(), made(dims={"batch": 8}))
    )
    assert symbolic[1] is not None
    assert fixed[1] is not None
    assert check_capture(*fixed, None, device="cuda") is None
    assert "symbolic sizes: batch" in str(check_capture(*symbolic, None, device="cuda"))
    assert check_capture(*fixed, None, device="cpu") == "the device is cpu"
    assert check_capture(*fixed, False, device="cuda") == "capture=False"
    with pytest.raises(OnnxTrainError, match="symbolic sizes: batch"):
        check_capture(*symbolic, True, device="cuda")
    with pytest.raises(OnnxTrainError, match="two models"):
        check_capture(*fixed, True, device="cuda", obstacle="two models")
    for layout in ("fused", "separate", "vector"):
        with pytest.raises(OnnxTrainError, match="the device is cpu"):
            Trainer(made(dims={"batch": 8}), layout=layout, capture=True)


def test_the_trainer_reports_why_it_does_not_capture() -> None:
    trainer = Trainer(made())
    assert not trainer.captured
    assert trainer.capture_obstacle == "the device is cpu"


def test_placement_counts_nodes() -> None:
    placed = placement(made().source("step"), device="cpu")
    assert placed.counts["CPUExecutionProvider"] > 10
    assert placed.clean


def test_placement_on_an_unavailable_device() -> None:
    with pytest.raises(MissingExtraError, match="no CUDA"):
        placement(made().source("step"))
