"""Nets on which `python -m benchmarks.passes` measures graph passes: whole models, random weights.

Only torch is needed to export them. Exported files are stored without weights, so that a folder of
them is small enough to copy to another machine; weights are drawn when a file is read.
"""

from __future__ import annotations

import dataclasses
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

import onnxtrain
from benchmarks import prepare
from benchmarks.finetuning import decoder_file
from benchmarks.finetuning.shapes import Shape
from benchmarks.workloads import WORKLOADS, Workload
from onnxtrain.text import without_cache

STRIPPED_BYTES = 4096
"""Weights of at least this size are not stored in exported files."""


@dataclasses.dataclass(frozen=True)
class Net:
    """A workload and the precision it is trained in."""

    workload: Workload
    precision: str = "float32"

    @property
    def name(self) -> str:
        """Name on the command line and in results."""
        return self.workload.name

    @property
    def title(self) -> str:
        """Description in tables."""
        return self.workload.title

    def export(self, folder: Path) -> Path:
        """Return the file of the net without its weights; write it if the folder has none."""
        path = folder / f"{self.name}-{prepare.key(self.workload)[:12]}.onnx"
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            onnx.save(_strip(_export(self.workload)), path)
        return path

    def build(self, path: Path, target: str) -> onnxtrain.Artifacts:
        """Build an exported net for a target."""
        return onnxtrain.build(
            read(path),
            loss="cross_entropy",
            optimizer="adamw",
            target=target,
            precision=self.precision,
            dims=self.workload.dims(),
            check=False,
        )

    def batch(self) -> dict[str, np.ndarray]:
        """Return a batch by the names of the trainer's inputs."""
        x, labels = self.workload.batch()
        return {"x": x, "labels": labels}


@dataclasses.dataclass(frozen=True)
class AdapterNet:
    """LoRA adapters on a decoder with 4-bit weights, in the operators of onnxruntime-genai."""

    name: str
    title: str
    shape: Shape
    batch_size: int
    length: int
    precision: str = "float32"

    def export(self, folder: Path) -> Path:
        """Return where the net is written; weights are drawn when it is built."""
        return folder / f"{self.name}.onnx"

    def build(self, path: Path, target: str) -> onnxtrain.Artifacts:
        """Build the adapters for a target, with fixed sizes on a GPU."""
        with tempfile.TemporaryDirectory() as folder:
            model = without_cache(decoder_file.write(self.shape, Path(folder) / path.name))
        fixed = {"batch_size": self.batch_size, "sequence_length": self.length}
        return onnxtrain.build(
            onnxtrain.lora(model, rank=8, alpha=16, targets="all-linear"),
            loss="causal_lm",
            optimizer="adamw",
            target=target,
            precision=self.precision,
            dims=None if target == "cpu" else fixed,
            check=False,
        )

    def batch(self) -> dict[str, np.ndarray]:
        """Return a batch by the names of the trainer's inputs."""
        rng = np.random.default_rng(0)
        ids = rng.integers(0, self.shape.vocabulary, (self.batch_size, self.length))
        return {"input_ids": ids, "attention_mask": np.ones_like(ids), "labels": ids}


def _llama(width: int, layers: int, heads: int, tokens: int) -> Any:
    from benchmarks.workloads.text import Llama

    return lambda: Llama(tokens, width, layers, heads)


def _gpt2(tokens: int, width: int, layers: int, heads: int, context: int) -> Any:
    from benchmarks.workloads.text import GPT2

    return lambda: GPT2(tokens, width, layers, heads, context)


def _lm(tokens: int, size: int, heads: int, hidden: int) -> Any:
    from benchmarks.workloads.text import TransformerLM

    return lambda: TransformerLM(tokens, size, heads, hidden)


def _audio(width: int, layers: int, heads: int) -> Any:
    from benchmarks.workloads.text import AudioEncoder

    return lambda: AudioEncoder(width, layers, heads)


