"""The nets to time: one definition in torch, shared by every engine.

Every module takes one tensor and returns scores ``[rows, classes]``; the loss is the mean cross
entropy against ``rows`` labels. Dropout is off, so that losses of different engines compare.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Workload:
    """A net, its data and the learning rates that its first steps are compared with."""

    name: str
    title: str
    module: Callable[[], Any]
    """Gives the ``nn.Module``, with weights that follow from the seed alone."""
    shape: tuple[int, ...]
    """Of the input; the axis ``batch_axis`` is the batch."""
    classes: int
    rows: int
    """Labels of a batch: the batch, or the words in it."""
    words: bool = False
    """Whether the input is word numbers below ``classes``, not floats."""
    batch_axis: int = 0
    lr: tuple[tuple[str, float], ...] = (("sgd", 0.02), ("adamw", 1e-3))

    def rate(self, optimizer: str) -> float:
        """Return the learning rate of the steps whose losses are compared."""
        return dict(self.lr)[optimizer]

    def batch(self, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Return an input and its labels."""
        random = np.random.RandomState(seed)
        if self.words:
            x = random.randint(0, self.classes, self.shape).astype(np.int64)
        else:
            x = random.standard_normal(self.shape).astype(np.float32)
        return x, random.randint(0, self.classes, self.rows).astype(np.int64)

    def dims(self) -> dict[str, int]:
        """Return the size of the symbolic dimension of the exported model."""
        return {"batch": self.shape[self.batch_axis]}


def _mlp() -> Any:
    from benchmarks.workloads import vision

    return vision.mlp()


def _cnn() -> Any:
    from benchmarks.workloads import vision

    return vision.cnn()


def _resnet() -> Any:
    from benchmarks.workloads import vision

    return vision.ResNet18()


def _mobilenet() -> Any:
    from benchmarks.workloads import vision

    return vision.MobileNetV2()


def _vit() -> Any:
    from benchmarks.workloads import vision

    return vision.ViT()


def _lm(tokens: int) -> Callable[[], Any]:
    def make() -> Any:
        from benchmarks.workloads import text

        return text.TransformerLM(tokens)

    return make


def _gru() -> Any:
    from benchmarks.workloads import text

    return text.GruLM(2000)


def _gpt2() -> Any:
    from benchmarks.workloads import text

    return text.GPT2(4096)


BPTT, WORDS = 35, 20
_WORDS = {"shape": (BPTT, WORDS), "rows": BPTT * WORDS, "words": True, "batch_axis": 1}

WORKLOADS: dict[str, Workload] = {
    w.name: w
    for w in (
        Workload("mlp", "MLP 784-128-10, batch 64", _mlp, (64, 784), 10, 64),
        Workload("cnn", "CNN 28x28, batch 64", _cnn, (64, 1, 28, 28), 10, 64),
        Workload("lm28k", "LM, vocabulary 28,782", _lm(28782), classes=28782, **_WORDS),
        Workload("lm2k", "LM, vocabulary 2,000", _lm(2000), classes=2000, **_WORDS),
        Workload(
            "resnet18",
            "ResNet-18 64x64, batch 16",
            _resnet,
            (16, 3, 64, 64),
            100,
            16,
            lr=(("sgd", 5e-3), ("adamw", 1e-4)),
        ),
        Workload(
            "mobilenetv2",
            "MobileNetV2 64x64, batch 16",
            _mobilenet,
            (16, 3, 64, 64),
            100,
            16,
            lr=(("sgd", 1e-5), ("adamw", 2e-4)),
        ),
        Workload(
            "vit",
            "ViT-tiny 32x32, batch 32",
            _vit,
            (32, 3, 32, 32),
            100,
            32,
            lr=(("sgd", 5e-3), ("adamw", 2e-4)),
        ),
        Workload(
            "gru",
            "GRU LM, vocabulary 2,000",
            _gru,
            classes=2000,
            lr=(("sgd", 5.0), ("adamw", 1e-3)),
            **_WORDS,
        ),
        Workload(
            "gpt2",
            "GPT-2-like, 4 x 256, sequence 128, batch 8",
            _gpt2,
            (8, 128),
            4096,
            8 * 128,
            words=True,
        ),
    )
}


def find(name: str) -> Workload:
    """Return a workload by name: one of ``WORKLOADS``, or a point of a growth curve."""
    if name in WORKLOADS:
        return WORKLOADS[name]
    from benchmarks.workloads import growth

    return growth.point(name)
