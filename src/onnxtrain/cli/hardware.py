"""Commands for devices: what this machine has, and a check that anybody can run."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import onnx
import onnx_ir as ir
import typer
from rich.console import Console
from rich.table import Table
from typer import Argument, Option

import onnxtrain
from onnxtrain.artifacts import Artifacts
from onnxtrain.artifacts.build import build
from onnxtrain.cli.flags import Json
from onnxtrain.errors import OnnxTrainError
from onnxtrain.examples import digits_data, digits_model
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.io.writer import write_text
from onnxtrain.losses import CrossEntropy
from onnxtrain.optim import AdamW
from onnxtrain.runtime.devices import DEVICES, check, find, plugin_devices, runtime_version
from onnxtrain.training import Trainer

_STEPS, _BATCH, _TIMED = 20, 32, 10
_TOLERANCE = 1e-3
"""Relative difference of losses from those of the CPU, after which a net counts as failed."""


def devices(as_json: Json = False) -> None:
    """List devices: what this machine has, and what a wheel would add."""
    rows = [
        {
            "device": d.name,
            "provider": d.provider,
            "here": (problem := _problem(d.name)) is None,
            "install": "" if problem is None else d.install,
            "problem": problem or "",
            "target": d.target,
            "tested": d.tested,
        }
        for d in DEVICES.values()
    ]
    if as_json:
        typer.echo(json.dumps(rows))
        return
    table = Table("device", "here", "trains", "target", "to add it")
    for row in rows:
        trains = row["tested"] or f"untested: onnxtrain check-device {row['device']}"
        here = "yes" if row["here"] else "no"
        table.add_row(str(row["device"]), here, str(trains), str(row["target"]), _remedy(row))
    Console().print(table)


def _problem(name: str) -> str | None:
    try:
        check(name)
    except OnnxTrainError as error:
        return str(error)
    return None


def _remedy(row: dict[str, Any]) -> str:
    return str(row["problem"]).partition("hint: ")[2]


def check_device(
    device: Annotated[str, Argument(help="Device, as for train, or the name of a provider.")],
    output: Annotated[
        Path | None, Option("--output", "-o", help="Report. Default: check-device-NAME.json.")
    ] = None,
    option: Annotated[
        list[str] | None, Option(help="Option of the provider: device_type=GPU; repeatable.")
    ] = None,
) -> None:
    """Train three small nets on a device and on the CPU, and write a report to send back."""
    chosen = check(find(device, dict(_parse_option(text) for text in option or ())))
    nets = {name: _compare(make, chosen) for name, make in _NETS.items()}
    report = {
        "onnxtrain": onnxtrain.__version__,
        "onnxruntime": runtime_version(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": str(chosen),
        "provider": chosen.provider,
        "options": dict(chosen.options),
        "found": [_describe(d) for d in plugin_devices(chosen)],
        "nets": nets,
    }
    path = output or Path(f"check-device-{device.replace(':', '-')}.json")
    write_text(path, json.dumps(report, indent=1) + "\n")
    for name, result in nets.items():
        typer.echo(f"{name}: {_verdict(result)}")
    typer.echo(f"{path}: please attach it to an issue of onnxtrain")
    if any("error" in result for result in nets.values()):
        raise typer.Exit(1)


def _parse_option(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise OnnxTrainError(
            f"invalid option {text!r} (expected NAME=VALUE)\nhint: --option device_type=GPU"
        )
    return name, value


def _describe(found: Any) -> dict[str, Any]:
    """Return what onnxruntime knows of the hardware behind a plugin."""
    return {
        "type": str(found.device.type).rpartition(".")[2],
        "vendor": found.device.vendor,
        "metadata": {**found.ep_metadata, **found.device.metadata},
    }


def _verdict(result: dict[str, Any]) -> str:
    if "error" in result:
        return f"failed\n{result['error']}"
    return (
        f"trains; losses equal the CPU's to {result['difference']:.0e}; "
        f"{result['ms']:.2f} ms a step, {result['ms_cpu']:.2f} on the CPU"
    )


def _compare(make: Callable[[], tuple[onnx.ModelProto, dict[str, Any]]], device: Any) -> Any:
    """Train one net on the CPU and on a device; return losses and times, or the error."""
    model, batch = make()
    artifacts = build(model, loss=CrossEntropy(), optimizer=AdamW(lr=0.01), target=device.target)
    expected, ms_cpu, _ = _train(artifacts, batch, "cpu")
    try:
        losses, ms, trainer = _train(artifacts, batch, device)
        nodes = {role: p.counts for role, p in trainer.placement(batch=_BATCH).items()}
    except OnnxTrainError as error:
        return {"error": str(error)}
    difference = float(np.max(np.abs(losses / expected - 1)))
    result = {"difference": difference, "ms": ms, "ms_cpu": ms_cpu, "nodes": nodes}
    if not difference <= _TOLERANCE:
        result["error"] = f"losses {losses.tolist()}, on the CPU {expected.tolist()}"
    return result


def _train(
    artifacts: Artifacts, batch: dict[str, Any], device: Any
) -> tuple[np.ndarray, float, Trainer]:
    trainer = Trainer(artifacts, device=device, verify=True)
    losses = np.array([trainer.step(**batch).loss for _ in range(_STEPS)])
    start = time.perf_counter()
    for _ in range(_TIMED):
        trainer.step(**batch)
    return losses, (time.perf_counter() - start) * 1000 / _TIMED, trainer


def _dense() -> tuple[onnx.ModelProto, dict[str, Any]]:
    return digits_model(hidden=128), digits_data(_BATCH)


class _Net:
    """A model under construction, with random weights."""

    def __init__(self) -> None:
        self.op = OpBuilder(ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="net"))
        self._rng = np.random.default_rng(0)

    def weight(self, name: str, *shape: int, start: float | None = None) -> ir.Value:
        scale = np.sqrt(2 / max(np.prod(shape[1:]), 1))
        array = self._rng.standard_normal(shape) * scale if start is None else np.full(shape, start)
        tensor = ir.Tensor(array.astype(np.float32), name=name)
        value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=tensor.shape)
        value.const_value = tensor
        self.op.graph.register_initializer(value)
        return value

    def finish(self, logits: ir.Value) -> onnx.ModelProto:
        logits.name = "logits"
        self.op.graph.outputs.append(logits)
        return ir.to_proto(ir.Model(self.op.graph, ir_version=10))


def _convolution() -> tuple[onnx.ModelProto, dict[str, Any]]:
    net = _Net()
    op, weight = net.op, net.weight
    x = op.input("image", ir.DataType.FLOAT, ["batch", 1, 8, 8])
    x = op.Conv(x, weight("conv1", 8, 1, 3, 3), pads=[1, 1, 1, 1], kernel_shape=[3, 3])
    scale, bias = weight("scale", 8, start=1), weight("bias", 8, start=0)
    mean, variance = weight("mean", 8, start=0), weight("variance", 8, start=1)
    x = op.Relu(op.BatchNormalization(x, scale, bias, mean, variance))
    x = op.MaxPool(x, kernel_shape=[2, 2], strides=[2, 2])
    x = op.Relu(op.Conv(x, weight("conv2", 16, 8, 3, 3), kernel_shape=[3, 3]))
    logits = op.Gemm(op.Flatten(x), weight("head", 10, 64), weight("head.bias", 10), transB=1)
    data = digits_data(_BATCH)
    return net.finish(logits), {**data, "image": data["image"].reshape(-1, 1, 8, 8)}


def _attention() -> tuple[onnx.ModelProto, dict[str, Any]]:
    """One transformer block on the rows of an image, each an index into an embedding."""
    net, width = _Net(), 16
    op, weight = net.op, net.weight
    ids = op.input("rows", ir.DataType.INT64, ["batch", 8])
    x = op.Add(op.Gather(weight("embedding", 32, width), ids), weight("position", 8, width))
    y = op.LayerNormalization(
        x, weight("norm", width, start=1), weight("norm.bias", width, start=0), axis=-1
    )
    q, k, v = (op.MatMul(y, weight(name, width, width)) for name in ("query", "key", "value"))
    scores = op.Softmax(op.Mul(op.MatMul(q, op.Transpose(k, perm=[0, 2, 1])), width**-0.5), axis=-1)
    x = op.Add(x, op.MatMul(op.MatMul(scores, v), weight("out", width, width)))
    x = op.ReduceMean(op.Tanh(x), [1], keepdims=0)
    logits = op.Gemm(x, weight("head", 10, width), weight("head.bias", 10), transB=1)
    data = digits_data(_BATCH)
    rows = (data["image"].reshape(-1, 8, 8) * 4).sum(2).clip(0, 31)
    return net.finish(logits), {"rows": rows.astype(np.int64), "labels": data["labels"]}


_NETS = {"dense": _dense, "convolution": _convolution, "attention": _attention}