def _masked(tokens: int, width: int, layers: int, heads: int, context: int) -> Any:
    from benchmarks.workloads.text import MaskedLM

    return lambda: MaskedLM(tokens, width, layers, heads, context)


def _merging(width: int, layers: int) -> Any:
    from benchmarks.workloads.vision import MergingViT

    return lambda: MergingViT(width=width, layers=layers)


def _vit(width: int, layers: int) -> Any:
    from benchmarks.workloads.vision import ViT

    return lambda: ViT(width=width, layers=layers)


def _unet(width: int) -> Any:
    from benchmarks.cuda.real_nets import UNet

    return lambda: UNet(width)


def _encoder() -> Any:
    from benchmarks.cuda.encoder import Encoder

    return Encoder()


def _resnet() -> Any:
    from benchmarks.workloads.vision import ResNet18

    return ResNet18()


def _mobilenet() -> Any:
    from benchmarks.workloads.vision import MobileNetV2

    return MobileNetV2()


def _cnn() -> Any:
    from benchmarks.workloads.vision import cnn

    return cnn()


def _later(make: Any, *args: Any) -> Any:
    """Return a function that makes a module; torch is imported when it is called."""
    return lambda: make(*args)()


def _tokens(name: str, title: str, make: Any, batch: int, length: int, tokens: int) -> Workload:
    return Workload(name, title, make, (batch, length), tokens, batch * length, words=True)


def _images(name: str, title: str, make: Any, batch: int, size: int) -> Workload:
    return Workload(name, title, make, (batch, 3, size, size), 100, batch)


# Small enough that a step takes 5 to 100 ms on one thread.
_CPU = (
    Net(WORKLOADS["mlp"]),
    Net(WORKLOADS["cnn"]),
    Net(_images("resnet18", "ResNet-18 32x32, batch 4", _resnet, 4, 32)),
    Net(_images("mobilenetv2", "MobileNetV2 32x32, batch 8", _mobilenet, 8, 32)),
    Net(_images("vit", "ViT 6 x 192, 32x32, batch 8", _later(_vit, 192, 6), 8, 32)),
    Net(
        Workload(
            "unet",
            "U-Net width 16, 32x32, batch 2",
            _later(_unet, 16),
            (2, 3, 32, 32),
            8,
            2 * 32 * 32,
        )
    ),
    Net(WORKLOADS["lm2k"]),
    Net(WORKLOADS["gru"]),
    Net(_tokens("gpt2", "GPT-2 2 x 256, 4x128", _later(_gpt2, 2048, 256, 2, 4, 128), 4, 128, 2048)),
    Net(_tokens("llama", "Llama 3 x 256, 4x128", _later(_llama, 256, 3, 4, 2048), 4, 128, 2048)),
    Net(
        _images(
            "merging", "ViT with merged patches, 64x64, batch 8", _later(_merging, 96, 2), 8, 64
        )
    ),
    Net(
        _tokens(
            "tied",
            "GPT-2 2 x 128, tied vocabulary 50,257, 2x64",
            _later(_gpt2, 50257, 128, 2, 4, 64),
            2,
            64,
            50257,
        )
    ),
    AdapterNet(
        "adapters-4bit",
        "LoRA on a 4-bit decoder 3 x 256, 2x128",
        Shape(2048, 256, 640, 3, 4, 2),
        batch_size=2,
        length=128,
    ),
    Net(
        Workload(
            "audio",
            "audio encoder 2 x 192, 256 frames, batch 4",
            _later(_audio, 192, 2, 4),
            (4, 80, 512),
            35,
            4,
        )
    ),
)

