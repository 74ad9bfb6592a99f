"""Ten nets on a device beside the CPU: losses of twenty AdamW steps, and times.

``python -m benchmarks.devices nets FOLDER`` exports the nets and builds artifacts (needs torch);
``python -m benchmarks.devices run FOLDER --device openvino --json FILE`` trains them on a machine
that has the device. ``docs/devices.md`` reads the files in ``benchmarks/results/devices``.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np

import onnxtrain
from onnxtrain.artifacts import Artifacts
from onnxtrain.errors import OnnxTrainError
from onnxtrain.runtime.devices import DEVICES, check, find, import_onnxruntime, plugin_devices
from onnxtrain.training import Trainer

NETS = (
    *("mlp", "siren", "deep_sets", "lenet", "resnet", "unet"),
    *("convnext", "vit", "gpt2", "llama"),
)
"""Names of the zoo in ``tests/zoo``: dense, convolutional and attention nets."""
STEPS, TIMED = 20, 50
RTOL = 1e-4
"""Largest relative difference of a loss that counts as equal."""


def build_nets(folder: Path, names: list[str], targets: list[str]) -> None:
    """Write artifacts of each net for each target, and a batch."""
    from tests.zoo.export import export, input_names
    from tests.zoo.models import ZOO

    for name in names or NETS:
        entry = ZOO[name]
        model, size = export(entry, entry.modes[-1]).model, entry.batches[0]
        sizes = {d.dim_param for d in model.graph.input[0].type.tensor_type.shape.dim}
        inputs = entry.inputs(size)
        batch = {n: x.numpy() for n, x in zip(input_names(entry), inputs, strict=True)}
        y = entry.build()(*inputs)
        for target in targets:
            artifacts = onnxtrain.build(
                model,
                loss="mse",
                optimizer=onnxtrain.optim.AdamW(lr=1e-3),
                target=target,
                dims={d: size for d in sizes if d},
            )
            artifacts.save(folder / name / target)
        term = artifacts.manifest.model("train")
        assert term is not None
        (goal,) = (t.name for t in term.inputs_of("target"))
        batch[goal] = 0.5 * np.random.default_rng(0).standard_normal(tuple(y.shape))
        np.savez(folder / name / "batch.npz", **{n: _narrow(x) for n, x in batch.items()})
        print(name, flush=True)


def _narrow(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32) if x.dtype == np.float64 else x


def train(
    folder: Path, target: str, device: Any, threads: int | None = 1
) -> tuple[np.ndarray, float, Trainer]:
    """Return the losses of the first steps, the time of the fastest one, and the trainer."""
    with np.load(folder / "batch.npz") as file:
        batch = dict(file)
    trainer = Trainer(Artifacts.load(folder / target), device=device, threads=threads)
    losses = np.array([trainer.step(**batch).loss for _ in range(STEPS)])
    times = []
    for _ in range(TIMED):
        start = time.perf_counter()
        trainer.step(**batch)
        times.append(time.perf_counter() - start)
    return losses, min(times) * 1000, trainer


def compare(folder: Path, device: Any) -> dict[str, Any]:
    """Train a net on the CPU and on a device."""
    expected, ms_cpu, _ = train(folder, "cpu", "cpu")
    try:
        losses, ms, trainer = train(folder, device.target, device)
    except OnnxTrainError as error:
        return {"error": str(error)[:400], "ms_cpu": round(ms_cpu, 3)}
    nodes: dict[str, int] = {}
    for placed in trainer.placement().values():
        for provider, count in placed.counts.items():
            nodes[provider] = nodes.get(provider, 0) + count
    return {
        "difference": float(f"{np.max(np.abs(losses / expected - 1)):.1e}"),
        "ms": round(ms, 3),
        "ms_cpu": round(ms_cpu, 3),
        "layout": trainer.layout,
        "captured": trainer.captured,
        "nodes": nodes,
    }


def resident(folder: Path, device: Any, *, capture: bool) -> dict[str, Any]:
    """Time the step model with parameters and state in tensors of a plugin's device.

    Two bindings read and write two sets of tensors in turn; a batch is copied in, a loss out.
    """
    ort = import_onnxruntime()
    (found, *_) = plugin_devices(device)
    memory = found.memory_info(ort.OrtDeviceMemoryType.DEFAULT)
    artifacts = Artifacts.load(folder / device.target)
    spec = artifacts.manifest.model("step")
    assert spec is not None
    options = ort.SessionOptions()
    options.enable_mem_pattern = False
    options.add_provider_for_devices([found], {"enableGraphCapture": "1"} if capture else {})
    session = ort.InferenceSession(str(folder / device.target / spec.file), options)
    with np.load(folder / "batch.npz") as file:
        start = {**file, **artifacts.values, **artifacts.state}

    def on_device(array: np.ndarray) -> Any:
        value = ort.OrtValue.ortvalue_from_shape_and_type(
            list(array.shape), array.dtype.type, memory_info=memory
        )
        ort.copy_tensors([ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array))], [value])
        return value

    kinds = {x.name: x.type for x in session.get_inputs()}
    wide = {"lr": 1e-3, "step": 1}
    inputs = {}
    for t in spec.inputs:
        array = start.get(t.name, np.full([int(d) for d in t.shape], wide.get(t.role, 0)))
        dtype = {"tensor(int32)": np.int32, "tensor(int64)": np.int64}.get(
            kinds[t.name], np.float32
        )
        inputs[t.name] = on_device(np.asarray(array, dtype))
    copy = {t.feeds: on_device(np.asarray(start[t.feeds])) for t in spec.outputs if t.feeds}
    others = {
        t.name: on_device(np.zeros([int(d) for d in t.shape], np.float32))
        for t in spec.outputs
        if not t.feeds
    }
    loss = np.zeros((), np.float32)
    host = ort.OrtValue.ortvalue_from_numpy(loss)
    (loss_name,) = (t.name for t in spec.outputs_of("loss"))
    calls = []
    for bank in (0, 1):
        binding = session.io_binding()
        old, new = (inputs, copy) if bank == 0 else (copy, inputs)
        for t in spec.inputs:
            binding.bind_ortvalue_input(t.name, old[t.name] if t.name in copy else inputs[t.name])
        for t in spec.outputs:
            target = new[t.feeds] if t.feeds else others[t.name]
            binding.bind_ortvalue_output(t.name, target)
        run_options = ort.RunOptions()
        if capture:
            run_options.add_run_config_entry("gpu_graph_id", str(bank + 1))
        calls.append((binding, run_options if capture else None))
    step_name = next(t.name for t in spec.inputs if t.role == "step")
    kind = np.int32 if kinds[step_name] == "tensor(int32)" else np.int64
    losses, times = [], []
    for number in range(STEPS + TIMED):
        begin = time.perf_counter()
        counter = ort.OrtValue.ortvalue_from_numpy(np.array([number + 1], kind))
        ort.copy_tensors([counter], [inputs[step_name]])
        binding, run_options = calls[number % 2]
        session.run_with_iobinding(binding, run_options)
        ort.copy_tensors([others[loss_name]], [host])
        losses.append(float(loss))
        times.append(time.perf_counter() - begin)
    return {"ms": round(min(times[STEPS:]) * 1000, 3), "losses": losses[:STEPS]}


def _attempt(function: Any, *arguments: Any, **named: Any) -> Any:
    try:
        return function(*arguments, **named)
    except Exception as error:  # of onnxruntime, or of a machine that lacks something
        return {"error": f"{type(error).__name__}: {str(error)[:400]}"}


def measure(folder: Path, name: str, path: Path, *, tensors: bool) -> None:
    """Write the results of all nets on a device, after each net."""
    device = check(find(name))
    nets: dict[str, Any] = {}
    results = {
        "device": str(device),
        "provider": device.provider,
        "onnxtrain": onnxtrain.__version__,
        "onnxruntime": import_onnxruntime().__version__,
        "machine": f"{platform.system()} {platform.machine()}",
        "date": datetime.date.today().isoformat(),
        "nets": nets,
    }
    for net in sorted(p.parent.name for p in folder.glob("*/batch.npz")):
        nets[net] = _attempt(compare, folder / net, device)
        if tensors:
            expected = train(folder / net, "cpu", "cpu")[0]
            for capture in (False, True):
                result = _attempt(resident, folder / net, device, capture=capture)
                if "losses" in result:
                    losses = np.array(result.pop("losses"))
                    result["difference"] = float(f"{np.max(np.abs(losses / expected - 1)):.1e}")
                nets[net]["captured tensors" if capture else "tensors"] = result
        print(net, json.dumps(nets[net]), flush=True)
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=("nets", "run"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--nets", default="", help="names, with commas")
    parser.add_argument("--targets", default=",".join(("cpu", "openvino", "webgpu", "cuda")))
    parser.add_argument("--device", default="openvino", help=f"one of {', '.join(DEVICES)}")
    parser.add_argument("--tensors", action="store_true", help="time state in device tensors")
    parser.add_argument("--json", type=Path, default=Path("devices.json"))
    options = parser.parse_args()
    if options.command == "nets":
        names = [n for n in options.nets.split(",") if n]
        build_nets(options.folder, names, options.targets.split(","))
        return
    measure(options.folder, options.device, options.json, tensors=options.tensors)


if __name__ == "__main__":
    main()
