"""Train the backbone of the page Teach: images [batch, 3, 64, 64] -> features.

Run as ``python train_backbone.py --steps 350``; it writes ``backbone.onnx`` next to this file. The
backbone is trained to classify several hundred classes (exemplars.py), then the classifier is
removed. ``--evaluate`` only measures few-shot accuracy on new classes, compared with raw pixels.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import onnx
import onnx.version_converter
import onnx_ir as ir
import onnxruntime
import torch
from exemplars import Drawing, batch, classes, digit
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn

import onnxtrain
from onnxtrain.torch import from_torch

HERE = Path(__file__).resolve().parent
CLASSES = 300
WIDTHS = (24, 32, 48, 96, 128)


class Backbone(nn.Module):
    """A CNN whose features are the spatial means of its last three stages."""

    def __init__(self) -> None:
        super().__init__()
        pairs = zip((3, *WIDTHS), WIDTHS, strict=False)
        self.stages = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(a, b, 5 if a == 3 else 3, padding=2 if a == 3 else 1, bias=False),
                nn.BatchNorm2d(b),
                nn.ReLU(),
                nn.MaxPool2d(2),
            )
            for a, b in pairs
        )
        self.head = nn.Linear(self.size, CLASSES)

    @property
    def size(self) -> int:
        """Return the number of features."""
        return sum(WIDTHS[-3:]) + 4 * WIDTHS[-1] // 2

    def features(self, image: Tensor) -> Tensor:
        """Return spatial means of three stages, and of two halves of the last stage."""
        x, parts = image * 4 - 2, []
        for stage in self.stages:
            x = stage(x)
            parts.append(x.mean((2, 3)))
        halves = [x[:, :, :1].mean((2, 3)), x[:, :, :, :1].mean((2, 3))]
        parts = [*parts[-3:], *halves]
        return torch.cat([p / (p.square().mean(1, keepdim=True) + 1e-4).sqrt() for p in parts], 1)

    def forward(self, image: Tensor) -> Tensor:
        """Return the logits of the training classes."""
        return self.head(self.features(image))


class Features(nn.Module):
    """The backbone without its classifier."""

    def __init__(self, net: Backbone) -> None:
        super().__init__()
        self.net = net

    def forward(self, image: Tensor) -> Tensor:
        """Return the features."""
        return self.net.features(image)


def trained(steps: int, rows: int = 32, seed: int = 0) -> Backbone:
    """Return a backbone trained with onnxtrain."""
    torch.manual_seed(seed)
    net = Backbone()
    example = torch.rand(2, 3, 64, 64)
    model = from_torch(net, example, names=["image"], dynamic_shapes=[{0: "batch"}])
    built = onnxtrain.build(model, loss="cross_entropy", optimizer="adamw", metrics=["accuracy"])
    trainer = onnxtrain.Trainer(built, seed=seed)
    drawings: list[Drawing] = [*classes(CLASSES - 10, seed), *(digit(k) for k in range(10))]

    rng = np.random.default_rng(seed)
    for step in range(1, steps + 1):
        trainer.lr = 0.004 * min(1, step / 30) * 0.5 * (1 + np.cos(np.pi * step / (steps + 1)))
        result = trainer.step(*batch(drawings, rows, rng))
        if step % 50 == 0 or step == 1:
            share = result.metrics["accuracy"]
            print(f"{step}: loss {result.loss:.3f}, accuracy {share:.2f}", flush=True)
    learned = {**trainer.parameters, **trainer.buffers}
    net.load_state_dict(
        {n: torch.from_numpy(np.array(v)) for n, v in learned.items()}, strict=False
    )
    return net.eval()


def write(net: Backbone, path: Path) -> None:
    """Export the features, optimized, with the opset of the heads that the page appends."""
    net.head = nn.Identity()
    example = torch.rand(2, 3, 64, 64)
    model = from_torch(
        Features(net), example, train=False, names=["image"], dynamic_shapes=[{0: "batch"}]
    )
    model.graph.outputs[0].name = "x"
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(path)
    proto = onnx.version_converter.convert_version(ir.to_proto(model), 21)
    onnxruntime.InferenceSession(proto.SerializeToString(), options)
    plain = onnx.load(path)
    for entry in [e for e in plain.opset_import if e.domain]:
        plain.opset_import.remove(entry)
    onnx.checker.check_model(plain)
    onnx.save(plain, path)


def evaluate(path: Path, shots: int = 8, ways: int = 5, rounds: int = 20) -> tuple[float, float]:
    """Return the few-shot accuracy on new classes, with features and with raw pixels."""
    session = onnxruntime.InferenceSession(path)
    accuracy = np.zeros(2)
    for seed in range(rounds):
        rng = np.random.default_rng(1000 + seed)
        drawings = [classes(6, 5000 + 100 * seed + i)[rng.integers(6)] for i in range(ways)]
        support = [batch([t], shots, rng)[0] for t in drawings]
        query = [batch([t], 20, rng)[0] for t in drawings]
        for i, embed in enumerate(
            (lambda x: session.run(None, {"image": x})[0], lambda x: x.reshape(len(x), -1))
        ):
            model = LogisticRegression(max_iter=2000)
            model.fit(embed(np.concatenate(support)), np.repeat(np.arange(ways), shots))
            accuracy[i] += model.score(embed(np.concatenate(query)), np.repeat(np.arange(ways), 20))
    return float(accuracy[0] / rounds), float(accuracy[1] / rounds)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=350)
    parser.add_argument(
        "--evaluate", action="store_true", help="only evaluate an existing backbone"
    )
    parser.add_argument("--out", type=Path, default=HERE / "backbone.onnx")
    options = parser.parse_args()
    if not options.evaluate:
        write(trained(options.steps), options.out)
    features, pixels = evaluate(options.out)
    print(f"5-way 8-shot accuracy: {features:.1%}, with raw pixels {pixels:.1%}")


if __name__ == "__main__":
    main()
