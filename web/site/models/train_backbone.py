"""Trains the backbone of the page Teach with onnxtrain: pictures [batch, 3, 64, 64] -> features.

Run as ``python train_backbone.py --steps 350``; leaves ``backbone.onnx`` beside itself. It learns
to tell several hundred things apart (exemplars.py), then its classes are thrown away. ``--look``
only says how well a few examples of new things are enough, beside what bare pixels give.
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
    """Convolutions, each with half the size; features are means of the last three sizes."""

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
        """Return how many features there are."""
        return sum(WIDTHS[-3:]) + 4 * WIDTHS[-1] // 2

    def features(self, image: Tensor) -> Tensor:
        """Return what is seen: means over the picture, and halves of the last stage."""
        x, parts = image * 4 - 2, []
        for stage in self.stages:
            x = stage(x)
            parts.append(x.mean((2, 3)))
        halves = [x[:, :, :1].mean((2, 3)), x[:, :, :, :1].mean((2, 3))]
        parts = [*parts[-3:], *halves]
        return torch.cat([p / (p.square().mean(1, keepdim=True) + 1e-4).sqrt() for p in parts], 1)

    def forward(self, image: Tensor) -> Tensor:
        """Return scores of the classes that are trained on."""
        return self.head(self.features(image))


class Features(nn.Module):
    """The part that is kept."""

    def __init__(self, net: Backbone) -> None:
        super().__init__()
        self.net = net

    def forward(self, image: Tensor) -> Tensor:
        """Return the features."""
        return self.net.features(image)


def trained(steps: int, rows: int = 32, seed: int = 0) -> Backbone:
    """Return a backbone trained by onnxtrain."""
    torch.manual_seed(seed)
    net = Backbone()
    example = torch.rand(2, 3, 64, 64)
    model = from_torch(net, example, names=["image"], dynamic_shapes=[{0: "batch"}])
    built = onnxtrain.build(model, loss="cross_entropy", optimizer="adamw", metrics=["accuracy"])
    trainer = onnxtrain.Trainer(built, seed=seed)
    things: list[Drawing] = [*classes(CLASSES - 10, seed), *(digit(k) for k in range(10))]

    rng = np.random.default_rng(seed)
    for step in range(1, steps + 1):
        trainer.lr = 0.004 * min(1, step / 30) * 0.5 * (1 + np.cos(np.pi * step / (steps + 1)))
        result = trainer.step(*batch(things, rows, rng))
        if step % 50 == 0 or step == 1:
            share = result.metrics["accuracy"]
            print(f"{step}: loss {result.loss:.3f}, accuracy {share:.2f}", flush=True)
    learned = {**trainer.parameters, **trainer.buffers}
    net.load_state_dict(
        {n: torch.from_numpy(np.array(v)) for n, v in learned.items()}, strict=False
    )
    return net.eval()


def write(net: Backbone, path: Path) -> None:
    """Leave the part that is kept, tidied up, at the opset of what the page joins it with."""
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


def look(path: Path, shots: int = 8, ways: int = 5, rounds: int = 20) -> tuple[float, float]:
    """Return how often new things are told apart after a few examples: by features, by pixels."""
    session = onnxruntime.InferenceSession(path)
    right = np.zeros(2)
    for seed in range(rounds):
        rng = np.random.default_rng(1000 + seed)
        things = [classes(6, 5000 + 100 * seed + i)[rng.integers(6)] for i in range(ways)]
        taught = [batch([t], shots, rng)[0] for t in things]
        asked = [batch([t], 20, rng)[0] for t in things]
        for i, see in enumerate(
            (lambda x: session.run(None, {"image": x})[0], lambda x: x.reshape(len(x), -1))
        ):
            model = LogisticRegression(max_iter=2000)
            model.fit(see(np.concatenate(taught)), np.repeat(np.arange(ways), shots))
            right[i] += model.score(see(np.concatenate(asked)), np.repeat(np.arange(ways), 20))
    return float(right[0] / rounds), float(right[1] / rounds)


def main() -> None:
    """Train as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=350)
    parser.add_argument("--look", action="store_true", help="train nothing")
    parser.add_argument("--out", type=Path, default=HERE / "backbone.onnx")
    given = parser.parse_args()
    if not given.look:
        write(trained(given.steps), given.out)
    features, pixels = look(given.out)
    print(f"five new things, eight examples each: {features:.1%} right, by pixels {pixels:.1%}")


if __name__ == "__main__":
    main()
