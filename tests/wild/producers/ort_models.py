"""Torch nets as onnxruntime's optimizers and quantizers leave them. Runs where torch is."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
from onnxruntime import quantization
from torch import nn

LEVELS = {
    "basic": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "extended": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
}


class Attention(nn.Module):
    """A transformer's encoder over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, activation="gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.table(tokens)))


class Recurrent(nn.Module):
    """An LSTM with a head on its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def cnn() -> nn.Module:
    """Return convolutions with normalization, as a classifier has them."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.SiLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 4),
    )


def mlp() -> nn.Module:
    """Return two dense layers with GELU and LayerNorm."""
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 32))


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[torch.Tensor, ...]]] = {
    "mlp": (mlp, (torch.zeros(2, 32),)),
    "cnn": (cnn, (torch.zeros(2, 3, 16, 16),)),
    "attention": (Attention, (torch.zeros(2, 6, dtype=torch.int64),)),
    "lstm": (Recurrent, (torch.zeros(2, 6, 8),)),
}


def exported(folder: Path, name: str) -> Path:
    """Write a net as torch exports it."""
    make, example = NETS[name]
    torch.manual_seed(0)
    net, path = make().eval(), folder / f"{name}.onnx"
    torch.onnx.export(
        net,
        example,
        str(path),
        dynamo=False,
        input_names=["x"],
        output_names=["y"],
        dynamic_axes={"x": {0: "batch"}, "y": {0: "batch"}},
        opset_version=17,
    )
    return path


def optimized(path: Path, level: str) -> None:
    """Write what the runtime makes of a file when it loads it."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = LEVELS[level]
    options.optimized_model_filepath = str(path.with_name(f"{path.stem}-{level}.onnx"))
    onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


class Reader(quantization.CalibrationDataReader):
    """A few random batches to calibrate with."""

    def __init__(self, path: Path) -> None:
        (x,) = onnxruntime.InferenceSession(str(path)).get_inputs()
        rng = np.random.default_rng(1)
        shape = [d if isinstance(d, int) else 2 for d in x.shape]
        batches = [rng.standard_normal(shape).astype(np.float32) for _ in range(4)]
        self.left = iter([{x.name: b} for b in batches])

    def get_next(self) -> dict[str, np.ndarray] | None:  # type: ignore[override]
        """Return a batch, as long as there is one."""
        return next(self.left, None)


def quantised(path: Path) -> None:
    """Write a file with 8-bit weights: dynamic, and with Q/DQ around every product."""
    quantization.quantize_dynamic(str(path), str(path.with_name(f"{path.stem}-dynamic.onnx")))
    if path.stem in ("mlp", "cnn"):
        target = path.with_name(f"{path.stem}-qdq.onnx")
        quantization.quantize_static(str(path), str(target), Reader(path))


def four_bits(path: Path) -> None:
    """Write a file whose products have 4-bit weights."""
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    for level in (0, 4):
        quantiser = MatMulNBitsQuantizer(
            onnx.load(path), block_size=32, is_symmetric=True, accuracy_level=level
        )
        quantiser.process()
        target = path.with_name(f"{path.stem}-int4-{level}.onnx")
        quantiser.model.save_model_to_file(str(target))


def halved(path: Path) -> None:
    """Write a file in float16."""
    from onnxruntime.transformers.float16 import convert_float_to_float16

    for keep in (True, False):
        model = convert_float_to_float16(onnx.load(path), keep_io_types=keep)
        onnx.save(model, path.with_name(f"{path.stem}-fp16{'-io32' if keep else ''}.onnx"))


def main(folder: Path) -> None:
    """Write all of them; say what cannot be made."""
    for name in NETS:
        path = exported(folder, name)
        works: dict[str, Callable[[], None]] = {
            "basic": lambda path=path: optimized(path, "basic"),
            "extended": lambda path=path: optimized(path, "extended"),
            "quantised": lambda path=path: quantised(path),
            "int4": lambda path=path: four_bits(path),
            "fp16": lambda path=path: halved(path),
        }
        for work, make in works.items():
            try:
                make()
            except Exception as error:  # a tool that fails on one model still makes the others
                print(
                    f"not made: {name} {work}: {type(error).__name__}: {str(error)[:150]}",
                    flush=True,
                )
            else:
                print(f"{name} {work}: made", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
