"""The table of devices, and what is refused: stand-ins for providers that this machine lacks."""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

import onnxtrain
from onnxtrain import optim
from onnxtrain.errors import MissingExtraError, OnnxTrainError, VerificationError
from onnxtrain.runtime import devices
from onnxtrain.runtime import session as runtime
from onnxtrain.runtime.devices import CPU, DEVICES, Device, check, find, register_device
from onnxtrain.torch import as_module
from onnxtrain.training import Trainer
from tests.artifacts.models import data
from tests.runtime.test_stale_inputs import CopyingBinding, MemoryInfo
from tests.training.made import LOSS, classifier, made

TOY = "ToyExecutionProvider"
Session = onnxruntime.InferenceSession


@dataclasses.dataclass
class Part:
    ep_name: str
    nodes: Sequence[Any]

    def get_nodes(self) -> Sequence[Any]:
        return self.nodes


class ToySession:
    """A session of the CPU that claims to run on another provider, but for a share of its nodes.

    With memory of its own, it copies inputs when they are bound, as onnxruntime does.
    """

    def __init__(self, session: Any, share: float, *, copies: bool) -> None:
        self._session, self._share, self._copies = session, share, copies

    def get_providers(self) -> list[str]:
        return [TOY, CPU]

    def get_provider_graph_assignment_info(self) -> list[Part]:
        parts = self._session.get_provider_graph_assignment_info()
        nodes = [node for part in parts for node in part.get_nodes()]
        count = round(len(nodes) * self._share)
        return [Part(CPU, nodes[:count]), Part(TOY, nodes[count:])]

    def get_input_memory_infos(self) -> list[MemoryInfo]:
        return [MemoryInfo("Toy" if self._copies else "Cpu") for _ in self._session.get_inputs()]

    def io_binding(self) -> Any:
        copied = {x.name for x in self._session.get_inputs()} if self._copies else set[str]()
        return CopyingBinding(self._session.io_binding(), copied)

    def run_with_iobinding(self, binding: CopyingBinding, options: Any = None) -> None:
        self._session.run_with_iobinding(binding._binding, options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Add a device by one entry, and a stand-in for its provider."""

    def install(
        *,
        share: float = 0.0,
        copies: bool = False,
        error: str = "",
        change: Callable[[onnx.ModelProto], None] | None = None,
        tested: str = "here",
    ) -> None:
        def create(source: Any, options: Any, *, providers: Any, **kwargs: Any) -> Any:
            if providers[0] == CPU:
                return Session(source, options, providers=providers)
            assert kwargs == {"enable_fallback": 0}
            assert [p if isinstance(p, str) else p[0] for p in providers] == [TOY, CPU]
            if error:
                raise RuntimeError(error)
            if change is not None:
                model = onnx.load_from_string(source)
                change(model)
                source = model.SerializeToString()
            return ToySession(Session(source, options, providers=[CPU]), share, copies=copies)

        monkeypatch.setattr(onnxruntime, "InferenceSession", create)
        monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [TOY, CPU])
        entry = Device("toy", TOY, target="portable", tested=tested)
        monkeypatch.setitem(DEVICES, "toy", entry)

    return install


def losses(trainer: Trainer) -> list[float]:
    return [trainer.step(*data(8, seed=seed)).loss for seed in range(6)]


def adamw(**options: Any) -> Any:
    return made(optimizer=optim.AdamW(lr=0.05), **options)


@pytest.mark.parametrize("copies", [False, True], ids=["host", "own memory"])
@pytest.mark.parametrize("layout", ["fused", "separate", "vector"])
def test_a_device_is_one_entry(toy: Callable[..., None], layout: str, *, copies: bool) -> None:
    wanted = losses(Trainer(adamw(), layout=layout))
    toy(copies=copies)
    with pytest.warns(UserWarning, match="built for target 'cpu' and run on 'toy'.*portable"):
        trainer = Trainer(adamw(), device="toy", layout=layout, verify=True)
    assert losses(trainer) == pytest.approx(wanted, rel=1e-6)
    assert trainer.device == "toy"
    x, labels = data(8)
    plain = Trainer(adamw())
    plain.load_state_dict(trainer.state_dict())
    assert trainer.evaluate_batch(x, labels).loss == pytest.approx(
        plain.evaluate_batch(x, labels).loss, rel=1e-6
    )
    for name, y in trainer.predict(x).items():
        np.testing.assert_allclose(y, plain.predict(x)[name], rtol=1e-5, atol=1e-6)


def test_a_model_is_built_for_the_target_of_the_device(toy: Callable[..., None]) -> None:
    toy()
    trainer = Trainer(classifier(), loss=LOSS, optimizer=optim.SGD(lr=0.1), device="toy")
    assert {m.target for m in trainer.manifest.models if m.role == "train"} == {"portable"}
    assert losses(trainer) == pytest.approx(losses(Trainer(made())), rel=1e-5)
    options = {"loss": LOSS, "optimizer": "sgd", "target": "wasm", "accumulate": 2}
    with pytest.warns(UserWarning, match="built for target 'wasm'"):
        own = Trainer(classifier(), device="toy", **options)  # type: ignore[arg-type]
    assert own.manifest.accumulate == 2
    assert {m.target for m in own.manifest.models if m.role == "train"} == {"wasm"}
    for call in (lambda: Trainer(made(), loss="mse"), lambda: Trainer(made(), devcie="toy")):
        with pytest.raises(TypeError, match=r"unexpected keyword argument '(loss|devcie)'"):
            call()


def test_a_torch_module_computes_on_a_device(toy: Callable[..., None]) -> None:
    x, labels = (torch.tensor(a) for a in data(8))
    gradients = []
    toy()
    for device in (None, "toy"):
        module = as_module(classifier(), outputs="scores", device=device)
        torch.nn.functional.cross_entropy(module(x), labels).backward()
        gradients.append({n: p.grad.numpy() for n, p in module.named_parameters()})
    for name, gradient in gradients[0].items():
        np.testing.assert_allclose(gradients[1][name], gradient, rtol=1e-5, atol=1e-7)
    (call,) = module._compiled_calls.values()
    assert isinstance(call.forward.session, ToySession)
    assert isinstance(call.backward.session, ToySession)
    with pytest.raises(MissingExtraError, match=r"cuda: onnxruntime .* has no CUDA"):
        as_module(classifier(), device="cuda")


def test_names_of_devices() -> None:
    assert find("cuda:1").settings(capture=True) == {
        "arena_extend_strategy": "kSameAsRequested",
        "device_id": "1",
        "enable_cuda_graph": "1",
    }
    assert find("CUDAExecutionProvider") is DEVICES["cuda"]
    assert find("VendorExecutionProvider").provider == "VendorExecutionProvider"
    own = find("openvino", {"device_type": "GPU", "num_streams": 2})
    assert own.settings(threads=3) == {
        "precision": "ACCURACY",
        "device_type": "GPU",
        "num_streams": "2",
        "num_of_threads": "3",
    }
    assert str(find("cuda:1")) == "cuda:1"
    assert [d.name for d in DEVICES.values()] == list(DEVICES)
    for device in DEVICES.values():
        assert onnxtrain.targets.find(device.target).name == device.target


def test_a_made_up_name() -> None:
    with pytest.raises(OnnxTrainError, match=r"unknown device: 'cudda' \(expected one of cuda, "):
        Trainer(made(), device="cudda")
    with pytest.raises(OnnxTrainError, match=r"unknown device: 'cuda:x'"):
        Trainer(made(), device="cuda:x")
    with pytest.raises(OnnxTrainError, match=r"cpu has one device, got 'cpu:1'"):
        Trainer(made(), device="cpu:1")


def test_a_missing_wheel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices.platform, "system", lambda: "Linux")
    for name, command in {
        "openvino": "pip install onnxruntime-openvino, in place of onnxruntime",
        "webgpu": "pip install onnxruntime-ep-webgpu$",
        "cuda": "pip install onnxruntime-gpu, in place of onnxruntime",
        "directml": "onnxruntime-directml is for Windows, this is Linux",
        "VendorExecutionProvider": "install the onnxruntime of its vendor, or call",
    }.items():
        with pytest.raises(
            MissingExtraError, match=rf"has no \w+Provider, only .*\nhint: {command}"
        ):
            Trainer(made(), device=name)


def test_a_provider_that_fails_to_start(toy: Callable[..., None]) -> None:
    toy(error="libtoy.so.3: cannot open shared object file")
    with pytest.raises(OnnxTrainError) as error:
        Trainer(made(), device="toy")
    assert str(error.value) == (
        f"toy: {TOY} does not start: libtoy.so.3: cannot open shared object file\n"
        "hint: `onnxtrain devices` lists the devices of this machine; "
        'device="cpu" trains on the CPU'
    )


def test_a_provider_that_onnxruntime_leaves_out(
    toy: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    toy()
    monkeypatch.setattr(ToySession, "get_providers", lambda _: [CPU])
    with pytest.raises(OnnxTrainError, match="does not start: onnxruntime fell back to the CPU"):
        Trainer(made(), device="toy")


def test_a_model_that_a_provider_cannot_load(toy: Callable[..., None]) -> None:
    def break_steps(model: onnx.ModelProto) -> None:
        if len(model.graph.node) > 1:
            model.graph.node[-1].op_type = "NoSuchOperator"

    toy(change=break_steps)
    with pytest.raises(
        OnnxTrainError, match=r"onnxruntime cannot load the model on toy: .*NoSuchOp"
    ):
        Trainer(made(), device="toy")


def test_a_provider_that_leaves_half_of_the_nodes(toy: Callable[..., None]) -> None:
    toy(share=0.5)
    with pytest.raises(
        OnnxTrainError,
        match=r"toy: \d+ of \d+ nodes would run on the CPU: \w+ '.*\n"
        r'hint: build\(..., target="portable"\) .*allow_cpu_fallback=True',
    ):
        Trainer(made(target="portable"), device="toy")
    wanted = losses(Trainer(adamw(target="portable")))
    trainer = Trainer(adamw(target="portable"), device="toy", allow_cpu_fallback=True)
    assert losses(trainer) == pytest.approx(wanted, rel=1e-6)
    placed = trainer.placement(batch=8)["step"]
    assert set(placed.counts) == {CPU, TOY}
    assert placed.left
    assert placed.copies
    assert placed.copied_bytes > 0


def test_shape_arithmetic_may_run_on_the_cpu(
    toy: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    toy(share=0.5)
    monkeypatch.setattr(runtime, "_has_float_tensor", lambda _: False)
    assert losses(Trainer(adamw(target="portable"), device="toy"))


def tanh_to_sigmoid(model: onnx.ModelProto) -> None:
    for node in model.graph.node:
        node.op_type = {"Tanh": "Sigmoid"}.get(node.op_type, node.op_type)


def test_the_first_steps_on_an_untested_device_are_verified(toy: Callable[..., None]) -> None:
    toy(change=tanh_to_sigmoid, tested="")
    trainer = Trainer(made(target="portable"), device="toy")
    before = trainer.state_dict()
    with pytest.raises(
        VerificationError,
        match=r"step 1 on toy: loss is [\d.]+, on the CPU [\d.]+\n"
        r"  first node that differs: Tanh '.*': '\w+' is off by .*\nhint: .*verify=False",
    ):
        trainer.step(*data(8))
    for name, array in trainer.state_dict().items():
        np.testing.assert_array_equal(array, before[name])
    assert Trainer(made(target="portable"), device="toy", verify=False).step(*data(8)).updated
    toy(change=tanh_to_sigmoid, tested="by somebody")
    assert Trainer(made(target="portable"), device="toy").step(*data(8)).updated


@pytest.mark.parametrize("layout", ["fused", "separate"])
def test_old_values_are_found_in_the_second_step(
    layout: str, toy: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    toy(copies=True, tested="")
    monkeypatch.setattr(runtime, "inputs_copied_when_bound", lambda *_: frozenset())
    trainer = Trainer(adamw(target="portable"), device="toy", layout=layout)
    with pytest.raises(OnnxTrainError, match=r"step \d on toy|computes with old values"):
        losses(trainer)


def test_parameters_that_never_change_are_named(toy: Callable[..., None]) -> None:
    def freeze(model: onnx.ModelProto) -> None:
        for node in model.graph.node:
            for i, name in enumerate(node.output):
                if name == "fc1.bias.out":
                    node.output[i] = "unused"
        if any(y.name == "fc1.bias.out" for y in model.graph.output):
            model.graph.node.add(op_type="Identity", input=["fc1.bias"], output=["fc1.bias.out"])

    toy(change=freeze, tested="")
    trainer = Trainer(adamw(target="portable"), device="toy", layout="fused")
    with pytest.raises(VerificationError, match=r"parameters do not change\n  'fc1.bias'"):
        trainer.step(*data(8))


def test_verification_follows_accumulation_and_loaded_weights(toy: Callable[..., None]) -> None:
    wanted = losses(Trainer(adamw(target="portable", accumulate=2)))
    toy(tested="")
    trainer = Trainer(adamw(target="portable", accumulate=2), device="toy")
    assert losses(trainer) == pytest.approx(wanted, rel=1e-6)
    trainer = Trainer(adamw(target="portable"), device="toy")
    trainer.step(*data(8))
    trainer.parameters["fc1.bias"] = np.ones_like(trainer.parameters["fc1.bias"])
    assert trainer.step(*data(8)).updated


class FakeEpDevice:
    ep_name = TOY


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """A plugin that registers, finds one device, and runs on the CPU."""
    registered: list[tuple[str, str]] = []

    class Options(onnxruntime.SessionOptions):
        def add_provider_for_devices(self, found: Any, settings: Any) -> None:
            self.chosen = (found, settings)

    def create(source: Any, options: Any, **kwargs: Any) -> Any:
        session = Session(source, options, providers=[CPU])
        if kwargs.get("providers") == [CPU]:
            return session
        assert "providers" not in kwargs, "a plugin is left out by name"
        assert options.chosen[0][0].ep_name == TOY
        return ToySession(session, 0.0, copies=False)

    def register(name: str, path: str) -> None:
        if "broken" in path:
            raise RuntimeError("undefined symbol: CreateEpFactories\nmore")
        registered.append((name, path))

    def available() -> list[str]:
        return [CPU, TOY] if registered else [CPU]

    def found() -> list[Any]:
        return [FakeEpDevice() for _, path in registered if "empty" not in path]

    monkeypatch.setattr(onnxruntime, "SessionOptions", Options)
    monkeypatch.setattr(onnxruntime, "InferenceSession", create)
    monkeypatch.setattr(onnxruntime, "register_execution_provider_library", register)
    monkeypatch.setattr(onnxruntime, "get_ep_devices", found)
    monkeypatch.setattr(onnxruntime, "get_available_providers", available)
    monkeypatch.setattr(devices, "_registered", set())
    monkeypatch.setattr(devices, "DEVICES", dict(DEVICES))
    return registered


def test_a_registered_plugin_is_a_device(plugin: list[tuple[str, str]], tmp_path: Path) -> None:
    library = tmp_path / "libtoy.so"
    entry = register_device("npu", library)
    assert (entry.provider, entry.target, entry.tested) == (TOY, "portable", "")
    wanted = losses(Trainer(adamw(target="portable")))
    trainer = onnxtrain.Trainer(adamw(target="portable"), device="npu")
    assert losses(trainer) == pytest.approx(wanted, rel=1e-6)
    assert plugin == [("npu", str(library))], "registered once"
    with pytest.raises(OnnxTrainError, match=r"npu:3: this machine has 1 of them"):
        check("npu:3")


def test_a_plugin_registers_from_its_installed_wheel(
    plugin: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("onnxruntime_ep_toy")
    module.where = lambda: "/wheels/libtoy.so"  # type: ignore[attr-defined]
    entry = Device("toy", TOY, plugin="onnxruntime_ep_toy:where", wheel="onnxruntime-ep-toy")
    monkeypatch.setitem(devices.DEVICES, "toy", entry)
    with pytest.raises(MissingExtraError, match=r"hint: pip install onnxruntime-ep-toy$"):
        check("toy")
    monkeypatch.setitem(sys.modules, "onnxruntime_ep_toy", module)
    assert losses(Trainer(adamw(target="portable"), device="toy"))
    assert plugin == [("toy", "/wheels/libtoy.so")]


def test_plugins_that_do_not_work(plugin: list[tuple[str, str]], tmp_path: Path) -> None:
    with pytest.raises(OnnxTrainError, match=r"broken.so: onnxruntime cannot load .*CreateEpFact"):
        register_device("npu", tmp_path / "broken.so")
    with pytest.raises(OnnxTrainError, match=r"empty.so: the plugin finds no device"):
        register_device("npu", tmp_path / "empty.so")
    assert "npu" not in devices.DEVICES
    register_device("webgpu", tmp_path / "empty2.so")
    with pytest.raises(
        OnnxTrainError, match=r"webgpu: the plugin is installed and finds no device"
    ):
        check("webgpu")


def test_a_real_library_that_is_no_plugin(tmp_path: Path) -> None:
    with pytest.raises(OnnxTrainError, match=r"libmissing.so: onnxruntime cannot load this plugin"):
        register_device("npu", tmp_path / "libmissing.so")
