"""Quantization-aware training: accuracy beside quantization after training, and integer models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch

import onnxtrain
from onnxtrain import Trainer, examples
from onnxtrain.errors import PrepareError
from onnxtrain.torch import from_torch


class Net(torch.nn.Module):
    """A small CNN for digits of 8 x 8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = torch.nn.Conv2d(1, 8, 3, padding=1)
        self.conv2 = torch.nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.fc = torch.nn.Linear(16 * 16, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.conv1(image.reshape(-1, 1, 8, 8)).relu()
        return self.fc(self.conv2(x).relu().flatten(1))


def accuracy(model: onnx.ModelProto, data: dict[str, np.ndarray]) -> float:
    session = onnxruntime.InferenceSession(model.SerializeToString())
    (logits,) = session.run(None, {session.get_inputs()[0].name: data["image"]})
    return float((logits.argmax(1) == data["labels"]).mean())


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a trained CNN."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("cnn") / "cnn.onnx"
    model = from_torch(Net(), (torch.zeros(2, 64),))
    artifacts = onnxtrain.build(model, loss="cross_entropy", optimizer="adamw:lr=0.005")
    trainer = Trainer(artifacts, seed=0)
    trainer.fit(examples.digits_data(1200), epochs=4, progress=False)
    trainer.export(path)
    return path


def retrain(model: onnx.ModelProto, tmp_path: Path, **options: object) -> onnx.ModelProto:
    artifacts = onnxtrain.build(
        model,
        loss="cross_entropy",
        optimizer="adamw:lr=0.001",
        straight_through=True,
        **options,  # pyright: ignore[reportArgumentType]
    )
    trainer = Trainer(artifacts, seed=0)
    trainer.fit(examples.digits_data(1200), epochs=4, progress=False)
    trainer.export(tmp_path / "trained.onnx")
    return onnx.load(tmp_path / "trained.onnx")


@pytest.mark.parametrize("learned", [False, True], ids=["fixed-scales", "lsq"])
def test_int4_after_training_with_quantizers_beats_int4_after_training(
    learned: bool, trained: Path, tmp_path: Path
) -> None:
    held_out = examples.digits_data(600, seed=7)
    calibration = {"image": examples.digits_data(200)["image"]}
    quantized = onnxtrain.quantize_aware(trained, calibration, weights="int4")
    before = accuracy(onnxtrain.fold_quantizers(quantized), held_out)
    train = {"train": ["*.weight", "*.bias", "*_scale"]} if learned else {}
    retrained = retrain(quantized, tmp_path, **train)
    after = accuracy(onnxtrain.fold_quantizers(retrained), held_out)
    assert after > before
    scales = [
        {n: x.const_value.numpy() for n, x in ir.from_proto(m).graph.initializers.items()}
        for m in (quantized, retrained)
    ]
    names = [n for n in scales[0] if n.endswith("_scale")]
    moved = [n for n in names if not np.array_equal(scales[0][n], scales[1][n])]
    assert bool(moved) == learned


class Encoder(torch.nn.Module):
    """A small BERT: does the first word occur again?"""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(12, 32)
        layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.first = torch.nn.Parameter(0.5 * torch.randn(8, 32))
        self.head = torch.nn.Linear(32, 2)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embed(words) + self.first)[:, 0])


@pytest.mark.full  # the CNN above covers the same code
def test_a_small_bert_in_4_bits(tmp_path: Path) -> None:
    """Train the encoder, then as long again in float or with the rounding of the weights."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    words = rng.integers(0, 12, (3000, 8))
    labels = (words[:, 1:] == words[:, :1]).any(1).astype(np.int64)
    parts = [{"words": words[s], "labels": labels[s]} for s in (slice(2400), slice(2400, None))]
    train, held_out = parts
    calibration = {"words": train["words"][:200]}
    types = {"weights": "int4", "activations": "uint4"}

    def more(model: object, lr: float, **options: Any) -> onnx.ModelProto:
        artifacts = onnxtrain.build(
            model, loss="cross_entropy", optimizer=f"adamw:lr={lr}", **options
        )
        trainer = Trainer(artifacts, seed=0)
        trainer.fit(train, batch_size=64, epochs=5, progress=False)
        trainer.export(tmp_path / "trained.onnx")
        return onnx.load(tmp_path / "trained.onnx")

    def right(model: onnx.ModelProto) -> float:
        session = onnxruntime.InferenceSession(onnxtrain.fold_quantizers(model).SerializeToString())
        (logits,) = session.run(None, {"words": held_out["words"]})
        return float((logits.argmax(1) == held_out["labels"]).mean())

    start = more(from_torch(Encoder(), (torch.zeros(2, 8, dtype=torch.long),)), 0.005)
    rounded = onnxtrain.quantize_aware(more(start, 0.001), calibration, **types)
    aware = onnxtrain.quantize_aware(start, calibration, **types)
    after = right(more(aware, 0.001, straight_through=True))
    before = right(rounded)
    assert after > before + 0.02


@pytest.mark.parametrize("per_channel", [False, True])
def test_onnxruntime_computes_the_folded_model_in_integers(
    per_channel: bool, trained: Path, tmp_path: Path
) -> None:
    data = examples.digits_data(200)
    calibration = {"image": data["image"]}
    quantized = onnxtrain.quantize_aware(trained, calibration, per_channel=per_channel)
    folded = onnxtrain.fold_quantizers(quantized)
    weights = {i.name: i.data_type for i in folded.graph.initializer}
    assert weights["conv1.weight.quantized"] == onnx.TensorProto.INT8
    assert weights["conv1.bias.quantized"] == onnx.TensorProto.INT32
    assert not any(name == "conv1.weight" for name in weights)
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    onnxruntime.InferenceSession(folded.SerializeToString(), options)
    kinds = [n.op_type for n in onnx.load(tmp_path / "optimized.onnx").graph.node]
    assert kinds.count("QLinearConv") == 2
    assert accuracy(folded, data) == pytest.approx(accuracy(quantized, data), abs=0.01)


def test_values_of_folded_weights_are_those_of_the_operator(trained: Path) -> None:
    data = {"image": examples.digits_data(40)["image"]}
    for weights in ("int8", "uint8", "int4"):
        quantized = onnxtrain.quantize_aware(trained, data, weights=weights, per_channel=True)
        folded = onnxtrain.fold_quantizers(quantized)
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        results = [
            onnxruntime.InferenceSession(m.SerializeToString(), options).run(None, data)[0]
            for m in (quantized, folded)
        ]
        # Biases are rounded too, which moves a few results by one step of the output's scale.
        assert np.isclose(results[0], results[1], atol=1e-3).mean() > 0.98
        np.testing.assert_allclose(results[0], results[1], atol=0.5)


def test_refusals(trained: Path) -> None:
    data = {"image": np.zeros((4, 64), np.float32)}
    with pytest.raises(PrepareError, match="unknown weights: 'int3' \\(expected one of 'int4'"):
        onnxtrain.quantize_aware(trained, data, weights="int3")
    with pytest.raises(PrepareError, match="data lacks the inputs image"):
        onnxtrain.quantize_aware(trained, {"x": data["image"]})
    with pytest.raises(PrepareError, match="no operator of the model is quantized"):
        onnxtrain.quantize_aware(trained, data, operators=["LSTM"])
