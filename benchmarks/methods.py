"""What preference tuning, distillation, quantization, 8-bit states and continual learning gain.

    python -m benchmarks.methods                     # all methods; prints the table
    python -m benchmarks.methods --only dpo          # some of them
    python -m benchmarks.methods --write             # and docs/methods.md

Every method is measured beside the same training without it, on small nets: digits of 8 x 8 pixels
(scikit-learn), and bytes of this project's own files. Times are processor time of one thread, the
two sides in turns.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import onnx
import onnxruntime
import torch
from sklearn.datasets import load_digits
from torch import nn

import onnxtrain
from benchmarks import page
from benchmarks.peers import ROOT
from benchmarks.workloads.text import GPT2
from onnxtrain.losses import LossTerm
from onnxtrain.torch import from_torch

PAGE = ROOT / "docs" / "methods.md"
RESULTS = page.RESULTS / "methods.json"
Data = dict[str, np.ndarray]
Row = dict[str, str]


def digits() -> tuple[Data, Data]:
    """Return training and test digits."""
    source = load_digits()
    order = np.random.default_rng(0).permutation(len(source.target))
    image = (source.images.reshape(-1, 64) / 16).astype(np.float32)[order]
    labels = source.target.astype(np.int64)[order]
    cut = 1300
    return (
        {"image": image[:cut], "labels": labels[:cut]},
        {"image": image[cut:], "labels": labels[cut:]},
    )


def trainer_of(model: Any, optimizer: Any = "adamw:lr=0.003", **options: Any) -> onnxtrain.Trainer:
    """Return a trainer of a classifier."""
    options = {"loss": "cross_entropy", "metrics": ["accuracy"]} | options
    return onnxtrain.Trainer(onnxtrain.build(model, optimizer=optimizer, **options), threads=1)


def accuracy(trainer: onnxtrain.Trainer, data: Data) -> float:
    """Return the accuracy in percent."""
    return 100 * float(trainer.evaluate(data).metrics["accuracy"])


def mean(runs: list[float]) -> str:
    """Return the mean as text."""
    return f"{np.mean(runs):.1f}"


def row(method: str, measured: str, without: str, with_: str, cost: str) -> Row:
    """Return a row of the table."""
    return {"method": method, "measured": measured, "without": without, "with": with_, "cost": cost}


def text_of(*patterns: str) -> list[np.ndarray]:
    """Return the bytes of the project's files, one array per pattern."""
    files = [sorted(ROOT.glob(p)) for p in patterns]
    return [np.frombuffer(b"".join(f.read_bytes() for f in fs), np.uint8) for fs in files]


def windows(text: np.ndarray, count: int, length: int, seed: int) -> np.ndarray:
    """Return random windows of a text."""
    starts = np.random.default_rng(seed).integers(0, len(text) - length, count)
    return np.stack([text[i : i + length] for i in starts]).astype(np.int64)


# -- methods ---------------------------------------------------------------------------------


def states() -> list[Row]:
    """8-bit states: bytes of the state, and processor time of a step of a 4-layer decoder."""
    model = from_torch(GPT2(2048, 256, 4, 4, 64), (torch.zeros(2, 64, dtype=torch.long),))
    rows = []
    for optimizer in (onnxtrain.optim.AdamW(), onnxtrain.optim.Lion(), onnxtrain.optim.Muon()):
        trainers = [
            trainer_of(model, dataclasses.replace(optimizer, state_bits=bits), metrics=[])
            for bits in (32, 8)
        ]
        sizes = [
            sum(np.prod(s.shape) * np.dtype(s.dtype).itemsize for s in t.manifest.state)
            for t in trainers
        ]
        rng = np.random.default_rng(0)
        words, labels = rng.integers(0, 2048, (16, 64)), rng.integers(0, 2048, 1024)
        times: list[list[float]] = [[], []]
        for _ in range(12):
            for trainer, spent in zip(trainers, times, strict=True):
                start = time.process_time()
                trainer.step(words, labels)
                spent.append(time.process_time() - start)
        before, after = (np.median(t[2:]) for t in times)
        rows.append(
            row(
                f"`state_bits=8`, {type(optimizer).__name__}",
                "optimizer state of a decoder of 3.7 M parameters",
                f"{sizes[0] / 1e6:.1f} MB",
                f"{sizes[1] / 1e6:.1f} MB",
                f"step of 1,024 tokens x {after / before:.2f}",
            )
        )
    return rows


