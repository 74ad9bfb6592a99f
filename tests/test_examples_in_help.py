"""Examples in help texts are valid, and invalid values raise an error that names them."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from onnxtrain import optim
from onnxtrain.artifacts.build import build
from onnxtrain.artifacts.build_options import BuildOptions
from onnxtrain.cli.main import app
from onnxtrain.errors import PrepareError
from onnxtrain.losses import LossTerm
from onnxtrain.losses.loss import LOSSES
from onnxtrain.optim.optimizer import OPTIMIZERS
from onnxtrain.optim.schedules import SCHEDULES
from onnxtrain.options import flags
from onnxtrain.registry import Registry
from onnxtrain.training import Trainer
from onnxtrain.training.fit import FitOptions
from tests.artifacts.models import classifier, data

SCORES = [LossTerm("cross_entropy", output="scores")]
ROOT = Path(__file__).resolve().parents[1]
KINDS: dict[str, Registry[Any]] = {
    "loss": LOSSES,
    "optimizer": OPTIMIZERS,
    "schedule": SCHEDULES,
}
TEXTS = [(n, f.help) for kind in (BuildOptions, FitOptions) for n, f in flags(kind).items()]
WITH_OPTIONS = re.compile(r"\b([a-z_0-9]+:[a-z_]+=[^\s`\"',;)]+(?:,[a-z_]+=[^\s`\"',;)]+)*)")


def test_examples_in_help_texts() -> None:
    checked = []
    for name, text in TEXTS:
        listing = text.removesuffix(" ...").removeprefix("Metric of the validation data: ")
        words = [w.strip() for w in listing.split(",")]
        for word in words if name in (*KINDS, "metrics") else ():
            if name == "metrics" and "validation" in text:
                artifacts = build(classifier(), loss=SCORES, optimizer="sgd")
                evaluation = Trainer(artifacts).evaluate(data(9), metrics=[word])
                assert list(evaluation.metrics) == [word]
            elif name == "metrics":
                metric = word.replace("top_5", "top_2")  # this model has three classes
                build(classifier(), loss=SCORES, optimizer="sgd", metrics=[metric])
            elif " " not in word:
                example = {"cosine": "cosine:total=9", "one_cycle": "one_cycle:total=9"}
                KINDS[name].make(example.get(word, word), {})
            checked.append(word)
    assert {"step:step_size=10", "sgd:momentum=0.9", "mse:reduction=sum", "auc"} <= set(checked)


@pytest.mark.parametrize("function", [build, Trainer.fit, optim.resolve])
def test_examples_in_docstrings(function: Any) -> None:
    for text in WITH_OPTIONS.findall(function.__doc__ or ""):
        name = text.partition(":")[0]
        kind = next(k for k in KINDS.values() if k.find(name) is not None)
        kind.make(text, {})


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (OPTIMIZERS, "adamw:lr=abc", "adamw: lr cannot be 'abc'\nhint: it is a number"),
        (OPTIMIZERS, "adam:betas=0.9", "adam: betas cannot be 0.9\nhint: it is a list of 2"),
        (OPTIMIZERS, "sgd:nesterov=1", "sgd: nesterov cannot be 1\nhint: it is true or false"),
        (SCHEDULES, "step:step_size=ten", "step: step_size cannot be 'ten'"),
        (LOSSES, "mse:reduction=3", "mse: reduction cannot be 3"),
    ],
)
def test_values_of_another_type(kind: Registry[Any], text: str, message: str) -> None:
    with pytest.raises(PrepareError) as caught:
        kind.make(text)
    assert str(caught.value).startswith(message)


def test_the_command_shows_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(classifier().SerializeToString())
    words = ["--loss", "cross_entropy", "--loss-output", "scores", "--optimizer", "adamw:lr=abc"]
    result = CliRunner().invoke(
        app, ["build", str(tmp_path / "model.onnx"), "-o", str(tmp_path / "out"), *words]
    )
    assert result.exit_code != 0
    assert isinstance(result.exception, SystemExit | PrepareError)


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_rule_names_an_operator_that_is_not_there(tmp_path: Path) -> None:
    # An environment of its own, which make takes for complete: nothing is installed.
    (tmp_path / "bin").mkdir()
    for name in ("bin/python", ".dev"):
        (tmp_path / name).touch()
    done = subprocess.run(
        ["make", "-o", f"{tmp_path}/.dev", "rule", "OP=Nope", f"VENV={tmp_path}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "no such operator in tests/cases: Nope" in done.stdout
