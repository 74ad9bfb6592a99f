"""Convolutions, embeddings and a run of 200 steps beside PEFT; runs where peft is installed.

``python -m tests.adapters.peft_nets FOLDER`` prints one line of JSON for each.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import peft
import torch
from torch import nn

import onnxtrain
from onnxtrain.adapters import Adapted
from onnxtrain.losses import CrossEntropy, LossTerm
from onnxtrain.torch import from_torch
from tests.adapters.peft_check import (
    IGNORED,
    batch,
    difference,
    drawn,
    family_of,
    original,
    without_rounding,
)


class Vision(nn.Module):
    """Two convolutions and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.second = nn.Conv2d(8, 12, 1)
        self.head = nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores of classes."""
        h = torch.relu(self.second(torch.relu(self.first(x))))
        return self.head(h.mean((2, 3)))


class Words(nn.Module):
    """An embedding, its mean, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores of classes."""
        return self.head(torch.tanh(self.table(x)).mean(1))


def check(module: nn.Module, x: np.ndarray, targets: list[str], **options: Any) -> dict[str, float]:
    """Return differences of scores and gradients for an adapter that PEFT made and saved."""
    torch.manual_seed(0)
    exported = from_torch(module, (torch.from_numpy(x),))
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=targets, **options)
    torch_model = peft.get_peft_model(module, config)
    with torch.no_grad():
        for name, p in torch_model.named_parameters():
            if "lora_" in name and "magnitude" not in name:
                p.normal_(0, 0.2)
    labels = np.array([1, 3])
    with tempfile.TemporaryDirectory() as folder:
        torch_model.save_pretrained(folder)
        adapted = onnxtrain.load_adapter(exported, folder)
    y = torch_model(torch.from_numpy(x))
    nn.functional.cross_entropy(y, torch.from_numpy(labels)).backward()
    trainer = onnxtrain.Trainer(
        onnxtrain.build(adapted, loss="cross_entropy", optimizer="sgd", mode="as-is")
    )
    name = next(n for n in trainer.inputs if n != "labels")
    feeds = {name: x}
    ours = trainer.gradients(**feeds, labels=labels)
    theirs = {
        n.replace(".default", ""): p.grad.numpy()
        for n, p in torch_model.named_parameters()
        if p.grad is not None
    }
    (scores,) = trainer.predict(**feeds).values()
    return {
        "scores": difference(scores, y.detach().numpy()),
        "gradients": max(_differences(adapted, ours, theirs)),
    }


def check_head(x: np.ndarray) -> dict[str, float]:
    """Return the difference of scores for adapters with a head among ``modules_to_save``."""
    torch.manual_seed(0)
    module = Vision().eval()
    exported = from_torch(module, (torch.from_numpy(x),))
    adapted = onnxtrain.lora(exported, 4, targets=["first", "second"])
    rng = np.random.default_rng(1)
    values = drawn(adapted)
    own = adapted.plain.graph.initializers
    for name in ("head.weight", "head.bias"):
        tensor = own[name].const_value
        assert tensor is not None
        values[name] = rng.standard_normal(tuple(tensor.shape)).astype(np.float32)
    with tempfile.TemporaryDirectory() as folder:
        adapted.export_peft(folder, values)
        torch_model = peft.PeftModel.from_pretrained(module, folder).eval()
        again = onnxtrain.load_adapter(exported, folder)
    expected = torch_model(torch.from_numpy(x)).detach().numpy()
    session = ort.InferenceSession(ir.to_proto(again.model).SerializeToString())
    (scores,) = session.run(None, {session.get_inputs()[0].name: x})
    return {"scores": difference(scores, expected), "head": float(np.abs(expected).max())}


class Masked(nn.Module):
    """Dropout that always leaves the same."""

    def __init__(self, kept: float) -> None:
        super().__init__()
        self.kept = kept

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the first channels of x only, as dropout scales them."""
        mask = torch.zeros_like(x)
        mask[:, : x.shape[1] // 2] = 1 / self.kept
        return x * mask


def check_dropout(x: np.ndarray, kept: float = 0.75) -> dict[str, float]:
    """Return the difference of scores where magnitudes meet dropout, with one mask for both."""
    torch.manual_seed(0)
    module = Vision().eval()
    exported = from_torch(module, (torch.from_numpy(x),))
    targets = ["first", "second", "head"]
    config = peft.LoraConfig(
        r=4, target_modules=targets, use_dora=True, lora_dropout=1 - kept, init_lora_weights=False
    )
    torch_model = peft.get_peft_model(module, config).train()
    with tempfile.TemporaryDirectory() as folder:
        torch_model.save_pretrained(folder)
        adapted = onnxtrain.load_adapter(exported, folder)
    for layer in torch_model.modules():
        if isinstance(layer, peft.tuners.lora.LoraLayer):
            layer.lora_dropout["default"] = Masked(kept)
    proto = ir.to_proto(adapted.model)
    for node in proto.graph.node:
        if node.op_type == "Dropout":
            mask = _channels(proto, node.input[0], kept)
            proto.graph.initializer.append(mask)
            node.op_type, node.input[:] = "Mul", [node.input[0], mask.name]
    session = ort.InferenceSession(proto.SerializeToString())
    (scores,) = session.run(None, {session.get_inputs()[0].name: x})
    return {"scores": difference(scores, torch_model(torch.from_numpy(x)).detach().numpy())}


def _channels(proto: onnx.ModelProto, name: str, kept: float) -> onnx.TensorProto:
    values = {v.name: v for v in (*proto.graph.value_info, *proto.graph.input)}
    dims = [d.dim_value for d in values[name].type.tensor_type.shape.dim]
    mask = np.zeros([1, dims[1], *[1] * (len(dims) - 2)], np.float32)
    mask[:, : dims[1] // 2] = 1 / kept
    return ir.serde.serialize_tensor(ir.Tensor(mask, name=f"{name}_mask"))


def _differences(
    adapted: Adapted, ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]
) -> list[float]:
    differences = []
    for a in adapted.adapters:
        stem = f"base_model.model.{a.module}."
        names = ("lora_embedding_A", "lora_embedding_B")
        if a.kind != "embedding":
            names = ("lora_A.weight", "lora_B.weight")
        pairs = list(zip((a.a, a.b), names, strict=True))
        if a.magnitude is not None:
            pairs.append((a.magnitude, "lora_magnitude_vector.weight"))
        for name, key in pairs:
            expected, got = theirs[stem + key], ours[name]
            got = got if a.kind == "conv" else got.T
            differences.append(difference(got.reshape(expected.shape), expected))
    return differences


def curve(file: Path, checkpoint: Path, steps: int = 200, rate: float = 3e-4) -> dict[str, float]:
    """Return the largest relative difference of losses over a run beside torch's AdamW.

    And that of torch from itself, where adapters start at values that differ in their last bits:
    no run can be expected to follow another more closely.
    """
    exact = without_rounding(file)
    adapted = onnxtrain.lora(exact, rank=4, targets="all-linear", family=family_of(file))
    adapted = adapted.with_parameters(drawn(adapted))
    feeds = batch(exact)
    rng = np.random.default_rng(3)
    batches = [rng.integers(3, 96, feeds["input_ids"].shape) for _ in range(4)]
    mask = feeds["attention_mask"]
    rows = [
        (ids, np.where(mask == 1, ids, IGNORED))
        for ids in (batches[step % len(batches)] for step in range(steps))
    ]
    loss = LossTerm(CrossEntropy(axis=-1, ignore_index=IGNORED), output="logits")
    trainer = onnxtrain.Trainer(onnxtrain.build(adapted, loss=loss, optimizer="adamw"))
    trainer.lr = rate
    ours = [
        float(trainer.step(**{**feeds, "input_ids": ids}, labels=labels).loss)
        for ids, labels in rows
    ]
    theirs, moved = (torch_losses(adapted, checkpoint, mask, rows, rate, by) for by in (0.0, 1e-7))
    return {
        "steps": steps,
        "rate": rate,
        "last": theirs[-1],
        "largest difference": largest(ours, theirs),
        "of torch, moved by 1e-7": largest(moved, theirs),
        "first step beyond 1e-4": first_beyond(ours, theirs),
        "of torch": first_beyond(moved, theirs),
    }


def torch_losses(
    adapted: Adapted,
    checkpoint: Path,
    mask: np.ndarray,
    rows: list[tuple[np.ndarray, np.ndarray]],
    rate: float,
    moved: float,
) -> list[float]:
    """Return torch's losses over a run from adapters that are moved a little."""
    with tempfile.TemporaryDirectory() as folder:
        adapted.export_peft(folder)
        model = peft.PeftModel.from_pretrained(
            original(adapted, checkpoint), folder, is_trainable=True
        )
    trained = [p for p in model.parameters() if p.requires_grad]
    torch.manual_seed(0)
    with torch.no_grad():
        for p in trained:
            p.mul_(1 + moved * torch.randn_like(p))
    optimizer = torch.optim.AdamW(trained, lr=rate)
    losses = []
    for ids, labels in rows:
        logits = model(
            input_ids=torch.from_numpy(ids), attention_mask=torch.from_numpy(mask)
        ).logits
        loss = nn.functional.cross_entropy(
            logits.reshape(-1, logits.shape[-1]), torch.from_numpy(labels).reshape(-1)
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def largest(some: list[float], others: list[float]) -> float:
    """Return the largest relative difference of two curves."""
    return max(abs(a - b) / abs(b) for a, b in zip(some, others, strict=True))


def first_beyond(some: list[float], others: list[float], limit: float = 1e-4) -> int:
    """Return the first step at which two curves differ by more than a limit, or their length."""
    pairs = enumerate(zip(some, others, strict=True))
    return next((i for i, (a, b) in pairs if abs(a - b) / abs(b) > limit), len(some))


def main(folder: Path) -> None:
    """Check the nets, and one run."""
    ort.set_default_logger_severity(3)
    rng = np.random.default_rng(0)
    image = rng.standard_normal((2, 3, 8, 8)).astype(np.float32)
    words = rng.integers(0, 20, (2, 6))
    convs = ["first", "second", "head"]
    for options in ({}, {"use_rslora": True}, {"use_dora": True}):
        result = check(Vision().eval(), image, convs, **options)
        print(json.dumps({"net": "vision", **options, **result}), flush=True)
    print(json.dumps({"net": "vision, head saved", **check_head(image)}), flush=True)
    print(json.dumps({"net": "vision, magnitudes and dropout", **check_dropout(image)}), flush=True)
    for options in ({}, {"use_rslora": True}):
        result = check(Words().eval(), words, ["table", "head"], **options)
        print(json.dumps({"net": "words", **options, **result}), flush=True)
    for name in ("llama-int4", "qwen3-fp32"):
        curves(folder, name)


def curves(folder: str | Path, name: str) -> None:
    """Print what became of a run at a calm rate and at one that is too high to be followed."""
    file = Path(folder) / "genai" / name / "model.onnx"
    for rate in (3e-4, 1e-3):
        result = curve(file, Path(folder) / "checkpoints" / name.split("-")[0], rate=rate)
        print(json.dumps({"curve": name, **result}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
