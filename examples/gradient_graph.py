"""Export a torch module to two plain ONNX graphs and train them with a short loop.

    python examples/gradient_graph.py                           # a small classifier
    python examples/gradient_graph.py --model mnist             # scikit-learn's digits, 8 x 8
    python examples/gradient_graph.py --model mnist --data DIR  # MNIST's four idx files, 28 x 28

Writes gradient_graph.onnx and optimizer_graph.onnx to runs/gradient_graph/MODEL. Both are standard
ONNX: the same loop runs wherever ONNX Runtime runs, including browsers. The first graph computes
output, loss and gradients from the weights, the second one the new weights and optimizer state.
"""

from __future__ import annotations

import argparse
import gzip
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from torch import nn

from onnxtrain.torch import export_gradient_graph, export_optimizer_graph

Data = tuple[np.ndarray, np.ndarray]


class MyModel(nn.Module):
    """A classifier with ten features and two probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(10, 5)
        self.relu = nn.ReLU()
        self.fc2 = nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the probabilities."""
        return torch.sigmoid(self.fc2(self.relu(self.fc1(x))))


def binary_cross_entropy(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean loss in bits."""
    return -torch.mean(labels * torch.log2(output) + (1 - labels) * torch.log2(1 - output))


class MnistNet(nn.Module):
    """An MLP from pixels in [0, 1] to the logits of ten digits."""

    def __init__(self, pixels: int, mean: float, std: float, hidden: int = 128) -> None:
        super().__init__()
        self.mean, self.std = mean, std
        self.fc1 = nn.Linear(pixels, hidden)
        self.relu = nn.ReLU()
        self.fc2 = nn.Linear(hidden, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        return self.fc2(self.relu(self.fc1((x - self.mean) / self.std)))


def points() -> tuple[Data, Data]:
    """Return synthetic training and test points with two binary labels each."""
    x = np.random.default_rng(0).standard_normal((2048, 10)).astype(np.float32)
    y = np.stack([x[:, 0] > 0, x[:, 1] + x[:, 2] > 0], axis=1).astype(np.float32)
    return (x[:1792], y[:1792]), (x[1792:], y[1792:])


def digits() -> tuple[Data, Data]:
    """Return scikit-learn's digits, split into training and test data."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    x, y = (x[order] / 16).astype(np.float32), y[order].astype(np.int64)
    return (x[:1437], y[:1437]), (x[1437:], y[1437:])


def mnist(folder: Path) -> tuple[Data, Data]:
    """Read the MNIST files, gzipped or not: training and test data."""

    def read(name: str) -> np.ndarray:
        zipped = folder / f"{name}.gz"
        data = gzip.decompress(zipped.read_bytes()) if zipped.exists() else b""
        data = data or (folder / name).read_bytes()
        sizes = np.frombuffer(data, ">i4", data[3], 4)
        return np.frombuffer(data, np.uint8, offset=4 + 4 * data[3]).reshape(sizes)

    parts = []
    for part in ("train", "t10k"):
        x, y = read(f"{part}-images-idx3-ubyte"), read(f"{part}-labels-idx1-ubyte")
        parts.append(((x.reshape(len(x), -1) / 255).astype(np.float32), y.astype(np.int64)))
    return parts[0], parts[1]


def write(model: nn.Module, loss_fn, data: Data, batch: int, folder: Path, opset: int) -> None:
    """Write the two graphs."""
    x, y = (torch.from_numpy(a[:batch]) for a in data)
    folder.mkdir(parents=True, exist_ok=True)
    export_gradient_graph(model, loss_fn, x, y, folder / "gradient_graph.onnx", opset)
    parameters = model.named_parameters()
    export_optimizer_graph(parameters, "adam", folder / "optimizer_graph.onnx", opset)


class Loop:
    """The training loop: two sessions, the weights and the optimizer state."""

    def __init__(self, folder: Path, weights: dict[str, np.ndarray], lr: float) -> None:
        self.gradient = onnxruntime.InferenceSession(folder / "gradient_graph.onnx")
        self.optimizer = onnxruntime.InferenceSession(folder / "optimizer_graph.onnx")
        self.outputs = [o.name for o in self.gradient.get_outputs()]
        self.weights = weights
        self.state = {
            i.name: np.zeros(i.shape, np.float32)
            for i in self.optimizer.get_inputs()
            if i.type == "tensor(float)" and i.name not in weights
        }
        self.state |= {f"{n}.step": np.array([1], np.int64) for n in weights}
        self.state |= {f"{n}.learning_rate": np.array([lr], np.float32) for n in weights}

    def run(self, x: np.ndarray, y: np.ndarray) -> dict[str, np.ndarray]:
        """Return output, loss and gradients."""
        arrays = self.gradient.run(None, {"input": x, "labels": y, **self.weights})
        return dict(zip(self.outputs, arrays, strict=True))

    def step(self, x: np.ndarray, y: np.ndarray) -> float:
        """Train on a batch; return its loss."""
        outputs = self.run(x, y)
        feeds = (
            self.state
            | self.weights
            | {f"{n}.gradient": outputs[f"{n}_grad"] for n in self.weights}
        )
        new = self.optimizer.run(None, feeds)
        for output, value in zip(self.optimizer.get_outputs(), new, strict=True):
            name = output.name.removesuffix(".out")
            (self.weights if name in self.weights else self.state)[name] = value
        return float(outputs["loss"])


def accuracy(output: np.ndarray, labels: np.ndarray) -> float:
    """Return the accuracy for class indices or binary labels."""
    correct = (output > 0.5) == labels if labels.ndim == 2 else output.argmax(1) == labels
    return float(correct.mean())


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Write the graphs and train them; return first and last loss and the accuracy on test data."""
    options = arguments(argv)
    torch.manual_seed(0)
    if options.model == "mymodel":
        train, test = points()
        model, loss_fn, batch = MyModel(), binary_cross_entropy, 32
    else:
        train, test = digits() if options.data is None else mnist(options.data)
        pixels, mean, std = train[0].shape[1], float(train[0].mean()), float(train[0].std())
        model, loss_fn, batch = MnistNet(pixels, mean, std), nn.CrossEntropyLoss(), 64
    folder = options.out / options.model
    write(model, loss_fn, train, batch, folder, options.opset)
    print(f"graphs are in {folder}/", flush=True)
    weights = {n: p.detach().numpy().copy() for n, p in model.named_parameters()}
    loop, rng, losses = Loop(folder, weights, options.lr), np.random.default_rng(0), []
    for epoch in range(options.epochs):
        order = rng.permutation(len(train[0]))
        for i in range(0, len(order), batch):  # the last batch may be shorter
            rows = order[i : i + batch]
            losses.append(loop.step(train[0][rows], train[1][rows]))
        outputs = loop.run(*test)
        share = accuracy(outputs["output"], test[1])
        print(
            f"epoch {epoch + 1}: test loss {outputs['loss']:.4f}, accuracy {share:.1%}", flush=True
        )
    if not losses:
        return {}
    return {"first": losses[0], "last": float(np.mean(losses[-10:])), "accuracy": share}


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=("mymodel", "mnist"), default="mymodel")
    parser.add_argument("--data", type=Path, help="folder with MNIST's idx files")
    parser.add_argument("--out", type=Path, default=Path("runs/gradient_graph"))
    parser.add_argument("--opset", type=int, default=21)
    parser.add_argument("--epochs", type=int, default=5, help="0 writes the graphs only")
    parser.add_argument("--lr", type=float, default=3e-3)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