def distillation() -> list[Row]:
    """A student of 16 hidden features: on 100 labels, or on what a teacher says of all images."""
    train, test = digits()
    few = {n: a[:100] for n, a in train.items()}
    teacher = trainer_of(onnxtrain.examples.digits_model(hidden=128))
    teacher.fit(train, epochs=15, progress=False)
    alone, taught = [], []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "teacher.onnx"
        teacher.export(path)
        for seed in range(3):
            student = onnxtrain.examples.digits_model(hidden=16, seed=seed)
            plain = trainer_of(student)
            plain.fit(few, epochs=250, progress=False)
            alone.append(accuracy(plain, test))
            artifacts = onnxtrain.distill(
                student, path, loss=None, temperature=3, optimizer="adamw:lr=0.003"
            )
            other = onnxtrain.Trainer(artifacts, threads=1)
            other.fit({"image": train["image"]}, epochs=25, progress=False)
            other.export(Path(folder) / "student.onnx")
            taught.append(scores(onnx.load(Path(folder) / "student.onnx"), test))
    measured = (
        "test accuracy of a student of 16 features, with 100 labels or 1,300 unlabeled images"
    )
    cost = f"a forward pass of the teacher ({accuracy(teacher, test):.1f} %) per step"
    return [row("`distill`", measured, mean(alone) + " %", mean(taught) + " %", cost)]


