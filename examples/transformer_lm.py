"""Train a word-level transformer language model on stock ONNX Runtime, and compare with torch.

    python examples/transformer_lm.py                       # a synthetic text, about a minute
    python examples/transformer_lm.py --twin --dropout 0    # the same run in torch for comparison
    python examples/transformer_lm.py --text wikitext-2     # a directory with wiki.train.tokens ...

The torch module is exported once and trained with onnxtrain. Batches are [bptt, batch]; the last
one may be shorter. Writes the model with the best validation perplexity to runs/lm. With --twin,
dropout should be 0, because the two runs draw different masks.
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

from onnxtrain import Trainer, build, losses, optim
from onnxtrain.torch import from_torch

TORCH = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
ONNXTRAIN = {"sgd": optim.SGD, "adam": optim.Adam, "lamb": optim.LAMB}
RATES = {"sgd": 0.5, "adam": 2e-3, "lamb": 1e-2}


class TransformerLM(nn.Module):
    """A transformer encoder with positional encoding and causal mask, and a linear decoder."""

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
        """Return logits of the next word: [bptt, batch] -> [bptt, batch, tokens]."""
        length = words.shape[0]
        mask = torch.triu(torch.full((length, length), float("-inf")), diagonal=1)
        x = self.embed(words) * math.sqrt(self.size) + self.positions[:length]
        return self.decoder(self.encoder(self.dropout(x), mask=mask, is_causal=True))


@dataclass
class Text:
    """Token ids of the three splits, and the vocabulary size."""

    train: np.ndarray
    valid: np.ndarray
    test: np.ndarray
    vocabulary: int


def read(folder: Path | None) -> Text:
    """Read WikiText files, or generate a synthetic text."""
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
    ids = [np.array([vocabulary.get(w, 0) for w in p], np.int64) for p in words]
    return Text(*ids, vocabulary=len(vocabulary))


def columns(words: np.ndarray, batch: int) -> np.ndarray:
    """Return the text as ``batch`` columns of consecutive words."""
    return words[: len(words) // batch * batch].reshape(batch, -1).T.copy()


def batches(data: np.ndarray, bptt: int):
    """Yield batches of inputs and next words; the last batch may be shorter."""
    for i in range(0, len(data) - 1, bptt):
        n = min(bptt, len(data) - 1 - i)
        yield data[i : i + n], data[i + 1 : i + 1 + n]


def unigram_perplexity(text: Text) -> float:
    """Return the perplexity of a unigram model, as a baseline."""
    counts = np.bincount(text.train, minlength=text.vocabulary) + 1.0
    return float(np.exp(-np.log(counts / counts.sum())[text.valid].mean()))


class OnnxRun:
    """Training with onnxtrain on ONNX Runtime."""

    name = "onnxtrain"

    def __init__(self, module: nn.Module, options: argparse.Namespace, sample: np.ndarray) -> None:
        axes = [{0: "bptt", 1: "batch"}]
        model = from_torch(module, torch.from_numpy(sample), dynamic_shapes=axes, names=["words"])
        artifacts = build(
            model,
            loss=losses.CrossEntropy(axis=-1),
            optimizer=ONNXTRAIN[options.optimizer](lr=options.lr),
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
        """Load the best checkpoint."""
        self.trainer.load(folder / "best.safetensors")


class TorchRun:
    """The same training in torch."""

    name = "torch"

    def __init__(self, module: nn.Module, options: argparse.Namespace) -> None:
        self.module = module
        self.optimizer = TORCH[options.optimizer](module.parameters(), lr=options.lr)

    def _loss(self, words: np.ndarray, following: np.ndarray) -> torch.Tensor:
        logits = self.module(torch.from_numpy(words))
        return nn.functional.cross_entropy(
            logits.flatten(0, 1), torch.from_numpy(following).flatten()
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


def perplexity(backend: OnnxRun | TorchRun, data: np.ndarray, bptt: int) -> float:
    """Return the perplexity of a split."""
    total = sum(len(a) * backend.evaluate(a, b) for a, b in batches(data, bptt))
    return math.exp(total / (len(data) - 1))


def run(options: argparse.Namespace) -> dict[str, list[float]]:
    """Train; return the validation perplexities of each run after each epoch."""
    if options.lr is None:
        options.lr = RATES[options.optimizer]
    text = read(options.text)
    torch.manual_seed(0)
    config = (text.vocabulary, options.size, 2, options.size, 2, options.dropout)
    module = TransformerLM(*config)
    train, valid, test = columns(text.train, 20), columns(text.valid, 10), columns(text.test, 10)
    words = f"{len(text.train)} words, {text.vocabulary} distinct"
    print(f"{words}; unigram perplexity {unigram_perplexity(text):.2f}", flush=True)
    ours = OnnxRun(module, options, train[: options.bptt])
    runs: list[OnnxRun | TorchRun] = [ours]
    if options.twin:
        if options.optimizer not in TORCH:
            raise SystemExit(f"--twin: torch has no optimizer {options.optimizer!r}")
        runs.append(TorchRun(module, options))
    perplexities: dict[str, list[float]] = {backend.name: [] for backend in runs}
    options.out.mkdir(parents=True, exist_ok=True)
    for epoch in range(options.epochs):
        lr = options.lr * 0.95**epoch
        for backend in runs:
            start = time.perf_counter()
            for a, b in batches(train, options.bptt):
                backend.step(a, b, lr)
            seconds = time.perf_counter() - start
            perplexities[backend.name].append(perplexity(backend, valid, options.bptt))
            print(
                f"epoch {epoch + 1} {backend.name:10} validation perplexity "
                f"{perplexities[backend.name][-1]:8.3f}  {seconds:6.1f} s",
                flush=True,
            )
        if perplexities[ours.name][-1] == min(perplexities[ours.name]):
            ours.save(options.out)
    ours.restore(options.out)
    print(f"best model: test perplexity {perplexity(ours, test, options.bptt):.3f}")
    return perplexities


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--text", type=Path, help="directory with WikiText-2's token files")
    parser.add_argument("--twin", action="store_true", help="also train in torch")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--optimizer", choices=ONNXTRAIN, default="adam")
    parser.add_argument("--lr", type=float)
    parser.add_argument("--size", type=int, default=64, help="size of embeddings and hidden layers")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--bptt", type=int, default=35)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path, default=Path("runs/lm"))
    return parser.parse_args(argv)


if __name__ == "__main__":
    run(arguments())