# Large enough to keep a data-center GPU busy; few layers, because layers are alike.
_CUDA = (
    Net(Workload("cnn", "CNN 28x28, batch 256", _cnn, (256, 1, 28, 28), 10, 256)),
    Net(_images("resnet18", "ResNet-18 128x128, batch 64", _resnet, 64, 128), "bf16-mixed"),
    Net(_images("resnet18-f32", "ResNet-18 128x128, batch 64, float32", _resnet, 64, 128)),
    Net(_images("mobilenetv2", "MobileNetV2 128x128, batch 64", _mobilenet, 64, 128), "bf16-mixed"),
    Net(
        Workload(
            "unet",
            "U-Net width 64, 64x64, batch 16",
            _later(_unet, 64),
            (16, 3, 64, 64),
            8,
            16 * 64 * 64,
        ),
        "bf16-mixed",
    ),
    Net(
        _images("vit", "ViT 6 x 384, 32x32, batch 256", _later(_vit, 384, 6), 256, 32),
        "bf16-mixed",
    ),
    Net(
        _tokens(
            "gpt2",
            "GPT-2 4 x 768, vocabulary 50,257, 8x512",
            _later(_gpt2, 50257, 768, 4, 12, 512),
            8,
            512,
            50257,
        ),
        "bf16-mixed",
    ),
    Net(
        _tokens(
            "masked",
            "BERT 4 x 768, vocabulary 30,522, 32x128",
            _later(_masked, 30522, 768, 4, 12, 128),
            32,
            128,
            30522,
        ),
        "bf16-mixed",
    ),
    Net(
        _images(
            "merging", "ViT with merged patches, 224x224, 64", _later(_merging, 96, 2), 64, 224
        ),
        "bf16-mixed",
    ),
    Net(
        _tokens(
            "gpt2-f32",
            "GPT-2 4 x 768, 8x512, float32",
            _later(_gpt2, 8000, 768, 4, 12, 512),
            8,
            512,
            8000,
        )
    ),
    Net(
        _tokens("encoder", "encoder 6 x 768, masked, 32x128", _encoder, 32, 128, 8000),
        "bf16-mixed",
    ),
    Net(
        Workload(
            "lm28k",
            "LM 2 x 512, vocabulary 28,782",
            _later(_lm, 28782, 512, 8, 2048),
            (64, 32),
            28782,
            64 * 32,
            words=True,
            batch_axis=1,
        ),
        "bf16-mixed",
    ),
    Net(
        _tokens("llama", "Llama 4 x 576, 4x512", _later(_llama, 576, 4, 9, 8192), 4, 512, 8192),
        "bf16-mixed",
    ),
    Net(
        Workload(
            "audio",
            "audio encoder 2 x 384, 1,500 frames, batch 8",
            _later(_audio, 384, 2, 6),
            (8, 80, 3000),
            35,
            8,
        ),
        "bf16-mixed",
    ),
)

NETS: dict[str, dict[str, Net | AdapterNet]] = {
    "cpu": {net.name: net for net in _CPU},
    "cuda": {net.name: net for net in _CUDA},
}
"""Nets by target and name."""


def _export(workload: Workload) -> onnx.ModelProto:
    import torch

    from onnxtrain.torch import from_torch

    x, _ = workload.batch()
    axes = [{workload.batch_axis: "batch"}]
    return ir.to_proto(
        from_torch(workload.module(), torch.from_numpy(x), names=["x"], dynamic_shapes=axes)
    )


def _strip(model: onnx.ModelProto) -> onnx.ModelProto:
    for tensor in model.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT and len(tensor.raw_data) >= STRIPPED_BYTES:
            tensor.ClearField("raw_data")
    return model


def read(path: Path) -> onnx.ModelProto:
    """Return the model of an exported file with random weights."""
    rng = np.random.default_rng(0)
    model = onnx.load(path)
    for tensor in model.graph.initializer:
        if not tensor.HasField("raw_data") and math.prod(tensor.dims) * 4 >= STRIPPED_BYTES:
            scale = 1.0 / math.sqrt(max(math.prod(tensor.dims[1:]), 1))
            array = rng.standard_normal(tensor.dims, np.float32) * np.float32(scale)
            tensor.raw_data = array.tobytes()
    return model
