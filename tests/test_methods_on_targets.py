"""Preference tuning, distillation, quantization and the like on every target.

Artifacts are built for each target; those of cpu and wasm train here and give the same losses. The
web package trains the wasm ones in Node (``web/packages/onnxtrain/tests/methods.test.ts``).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import onnxtrain
from onnxtrain import Artifacts, Trainer, examples
from onnxtrain.errors import PrepareError
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.losses import LossTerm

TARGETS = ("cpu", "cuda", "wasm", "webgpu")
Data = dict[str, np.ndarray]
DIGITS = examples.digits_data(24)


def language_model() -> onnx.ModelProto:
    """Return logits [rows, 6, 9] of input_ids [rows, 6]: an embedding and a linear layer."""
    rng = np.random.default_rng(0)
    op = OpBuilder(ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="lm"))
    weights = []
    for name, shape in (("embed", (9, 8)), ("head", (8, 9))):
        array = rng.standard_normal(shape).astype(np.float32)
        tensor = ir.Tensor(array, name=name)
        value = ir.Value(
            name=name, type=ir.TensorType(tensor.dtype), shape=tensor.shape, const_value=tensor
        )
        op.graph.register_initializer(value)
        weights.append(value)
    ids = op.input("input_ids", ir.DataType.INT64, ["rows", 6])
    logits = op.MatMul(op.Tanh(op.Gather(weights[0], ids)), weights[1])
    logits.name = "logits"
    op.graph.outputs.append(logits)
    return ir.to_proto(ir.Model(op.graph, ir_version=10))


def preference(name: str, target: str) -> tuple[Artifacts, Data]:
    rng = np.random.default_rng(1)
    ids = rng.integers(0, 9, (8, 6))
    labels = np.where(np.arange(6) < 2, -100, ids)
    batch: Data = {"input_ids": ids, "labels": labels}
    if name != "orpo":
        batch["reference_logps"] = -10 * rng.random(8).astype(np.float32)
    if name == "kto":
        batch["desirable"] = np.repeat([1, 0, 0, 1], 2)
    loss = LossTerm(name, output="logits")
    return onnxtrain.build(language_model(), loss=loss, optimizer="sgd", target=target), batch


def distillation(target: str) -> tuple[Artifacts, Data]:
    student, teacher = (examples.digits_model(hidden=n) for n in (8, 64))
    return onnxtrain.distill(student, teacher, optimizer="sgd", target=target), DIGITS


def quantization(target: str) -> tuple[Artifacts, Data]:
    model = onnxtrain.quantize_aware(examples.digits_model(), {"image": DIGITS["image"]})
    options: dict[str, Any] = {"loss": "cross_entropy", "straight_through": True}
    return onnxtrain.build(model, optimizer="sgd", target=target, **options), DIGITS


def optimizer(name: str, target: str) -> tuple[Artifacts, Data]:
    model = examples.digits_model(hidden=128)
    return onnxtrain.build(model, loss="cross_entropy", optimizer=name, target=target), DIGITS


METHODS: dict[str, Callable[[str], tuple[Artifacts, Data]]] = {
    **{n: lambda target, n=n: preference(n, target) for n in ("dpo", "ipo", "orpo", "kto")},
    "distillation": distillation,
    "quantization": quantization,
    "ewc": lambda target: optimizer("adamw:lr=0.003,ewc=10", target),
    "muon": lambda target: optimizer("muon:lr=0.003", target),
    "states": lambda target: optimizer("adamw:lr=0.003,state_bits=8", target),
}


def train(artifacts: Artifacts, batch: Data) -> list[float]:
    """Return the losses of three steps."""
    trainer = Trainer(artifacts, threads=1)
    return [float(trainer.step(**batch).loss) for _ in range(3)]


def write(folder: str) -> dict[str, Any]:
    """Write the artifacts for wasm; return batches and losses by method, as plain data."""
    found: dict[str, Any] = {}
    for name, make in METHODS.items():
        artifacts, batch = make("wasm")
        artifacts.save(Path(folder) / name)
        found[name] = {
            "losses": train(artifacts, batch),
            "batch": {n: a.tolist() for n, a in batch.items()},
        }
    return found


@pytest.mark.parametrize("method", METHODS)
def test_methods_on_targets(method: str) -> None:
    losses = {}
    for target in TARGETS:
        if (method, target) == ("states", "webgpu"):
            with pytest.raises(PrepareError, match="webgpu has no 8-bit integers"):
                METHODS[method](target)
            continue
        artifacts, batch = METHODS[method](target)
        assert target in {m.target for m in artifacts.manifest.models}
        if target in ("cpu", "wasm"):
            losses[target] = train(artifacts, batch)
    assert losses["cpu"] == pytest.approx(losses["wasm"], rel=1e-4)
    assert len(set(losses["cpu"])) == 3
