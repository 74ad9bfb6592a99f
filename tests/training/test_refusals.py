"""Batches, names and options that a trainer converts, or raises errors for."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
import torch

from onnxtrain.artifacts.build import build
from onnxtrain.errors import OnnxTrainError, PrepareError, ShapeError
from onnxtrain.training import Trainer
from tests.artifacts.models import classifier, data, finished, graph, weight

from .made import LOSS, made, same


@pytest.mark.parametrize(
    ("batch", "named", "message"),
    [
        ((), {"x": 0}, "missing from the batch: labels"),
        ((1, 2, 3), {}, "got 3 tensors, the model takes x, labels"),
        ((1,), {"x": 2}, "given by position and by name: x"),
        ((1,), {"labels": 2, "weight": 3}, "unknown input: 'weight'"),
        ((np.zeros((2, 5)), [0, 1]), {}, r"'x' is float32\[batch, 6\], got shape \[2, 5\]"),
        ((np.zeros((2, 6)), [0, 1, 2]), {}, "batch is 3 here and 2 in 'x'"),
        ((np.zeros((2, 6)), [0.5, 1]), {}, "'labels' is int64, got 0.5 in row 0 of the batch"),
        ((np.zeros((2, 6)), ["a", "b"]), {}, "'labels' is int64, got <U1"),
        ((np.full((2, 6), 1e300), [0, 1]), {}, "float64 with values that are too large"),
        ((np.full((2, 6), (1 << 25) + 1), [0, 1]), {}, "int64 with values that do not fit"),
        ((np.zeros((2, 6)), np.array([0, 1 << 63], np.uint64)), {}, "uint64 with values that do"),
    ],
)
def test_batches_that_do_not_fit(batch: tuple, named: dict, message: str) -> None:
    trainer = Trainer(made())
    before = trainer.state_dict()
    with pytest.raises(ShapeError, match=message):
        trainer.step(*batch, **named)
    same(before, trainer.state_dict())
    assert trainer.global_step == 0


def test_batches_of_other_types_are_converted() -> None:
    x, labels = data(8)
    expected = Trainer(made()).step(x, labels).loss
    for a, b in (
        (x.astype(np.float64), labels.astype(np.int32)),
        (x.tolist(), labels.tolist()),
        (torch.from_numpy(x), torch.from_numpy(labels)),
        (x[::-1][::-1], labels.astype(np.float32)),
    ):
        assert Trainer(made()).step(a, b).loss == expected


def test_inputs_with_reserved_names() -> None:
    """A model may have inputs called step and learning_rate; roles distinguish them."""
    model = classifier()
    renamed = {"x": "step", "hidden": "learning_rate"}
    for node in model.graph.node:
        node.input[:] = [renamed.get(n, n) for n in node.input]
        node.output[:] = [renamed.get(n, n) for n in node.output]
    model.graph.input[0].name, model.graph.output[1].name = "step", "learning_rate"
    artifacts = build(model, loss=LOSS, optimizer="adam", outputs=["learning_rate"])
    x, labels = data(8)
    for layout in ("fused", "separate"):
        ours, plain = Trainer(artifacts, layout=layout), Trainer(made(optimizer="adam"))
        for _ in range(3):
            assert ours.step(step=x, labels=labels).loss == plain.step(x, labels).loss


def test_an_input_called_rng() -> None:
    op = graph()
    x = op.input("rng", ir.DataType.FLOAT, ["batch", 4])
    h = op.Dropout(x, op.const(0.5, ir.DataType.FLOAT))
    y = op.MatMul(h, weight(op, "w", np.ones((4, 2), np.float32)))
    artifacts = build(finished(op, y=y), loss="mse", optimizer="sgd")
    spec = artifacts.manifest.model("step")
    assert spec is not None
    assert {t.name: t.role for t in spec.inputs if "rng" in t.name} == {
        "rng": "input",
        "rng_": "rng",
    }
    trainer = Trainer(artifacts)
    batch = np.ones((64, 4), np.float32), np.zeros((64, 2), np.float32)
    assert trainer.step(*batch).loss != trainer.step(*batch).loss


def test_names_of_optimizer_state() -> None:
    model = classifier()
    for node in model.graph.node:
        node.input[:] = ["fc1.weight.exp_avg" if n == "fc2.bias" else n for n in node.input]
    (tensor,) = (t for t in model.graph.initializer if t.name == "fc2.bias")
    tensor.name = "fc1.weight.exp_avg"
    with pytest.raises(PrepareError, match=r"need: fc1\.weight\.exp_avg"):
        build(model, loss=LOSS, optimizer="adam")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "eval"}, "unknown mode: 'eval'"),
        ({"target": "tpu"}, "unknown target: 'tpu'"),
        ({"precision": "float16"}, "unknown precision: 'float16'"),
        ({"recompute": ["nowhere"]}, "unknown scope, node or value: 'nowhere'"),
        ({"randomness": "quantum"}, "unknown randomness"),
        ({"accumulate": 0}, "accumulate must be at least 1"),
        ({"ema": 1.0}, "ema must be between 0 and 1"),
        ({"clip": 0.0}, "clip must be positive"),
        ({"train": "fc9.*"}, "no such parameter in `train`: 'fc9"),
        ({"freeze": "fc9.*"}, "no such parameter in `freeze`"),
        ({"freeze": "*"}, "no parameter is left to train"),
        ({"outputs": ["nothing"]}, "unknown output: 'nothing'"),
        ({"optimizer": "sdg"}, "unknown optimizer: 'sdg'"),
        ({"loss": "cross_entrpy"}, "cross_entrpy"),
    ],
)
def test_invalid_build_options(options: dict, message: str) -> None:
    with pytest.raises(PrepareError, match=message):
        made(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "tpu"}, "unknown device: 'tpu'"),
        ({"layout": "flat"}, "unknown layout: 'flat'"),
        ({"seed": -1}, r"seed must be in \[0, 16777216\), got -1"),
        ({"seed": 1 << 24}, "seed must be in"),
    ],
)
def test_invalid_trainer_arguments(options: dict, message: str) -> None:
    with pytest.raises(OnnxTrainError, match=message):
        Trainer(made(), **options)


def test_denormals_of_the_caller_are_kept() -> None:
    tiny = np.full(4, 1e-40, np.float32)
    trainer = Trainer(made())
    assert (tiny * np.float32(1) != 0).all()
    trainer.step(*data(8))
    trainer.predict(data(2)[0])
    assert (tiny * np.float32(1) != 0).all()
