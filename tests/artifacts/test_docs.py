"""The programs in docs/ run and compute what the trainer computes."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import onnxtrain
from tests.artifacts.models import data, example, finished, graph, weight

DOCS = Path(__file__).parents[2] / "docs"


def programs(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


@pytest.mark.parametrize("dropout", [False, True])
def test_the_loop_from_the_manifest_alone(tmp_path: Path, dropout: bool) -> None:
    (program,) = programs("any-language.md")
    assert "onnxtrain" not in program
    space: dict = {}
    exec(compile(program, "any-language.md", "exec"), space)
    artifacts = with_dropout() if dropout else example()
    artifacts.save(tmp_path)
    features = 6 if dropout else 40
    batches = []
    for seed in range(5):
        x, labels = data(8, features=features, seed=seed)
        batches.append({"x": x, "labels": labels})
    losses, tensors = space["train"](tmp_path, batches, seed=9)
    trainer = onnxtrain.Trainer(artifacts, seed=9)
    assert losses == [trainer.step(**b).loss for b in batches]
    for name, value in trainer.parameters.items():
        np.testing.assert_array_equal(tensors[name], value)


def with_dropout() -> onnxtrain.Artifacts:
    import onnx_ir as ir

    op = graph()
    x = op.input("x", ir.DataType.FLOAT, ["batch", 6])
    h = op.Dropout(x, op.const(0.3, ir.DataType.FLOAT))
    w = weight(op, "w", np.random.default_rng(0).standard_normal((6, 3)).astype(np.float32))
    return onnxtrain.build(finished(op, y=op.MatMul(h, w)), loss="cross_entropy", optimizer="adam")
