"""Device bindings simulated on the CPU, and obstacles to CUDA graph capture."""

from __future__ import annotations

import warnings

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from onnxtrain import optim
from onnxtrain.artifacts import Artifacts
from onnxtrain.artifacts.build import build
from onnxtrain.errors import MissingExtraError, OnnxTrainError
from onnxtrain.runtime import binding
from onnxtrain.runtime.binding import check_capture
from onnxtrain.runtime.ort_values import DeviceMemory
from onnxtrain.runtime.session import placement
from onnxtrain.training import Trainer
from tests.artifacts.models import data, finished, graph, weight
from tests.training.made import made


@pytest.mark.parametrize("layout", ["fused", "separate", "vector"])
def test_bindings_of_a_device_give_the_same_steps(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Trainer(made(optimizer=optim.AdamW(lr=0.01)), layout=layout)

    monkeypatch.setattr(binding, "memory_for", lambda *_: DeviceMemory("cpu"))
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


def test_a_step_that_cannot_be_captured_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for a GPU: sessions are those of the CPU."""
    create = binding.runtime.create
    monkeypatch.setattr(
        binding.runtime, "create", lambda source, **options: create(source, threads=1)
    )
    monkeypatch.setattr(binding, "_warned", set())

    def opened(artifacts: Artifacts, **options: object) -> list[str]:
        spec = artifacts.manifest.model("step")
        assert spec is not None
        settings = {"device": "cuda", "threads": 1, "capture": None, **options}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            binding.open_session(artifacts.source("step"), spec, **settings)
        return [str(w.message) for w in caught]

    (message,) = opened(made())
    assert "not captured as a CUDA graph and take longer: " in message
    assert "has symbolic sizes: batch\nhint: build(..., dims={'batch': 32}) fixes them" in message
    assert opened(made()) == []  # said already
    assert opened(made(dims={"batch": 8})) == []  # captured
    assert opened(made(clip=1.0), capture=False) == []  # as the caller wants it
    assert opened(made(clip=1.0), device="cpu") == []
    (message,) = opened(recurrent(dims={"batch": 4, "time": 3}))
    assert "Scan 'rnn' has a subgraph" in message or "has a subgraph\nhint: Scan, which" in message
    assert "the step runs node by node; capture=False accepts that" in message


def recurrent(**options: object) -> Artifacts:
    op, rng = graph(), np.random.default_rng(0)
    x = op.input("x", ir.DataType.FLOAT, ["time", "batch", 2])
    w, r = (
        weight(op, n, rng.standard_normal((1, 3, k)).astype(np.float32))
        for n, k in (("w", 2), ("r", 3))
    )
    y = op.RNN(x, w, r, hidden_size=3, _outputs=2)[1]
    return build(finished(op, y=op.Squeeze(y, [0])), loss="mse", optimizer="sgd", **options)


def test_sessions_on_a_gpu_do_not_print_that_no_plugin_was_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[object] = []
    source = made().source("eval")
    providers = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "set_default_logger_severity", calls.append)
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: providers)
    session = onnxruntime.InferenceSession
    monkeypatch.setattr(
        onnxruntime, "InferenceSession", lambda *a, **kw: calls.append("created") or session(a[0])
    )
    with pytest.raises(
        OnnxTrainError, match=r"cuda: CUDAExecutionProvider does not start: .* fell"
    ):
        binding.runtime.create(source, device="cuda")
    assert calls == [3, "created", 2]
    binding.runtime.create(source)
    assert calls[3:] == ["created"]
