"""The language model example learns, and learns what torch learns."""

from __future__ import annotations

import runpy
from pathlib import Path

import onnx
import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "transformer_lm.py"


@pytest.mark.parametrize(
    ("optimizer", "epochs"),
    [
        ("adam", 1),
        pytest.param("adam", 3, marks=pytest.mark.full),
        pytest.param("sgd", 2, marks=pytest.mark.full),
    ],
)
def test_perplexities_agree_with_torch(optimizer: str, epochs: int, tmp_path: Path) -> None:
    example = runpy.run_path(str(SCRIPT))
    given = ["--twin", "--dropout", "0", "--threads", "1", "--size", "32", "--out", str(tmp_path)]
    options = example["arguments"]([*given, "--optimizer", optimizer, "--epochs", str(epochs)])
    unigram = example["unigram_perplexity"](example["read"](None))
    perplexities = example["run"](options)
    assert perplexities["onnxtrain"] == pytest.approx(perplexities["torch"], rel=0.01)
    assert perplexities["onnxtrain"][-1] < 0.5 * unigram
    onnx.checker.check_model(onnx.load(tmp_path / "best.onnx"))


@pytest.mark.full
@pytest.mark.parametrize("optimizer", ["adam", "lamb"])
def test_dropout_and_lamb_learn_too(optimizer: str, tmp_path: Path) -> None:
    example = runpy.run_path(str(SCRIPT))
    given = ["--threads", "1", "--size", "32", "--epochs", "1", "--out", str(tmp_path)]
    perplexities = example["run"](example["arguments"]([*given, "--optimizer", optimizer]))
    assert perplexities["onnxtrain"][-1] < 0.6 * example["unigram_perplexity"](
        example["read"](None)
    )
