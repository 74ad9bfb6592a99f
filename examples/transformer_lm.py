"""Train a word-level transformer language model on stock ONNX Runtime, beside its twin in torch.

    python examples/transformer_lm.py                       # a made-up text, about a minute
    python examples/transformer_lm.py --twin --dropout 0    # the same run in torch, side by side
    python examples/transformer_lm.py --text wikitext-2     # a folder with wiki.train.tokens ...

The module is written in torch, exported once, and trained by onnxtrain; batches are [bptt, batch],
and the last one, which is shorter, is trained like the others. Leaves the best model by validation
perplexity in runs/lm. With --twin, dropout should be 0: the two draw different masks.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
import corpus

from onnxtrain import losses, optim
from onnxtrain.artifacts.build import build
from onnxtrain.torch import from_torch
from onnxtrain.training import Trainer

TORCH = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
OURS = {"sgd": optim.SGD, "adam": optim.Adam, "lamb": optim.LAMB}
RATES = {"sgd": 0.5, "adam": 2e-3, "lamb": 1e-2}


class TransformerLM(nn.Module):
    """Embedding, positions, encoder layers with a causal mask, decoder."""

    def __init__(
        self, tokens: int, size: int, heads: int, hidden: int, layers: int, dropout: float
    ):
        super().__init__()
        self.size = size
        self.embed = nn.Embedding(tokens, size)
        self.dropout = nn.Dropout(dropout)
        layer = nn.TransformerEncoderLayer(size, heads, hidden, dropout)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.decoder = nn.Linear(size, tokens)
        angles = torch.arange(512.0)[:, None] * torch.exp(
            torch.arange(0, size, 2) * (-math.log(10000.0) / size)
        )
        table = torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1)
        self.register_buffer("positions", table[:, None, :])
        nn.init.uniform_(self.embed.weight, -0.1, 0.1)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return scores of the next word at each place: [bptt, batch] -> [bptt, batch, tokens]."""
        length = words.shape[0]
        mask = torch.triu(torch.full((length, length), float("-inf")), diagonal=1)
        x = self.embed(words) * math.sqrt(self.size) + self.positions[:length]
        return self.decoder(self.encoder(self.dropout(x), mask=mask, is_causal=True))


@dataclass
class Text:
    """Three parts as word numbers, and how many words there are."""

    train: np.ndarray
    valid: np.ndarray
    test: np.ndarray
    vocabulary: int


def read(folder: Path | None) -> Text:
    """Read WikiText files, or make a text up."""
    if folder is None:
        parts = [corpus.text(1, 5000), corpus.text(2, 400), corpus.text(3, 400)]
    else:
        parts = [
            (folder / f"wiki.{p}.tokens").read_text("utf-8") for p in ("train", "valid", "test")
        ]
    words = [
        [w for line in p.splitlines() if line.strip() for w in [*line.lower().split(), "<eos>"]]
        for p in parts
    ]
    vocabulary = {w: i for i, w in enumerate(["<unk>", *Counter(words[0])])}
    numbers = [np.array([vocabulary.get(w, 0) for w in p], np.int64) for p in words]
    return Text(*numbers, vocabulary=len(vocabulary))


