"""Steps on a device where some nodes run on the CPU never read stale values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from onnxtrain import optim
from onnxtrain.artifacts import Artifacts
from onnxtrain.errors import OnnxTrainError
from onnxtrain.runtime import binding
from onnxtrain.runtime import session as runtime
from onnxtrain.runtime.devices import Device
from onnxtrain.runtime.ort_values import DeviceMemory, ort_value
from onnxtrain.training import Trainer
from tests.artifacts.models import data
from tests.training.made import made

STEPS = 20
GPU = Device("device", "GpuExecutionProvider", on_host=False)
UPDATES = ("scalars", "update")  # over chunks in memory of the CPU


class CopyingBinding:
    """Copies what nodes of the CPU read when it is bound, as onnxruntime does for a device."""

    def __init__(self, binding: Any, on_host: set[str]) -> None:
        self._binding, self._on_host = binding, on_host

    def bind_ortvalue_input(self, name: str, value: Any) -> None:
        if name in self._on_host:
            value = ort_value(np.array(value.numpy()))
        self._binding.bind_ortvalue_input(name, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._binding, name)


class MemoryInfo:
    def __init__(self, name: str) -> None:
        self.name = name


class MixedSession:
    """A session of which every second input is read by a node of the CPU."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self.on_host = {x.name for x in session.get_inputs()[::2]}

    def io_binding(self) -> CopyingBinding:
        return CopyingBinding(self._session.io_binding(), self.on_host)

    def get_input_memory_infos(self) -> list[MemoryInfo]:
        names = (x.name for x in self._session.get_inputs())
        return [MemoryInfo("Cpu" if n in self.on_host else "Cuda") for n in names]

    def run_with_iobinding(self, binding: CopyingBinding, options: Any = None) -> None:
        self._session.run_with_iobinding(binding._binding, options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


def trainer_on_device(
    artifacts: Artifacts, layout: str, monkeypatch: pytest.MonkeyPatch, *, reported: bool = True
) -> Trainer:
    """Return a trainer that takes the CPU for a device on which half of the inputs are copied."""
    plain = runtime.create
    on_host = [artifacts.source_of(m) for m in artifacts.manifest.models if m.role in UPDATES]

    def create(source: Any, **kwargs: Any) -> Any:
        session = plain(source, **kwargs)
        return session if source in on_host else MixedSession(session)

    def bound(session: Any, spec: Any, inputs: Any, outputs: Any, *_: Any) -> Any:
        device = GPU if isinstance(session, MixedSession) else "cpu"
        return kind(session, spec, inputs, outputs, device)

    kind, memory_for = binding.BoundSession, binding.memory_for
    monkeypatch.setattr(runtime, "create", create)
    monkeypatch.setattr(
        binding,
        "memory_for",
        lambda d, names: DeviceMemory("cpu") if d is GPU else memory_for(d, names),
    )
    monkeypatch.setattr("onnxtrain.training.engine.BoundSession", bound)
    if not reported:
        monkeypatch.setattr(runtime, "inputs_copied_when_bound", lambda *_: frozenset())
    return Trainer(artifacts, layout=layout)


def torch_losses(values: dict[str, torch.Tensor], batches: list[Any]) -> list[float]:
    """Train the same classifier in torch, in place; return its losses."""
    for v in values.values():
        v.requires_grad_()
    optimizer = torch.optim.AdamW(values.values(), lr=0.01, weight_decay=0.01)
    losses = []
    for x, labels in batches:
        hidden = torch.tanh(torch.tensor(x) @ values["fc1.weight"] + values["fc1.bias"])
        scores = hidden @ values["fc2.weight"] + values["fc2.bias"]
        loss = torch.nn.functional.cross_entropy(scores, torch.tensor(labels))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("dims", [None, {"batch": 8}], ids=["symbolic", "fixed"])
@pytest.mark.parametrize("layout", ["fused", "separate", "vector"])
def test_every_parameter_follows_torch(
    layout: str, dims: dict[str, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = optim.AdamW(lr=0.01, weight_decay=0.01)
    artifacts = made(optimizer=optimizer, target="cuda", dims=dims)
    values = {n: torch.tensor(a) for n, a in artifacts.values.items()}
    trainer = trainer_on_device(artifacts, layout, monkeypatch)
    batches = [data(8, seed=seed) for seed in range(STEPS)]
    wanted = torch_losses(values, batches)
    assert [trainer.step(*b).loss for b in batches] == pytest.approx(wanted, rel=1e-5)
    for name, value in values.items():
        np.testing.assert_allclose(
            trainer.state_dict()[name], value.detach(), rtol=1e-4, atol=1e-6, err_msg=name
        )


@pytest.mark.parametrize("layout", ["fused", "separate", "vector"])
def test_stale_values_raise_an_error(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    artifacts = made(optimizer=optim.AdamW(lr=0.5), target="cuda")
    trainer = trainer_on_device(artifacts, layout, monkeypatch, reported=False)
    batches = [data(8)] * 4
    with pytest.raises(OnnxTrainError, match="computes with old values"):
        [trainer.step(*batch) for batch in batches]


def test_refused_capture_falls_back_and_names_the_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = runtime.create

    def create(*args: Any, capture: bool = False, **kwargs: Any) -> Any:
        if capture:
            raise OnnxTrainError("This session cannot use the graph capture feature as requested")
        return plain(*args, **{**kwargs, "device": "cpu"})

    monkeypatch.setattr(runtime, "create", create)
    source = made(dims={"batch": 8}).source("step")
    with pytest.warns(UserWarning, match=r"nodes run on the CPU: \w+ '"):
        session, obstacle = binding.create_capturing(source, capture=None, device="cuda", threads=1)
    assert "nodes run on the CPU" in str(obstacle)
    assert session.get_inputs()
    with pytest.raises(OnnxTrainError, match=r"cannot capture .*: \d+ nodes run on the CPU"):
        binding.create_capturing(source, capture=True, device="cuda", threads=1)


def test_a_failed_capture_falls_back_to_runs_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some kernels refuse capture only when they run."""
    plain = runtime.run_bound
    monkeypatch.setattr(binding, "memory_for", lambda *_: DeviceMemory("cpu"))
    artifacts = made(dims={"batch": 8})
    spec = artifacts.manifest.model("step")
    assert spec is not None
    source, refused, settling = artifacts.source("step"), [], []

    def run(session: Any, bound: Any, options: Any = None) -> None:
        if options is not None and options.get_run_config_entry("gpu_graph_id") != "-1":
            refused.append(options)
            raise OnnxTrainError("operation failed due to a previous error during capture")
        settling.append(options is not None)
        plain(session, bound)

    monkeypatch.setattr(runtime, "run_bound", run)
    values = {**artifacts.values, **artifacts.state}
    inputs = {t.name: ort_value(values[t.name]) for t in spec.inputs if t.name in values}
    x, labels = data(8)
    feeds = {"x": x, "labels": labels, "learning_rate": np.array([0.1], np.float32)}
    feeds = {t.name: feeds[t.name] for t in spec.inputs if t.name in feeds}

    def opened() -> Any:
        return runtime.create(source, threads=1)

    def losses(graph_id: int | None, reopen: Any) -> list[float]:
        bound = binding.BoundSession(opened(), spec, inputs, {}, GPU, graph_id, reopen)
        return [bound.run(feeds)["loss"].item() for _ in range(3)]

    wanted = losses(None, None)
    with pytest.warns(UserWarning, match="could not be captured .* runs without: operation failed"):
        assert losses(1, opened) == wanted
    assert len(refused) == 1
    assert settling.count(True) == 1, "the first run is not captured"
    with pytest.raises(OnnxTrainError, match="previous error during capture"):
        losses(1, None)


def test_the_arena_shrinks_once_before_any_capture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A later shrink would free memory that another binding has captured."""
    plain, seen = runtime.run_bound, []

    def run(session: Any, bound: Any, options: Any = None) -> None:
        seen.append(options.get_run_config_entry("gpu_graph_id"))
        plain(session, bound)

    monkeypatch.setattr(binding, "memory_for", lambda *_: DeviceMemory("cpu"))
    monkeypatch.setattr(runtime, "run_bound", run)
    artifacts = made(dims={"batch": 8})
    spec = artifacts.manifest.model("step")
    assert spec is not None
    values = {**artifacts.values, **artifacts.state}
    inputs = {t.name: ort_value(values[t.name]) for t in spec.inputs if t.name in values}
    x, labels = data(8)
    feeds = {"x": x, "labels": labels, "learning_rate": np.array([0.1], np.float32)}
    feeds = {t.name: feeds[t.name] for t in spec.inputs if t.name in feeds}
    session = runtime.create(artifacts.source("step"), threads=1)
    one, two = (
        binding.BoundSession(session, spec, inputs, {}, GPU, graph_id) for graph_id in (1, 2)
    )
    for bound in (one, one, two):
        bound.run(feeds)
    # The third compares the second run with one that is not captured.
    assert seen == ["-1", "1", "-1", "2"]
