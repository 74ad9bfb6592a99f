"""A pretrained digits classifier with LoRA adapters for federated fine-tuning."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

import onnxtrain
from onnxtrain.graph.builder import OpBuilder

HIDDEN = 640
RANK = 2


def wide_net(seed: int = 0) -> onnx.ModelProto:
    """Return an untrained MLP with three layers, image [batch, 64] -> logits [batch, 10]."""
    rng = np.random.default_rng(seed)
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="wide")
    op = OpBuilder(graph)

    def weight(name: str, *shape: int) -> ir.Value:
        scale = np.sqrt(2 / shape[0]) if len(shape) == 2 else 0.0
        tensor = ir.Tensor((scale * rng.standard_normal(shape)).astype(np.float32), name=name)
        value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=tensor.shape)
        value.const_value = tensor
        graph.register_initializer(value)
        return value

    def layer(x: ir.Value, name: str, inputs: int, outputs: int) -> ir.Value:
        return op.Gemm(
            x, weight(f"{name}.weight", inputs, outputs), weight(f"{name}.bias", outputs)
        )

    h = op.input("image", ir.DataType.FLOAT, ["batch", 64])
    h = op.Relu(layer(h, "fc1", 64, HIDDEN))
    h = op.Relu(layer(h, "fc2", HIDDEN, HIDDEN))
    logits = layer(h, "fc3", HIDDEN, 10)
    logits.name = "logits"
    graph.outputs.append(logits)
    return ir.to_proto(ir.Model(graph, ir_version=10))


def mirrored(images: np.ndarray) -> np.ndarray:
    """Return 8 x 8 images, flipped horizontally."""
    return np.ascontiguousarray(images.reshape(-1, 8, 8)[:, :, ::-1]).reshape(-1, 64)


def pretrained(data: dict[str, np.ndarray], path: Path) -> Path:
    """Pretrain the model on upright digits, write it to a file and return the path."""
    artifacts = onnxtrain.build(wide_net(), loss="cross_entropy", optimizer="sgd:lr=0.1")
    trainer = onnxtrain.Trainer(artifacts)
    trainer.fit(data, epochs=10, batch_size=32, progress=False)
    trainer.export(path)
    return path


def artifacts_of(model: Path) -> onnxtrain.Artifacts:
    """Return artifacts that train LoRA adapters of the linear layers only."""
    return onnxtrain.build(
        onnxtrain.lora(model, rank=RANK, alpha=2 * RANK, targets="all-linear"),
        loss="cross_entropy",
        optimizer="adamw:lr=0.005",
        metrics=["accuracy"],
        target="wasm",
    )