def columns(words: np.ndarray, batch: int) -> np.ndarray:
    """Return the text as ``batch`` columns that run on from batch to batch."""
    return words[: len(words) // batch * batch].reshape(batch, -1).T.copy()


def batches(data: np.ndarray, bptt: int):
    """Return words and the words that follow them, the short last batch included."""
    for i in range(0, len(data) - 1, bptt):
        n = min(bptt, len(data) - 1 - i)
        yield data[i : i + n], data[i + 1 : i + 1 + n]


def unigram_perplexity(text: Text) -> float:
    """Return the perplexity of word frequencies alone, which a model has to beat."""
    counts = np.bincount(text.train, minlength=text.vocabulary) + 1.0
    return float(np.exp(-np.log(counts / counts.sum())[text.valid].mean()))


class OnnxSide:
    """The run on ONNX Runtime."""

    name = "onnxtrain"

    def __init__(self, module: nn.Module, options: argparse.Namespace, sample: np.ndarray) -> None:
        axes = [{0: "bptt", 1: "batch"}]
        model = from_torch(module, torch.from_numpy(sample), dynamic_shapes=axes, names=["words"])
        artifacts = build(
            model,
            loss=losses.CrossEntropy(axis=-1),
            optimizer=OURS[options.optimizer](lr=options.lr),
            mode="as-is",
            clip=0.5,
        )
        self.trainer = Trainer(artifacts, threads=options.threads)

    def step(self, words: np.ndarray, following: np.ndarray, lr: float) -> float:
        """Train on one batch; return its loss."""
        self.trainer.lr = lr
        return self.trainer.step(words, following).loss

    def evaluate(self, words: np.ndarray, following: np.ndarray) -> float:
        """Return the loss of one batch."""
        return self.trainer.evaluate_batch(words, following).loss

    def save(self, folder: Path) -> None:
        """Write a checkpoint and the model."""
        self.trainer.save(folder / "best.safetensors")
        self.trainer.export(folder / "best.onnx")

    def restore(self, folder: Path) -> None:
        """Go back to the checkpoint."""
        self.trainer.load(folder / "best.safetensors")


class TorchSide:
    """The same run in torch."""

    name = "torch"

    def __init__(self, module: nn.Module, options: argparse.Namespace) -> None:
        self.module = module
        self.optimizer = TORCH[options.optimizer](module.parameters(), lr=options.lr)

    def _loss(self, words: np.ndarray, following: np.ndarray) -> torch.Tensor:
        scores = self.module(torch.from_numpy(words))
        return nn.functional.cross_entropy(
            scores.flatten(0, 1), torch.from_numpy(following).flatten()
        )

    def step(self, words: np.ndarray, following: np.ndarray, lr: float) -> float:
        """Train on one batch; return its loss."""
        self.module.train()
        self.optimizer.param_groups[0]["lr"] = lr
        loss = self._loss(words, following)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.module.parameters(), 0.5)
        self.optimizer.step()
        return loss.item()

    def evaluate(self, words: np.ndarray, following: np.ndarray) -> float:
        """Return the loss of one batch."""
        self.module.eval()
        with torch.no_grad():
            return self._loss(words, following).item()


def perplexity(side: OnnxSide | TorchSide, data: np.ndarray, bptt: int) -> float:
    """Return the perplexity over a whole part, every word counted once."""
    total = sum(len(a) * side.evaluate(a, b) for a, b in batches(data, bptt))
    return math.exp(total / (len(data) - 1))


def run(options: argparse.Namespace) -> dict[str, list[float]]:
    """Train; return the validation perplexities of each side after each epoch."""
    if options.lr is None:
        options.lr = RATES[options.optimizer]
    text = read(options.text)
    torch.manual_seed(0)
    make = (text.vocabulary, options.size, 2, options.size, 2, options.dropout)
    module = TransformerLM(*make)
    train, valid, test = columns(text.train, 20), columns(text.valid, 10), columns(text.test, 10)
    words = f"{len(text.train)} words, {text.vocabulary} different"
    print(f"{words}; unigram perplexity {unigram_perplexity(text):.2f}", flush=True)
    ours = OnnxSide(module, options, train[: options.bptt])
    sides: list[OnnxSide | TorchSide] = [ours]
    if options.twin:
        if options.optimizer not in TORCH:
            raise SystemExit(f"torch has no {options.optimizer}: no twin")
        sides.append(TorchSide(module, options))
    perplexities: dict[str, list[float]] = {side.name: [] for side in sides}
    options.out.mkdir(parents=True, exist_ok=True)
    for epoch in range(options.epochs):
        lr = options.lr * 0.95**epoch
        for side in sides:
            start = time.perf_counter()
            for a, b in batches(train, options.bptt):
                side.step(a, b, lr)
            spent = time.perf_counter() - start
            perplexities[side.name].append(perplexity(side, valid, options.bptt))
            print(
                f"epoch {epoch + 1} {side.name:10} validation perplexity "
                f"{perplexities[side.name][-1]:8.3f}  {spent:6.1f} s",
                flush=True,
            )
        if perplexities[ours.name][-1] == min(perplexities[ours.name]):
            ours.save(options.out)
    ours.restore(options.out)
    print(f"best model: test perplexity {perplexity(ours, test, options.bptt):.3f}")
    return perplexities


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--text", type=Path, help="folder with WikiText-2's token files")
    parser.add_argument("--twin", action="store_true", help="run the same in torch")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--optimizer", choices=OURS, default="adam")
    parser.add_argument("--lr", type=float)
    parser.add_argument("--size", type=int, default=64, help="of embeddings and hidden layers")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--bptt", type=int, default=35)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path, default=Path("runs/lm"))
    return parser.parse_args(given)


if __name__ == "__main__":
    run(arguments())
