"""Write the graphs for the loop in ``train.js``: a small classifier, and one for MNIST.

Run as ``python make_graphs.py OUT``. It writes ``gradient_graph.onnx`` and
``optimizer_graph.onnx``, and the same with the prefix ``mnist_``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

from onnxtrain.torch import export_gradient_graph, export_optimizer_graph


class MyModel(nn.Module):
    """An MLP with two layers and two probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.relu, self.fc2 = nn.Linear(10, 5), nn.ReLU(), nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the probabilities of both classes."""
        return torch.sigmoid(self.fc2(self.relu(self.fc1(x))))


class MnistNet(nn.Module):
    """An MLP for MNIST that normalizes the pixels itself."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.relu, self.fc2 = nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of the digits."""
        return self.fc2(self.relu(self.fc1((x - 0.1307) / 0.3081)))


def binary_cross_entropy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy in bits."""
    first, second = torch.log2(output[:, 0]), torch.log2(output[:, 1])
    return -torch.mean(target * first + (1 - target) * second)


def main(out: Path) -> None:
    """Write all four files."""
    out.mkdir(parents=True, exist_ok=True)
    for prefix, net, loss, width, classes in (
        ("", MyModel(), binary_cross_entropy, 10, 2),
        ("mnist_", MnistNet(), nn.functional.cross_entropy, 784, 10),
    ):
        rows, labels = torch.rand(32, width), torch.randint(0, classes, (32,))
        export_gradient_graph(net, loss, rows, labels, out / f"{prefix}gradient_graph.onnx")
        export_optimizer_graph(
            net.named_parameters(), "adam", out / f"{prefix}optimizer_graph.onnx"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