class DigitsCNN(nn.Module):
    """Two convolutions and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.fc = nn.Linear(16 * 16, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        x = self.conv1(image.reshape(-1, 1, 8, 8)).relu()
        return self.fc(self.conv2(x).relu().flatten(1))


class ByteBERT(nn.Module):
    """An encoder of bytes with a classifier over their mean."""

    def __init__(self, classes: int, width: int = 48, length: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.places = nn.Parameter(0.02 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        return self.head(self.encoder(self.embed(words) + self.places).mean(1))


def kinds_of_files(count: int, seed: int) -> Data:
    """Return windows of 32 bytes, labeled by the kind of file they are from."""
    texts = text_of("src/onnxtrain/*.py", "docs/*.md", "cpp/onnxtrain/*.hpp", "web/site/src/*/*.ts")
    parts = [windows(t, count, 32, seed + i) for i, t in enumerate(texts)]
    labels = np.repeat(np.arange(len(parts)), count)
    return {"words": np.concatenate(parts), "labels": labels}


def scores(model: onnx.ModelProto, data: Data) -> float:
    """Return the accuracy of a model in percent, on onnxruntime."""
    session = onnxruntime.InferenceSession(model.SerializeToString())
    name = session.get_inputs()[0].name
    (logits,) = session.run(None, {name: data[name]})
    return 100 * float((logits.argmax(1) == data["labels"]).mean())


def quantized(bert: bool) -> list[Row]:
    """4-bit weights: rounding after training, and training with the rounding in place."""
    torch.manual_seed(0)
    types = {"weights": "int4"} | ({"activations": "uint4"} if bert else {})
    if bert:
        train, test = kinds_of_files(1500, 0), kinds_of_files(400, 100)
        model = from_torch(ByteBERT(4), (torch.zeros(2, 32, dtype=torch.long),))
    else:
        train, test = digits()
        model = from_torch(DigitsCNN(), (torch.zeros(2, 64),))
    name = next(n for n in train if n != "labels")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        trainer = trainer_of(model, metrics=[])
        trainer.fit(train, epochs=4, progress=False)
        trainer.export(path)
        calibration = {name: train[name][:200]}
        aware = onnxtrain.quantize_aware(path, calibration, **types)
        both = []
        for start, options in ((path, {}), (aware, {"straight_through": True})):
            trainer = trainer_of(start, "adamw:lr=0.001", metrics=[], **options)
            trainer.fit(train, epochs=4, progress=False)
            trainer.export(path.with_name("more.onnx"))
            both.append(onnx.load(path.with_name("more.onnx")))
        full = scores(both[0], test)
        rounded = onnxtrain.quantize_aware(both[0], calibration, **types)
        after = scores(onnxtrain.fold_quantizers(rounded), test)
        trained = scores(onnxtrain.fold_quantizers(both[1]), test)
    rounded_parts = "weights and activations" if bert else "weights"
    return [
        row(
            f"`quantize_aware`, {'small BERT' if bert else 'CNN'}",
            f"test accuracy with 4-bit {rounded_parts} (float {full:.1f} %)",
            f"{after:.1f} %",
            f"{trained:.1f} %",
            "the same number of epochs, half of them with rounding",
        )
    ]


def preferences() -> list[Row]:
    """DPO of a small decoder: the true continuation of a text over another one."""
    torch.manual_seed(0)
    (text,) = text_of("docs/*.md")

    class Decoder(GPT2):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return super().forward(input_ids).reshape(*input_ids.shape, self.tokens)

    example = (torch.zeros(2, 48, dtype=torch.long),)
    model = from_torch(Decoder(256, 96, 2, 4, 48), example, output_names=["logits"])
    base = trainer_of(model, "adamw:lr=0.002", loss="causal_lm", metrics=[])
    ids = windows(text, 2500, 48, 0)
    base.fit({"input_ids": ids, "labels": ids}, batch_size=16, epochs=1, progress=False)

    def pairs(count: int, seed: int) -> Data:
        rows = windows(text, count, 48, seed)
        wrong = rows.copy()
        wrong[:, 24:] = np.roll(rows[:, 24:], 1, axis=0)
        both = np.stack([rows, wrong], 1).reshape(-1, 48)
        labels = both.copy()
        labels[:, :24] = -100
        logits = np.concatenate(
            [base.predict(input_ids=b)["logits"] for b in np.array_split(both, len(both) // 32)]
        ).astype(np.float64)
        logits = logits[:, 23:-1]
        total = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1))
        own = np.take_along_axis(logits, both[:, 24:, None], 2)[..., 0] - logits.max(-1)
        stored = (own - total).sum(1).astype(np.float32)
        return {"input_ids": both, "labels": labels, "reference_logps": stored}

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "base.onnx"
        base.export(path)
        metrics = ["rewards/accuracies", "rewards/margins"]
        loss = LossTerm("dpo", output="logits")
        trainer = trainer_of(path, "adamw:lr=0.0005", loss=loss, metrics=metrics)
    train, test = pairs(640, 1), pairs(160, 2)
    before = trainer.evaluate(test, batch_size=32).metrics
    for epoch in range(3):
        order = np.random.default_rng(epoch).permutation(640)
        for part in np.array_split(order, 80):
            rows = np.stack([2 * part, 2 * part + 1], 1).reshape(-1)
            trainer.step(**{n: a[rows] for n, a in train.items()})
    after = trainer.evaluate(test, batch_size=32).metrics
    return [
        row(
            "`dpo`",
            "reward margin of held-out pairs (share of pairs ranked right)",
            f"{abs(round(before['rewards/margins'], 2)):.2f}",
            f"{after['rewards/margins']:.2f} ({100 * after['rewards/accuracies']:.0f} %)",
            "a forward pass of the reference, once",
        )
    ]


def continual() -> list[Row]:
    """Two more digits: what the model still knows of the first eight."""
    train, test = digits()

    def part(data: Data, new: bool) -> Data:
        rows = (data["labels"] >= 8) == new
        return {n: a[rows] for n, a in data.items()}

    old, new = part(train, False), part(train, True)
    model = onnxtrain.replace_head(onnxtrain.examples.digits_model(), "logits", classes=8)
    trainer = trainer_of(model)
    trainer.fit(old, epochs=15, progress=False)
    buffer = onnxtrain.ReplayBuffer(max_bytes=50_000)
    buffer.add(old)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "before.onnx"
        trainer.export(path)
        grown = onnxtrain.replace_head(path, "logits", add_classes=2)
        teacher = onnxtrain.distill(
            grown,
            path,
            classes=8,
            weight=0.95,
            optimizer="adamw:lr=0.003",
            metrics=["accuracy"],
        )

    def known(other: onnxtrain.Trainer, data: Data) -> str:
        other.fit(data, epochs=10, progress=False)
        return " / ".join(f"{accuracy(other, part(test, n)):.1f}" for n in (False, True)) + " %"

    plain = known(trainer_of(grown), new)
    pulled = trainer_of(grown, "adamw:lr=0.003,ewc=1000")
    pulled.consolidate(old, max_rows=300)
    measured = "test accuracy of 8 old / 2 new classes"
    for method, after, cost in (
        ("`ReplayBuffer`", known(trainer_of(grown), buffer.mix(new)), f"{len(buffer)} old rows"),
        ("`ewc=1000`", known(pulled, new), "two values per parameter"),
        ("`distill(classes=8)`", known(onnxtrain.Trainer(teacher), new), "a teacher, no old row"),
    ):
        rows.append(row(method, measured, plain, after, cost))
    return rows


METHODS: dict[str, Callable[[], list[Row]]] = {
    "states": states,
    "distillation": distillation,
    "cnn": lambda: quantized(False),
    "bert": lambda: quantized(True),
    "dpo": preferences,
    "continual": continual,
}


def table(rows: list[Row]) -> str:
    """Return the rows as the page shows them."""
    lines = ["| method | measured | without | with | cost |", "|---|---|---|---|---|"]
    return "\n".join([*lines, *("| " + " | ".join(r.values()) + " |" for r in rows)])


def main() -> None:
    """Measure, print, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--write", action="store_true", help="write docs/methods.md")
    options = parser.parse_args()
    stored = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in options.only:
        start = time.perf_counter()
        stored[name] = METHODS[name]()
        print(f"{name}: {time.perf_counter() - start:.0f} s", table(stored[name]), sep="\n")
    if options.write:
        page.keep({n: stored[n] for n in METHODS if n in stored}, "methods")
        rows = [r for n in METHODS for r in stored.get(n, [])]
        page.write(table(rows), "methods", PAGE)


if __name__ == "__main__":
    main()
