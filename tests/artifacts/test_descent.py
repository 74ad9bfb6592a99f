"""SGD folded into the GEMMs that compute weight gradients: the same steps, up to rounding."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from onnxtrain import optim, thresholds
from onnxtrain.artifacts import Artifacts
from onnxtrain.artifacts.build import build
from onnxtrain.training import Trainer
from tests.artifacts.models import finished, graph, weight


def net(batch: int | str, **options: Any) -> Artifacts:
    """An embedding, a wide and a narrow layer, so that either factor of a GEMM may be smaller."""
    rng, op = np.random.default_rng(3), graph()

    def parameter(name: str, *shape: int) -> ir.Value:
        return weight(op, name, (rng.standard_normal(shape) / 3).astype(np.float32))

    words = op.input("words", ir.DataType.INT64, [batch, 3])
    h = op.Gather(parameter("table", 11, 4), words)
    h = op.Relu(op.Gemm(op.Flatten(h), parameter("wide", 12, 9), parameter("bias", 9)))
    y = op.MatMul(h, parameter("narrow", 9, 2))
    settings = {"loss": "mse", "optimizer": optim.SGD(lr=0.5), **options}
    return build(finished(op, y=y), **settings)


def batch_of(size: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 11, (size, 3)), rng.standard_normal((size, 2)).astype(np.float32)


def folded_names(trainer: Trainer) -> set[str]:
    assert trainer.layout == "vector"
    return set(trainer._engine._double_buffered)


def both(artifacts: Artifacts) -> tuple[Trainer, Trainer]:
    return Trainer(artifacts, threads=1), Trainer(artifacts, layout="separate", threads=1)


def check_same(ours: Trainer, plain: Trainer) -> None:
    theirs = plain.state_dict()
    for name, array in ours.state_dict().items():
        # The GEMM accumulates onto the parameter, so rounding differs from a final subtraction.
        np.testing.assert_allclose(array, theirs[name], rtol=2e-6, atol=2e-7, err_msg=name)


@pytest.mark.parametrize("batch", [5, "batch"])
@pytest.mark.parametrize(
    "optimizer",
    [
        optim.SGD(lr=0.5),
        optim.SGD(
            lr=0.5, groups=[optim.ParamGroup("wide", lr_factor=0.25), optim.ParamGroup("b*")]
        ),
    ],
    ids=["plain", "groups"],
)
@pytest.mark.parametrize("few", [0, 8])
def test_folded_steps_are_the_same(
    batch: int | str, optimizer: optim.Optimizer, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thresholds, "FUSED_SGD_REMAINING_PARAMETERS", few)
    ours, plain = both(net(batch, optimizer=optimizer))
    rest = {"bias"} if few else set()
    assert folded_names(ours) == {"table", "wide", "narrow"} | rest
    for seed in range(5):
        for trainer in (ours, plain):
            trainer.lr = 0.5 / (1 + seed)
        size = 5 if batch == 5 else 3 + seed
        losses = [t.step(*batch_of(size, seed)).loss for t in (ours, plain)]
        np.testing.assert_allclose(*losses, rtol=2e-6)
        for trainer in (ours, plain):  # what is written counts from the next step on
            trainer.parameters["wide"] = trainer.parameters["wide"] * np.float32(0.5)
    check_same(ours, plain)


def test_nothing_changes_before_it_is_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thresholds, "FUSED_SGD_REMAINING_PARAMETERS", 0)
    trainer = Trainer(net("batch"), threads=1)
    for seed in range(2):  # from either of the two homes
        before = trainer.state_dict()
        words, targets = batch_of(4, seed)
        computed = trainer.compute({"words": words, "target": targets})
        for name, array in before.items():
            np.testing.assert_array_equal(array, trainer.view(name), err_msg=name)
        kinds = dict(zip(before, (label for label, _ in trainer.pending_updates()), strict=True))
        assert kinds["bias"] == "gradient of 'bias'"
        assert kinds["table"] == "new value of 'table'"
        trainer.commit(computed)
        assert all((array != trainer.view(name)).any() for name, array in before.items())


def test_a_learning_rate_of_zero_changes_nothing() -> None:
    trainer = Trainer(net("batch"), threads=1)
    before = trainer.state_dict()
    trainer.lr = 0.0
    trainer.step(*batch_of(4, 0))
    for name, array in trainer.state_dict().items():
        np.testing.assert_array_equal(array, before[name], err_msg=name)


def test_a_loaded_run_resumes(tmp_path: Any) -> None:
    net("batch").save(tmp_path / "net")
    ours, other = Trainer(tmp_path / "net"), Trainer(tmp_path / "net")
    for seed in range(3):
        ours.step(*batch_of(4, seed))
    ours.save(tmp_path / "checkpoint")
    other.load(tmp_path / "checkpoint")
    for trainer in (ours, other):
        trainer.step(*batch_of(4, 9))
    for name, array in ours.state_dict().items():
        np.testing.assert_array_equal(array, other.state_dict()[name], err_msg=name)


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": optim.SGD(lr=0.1, momentum=0.9)},
        {"optimizer": optim.SGD(lr=0.1, weight_decay=0.1)},
        {"optimizer": optim.AdamW(lr=0.1)},
        {"metrics": ["grad_norm"]},
        {"ema": 0.9},
    ],
    ids=str,
)
def test_gradients_with_other_uses_are_not_folded(options: dict[str, Any]) -> None:
    ours, plain = both(net("batch", **options))
    assert not folded_names(ours)
    for seed in range(2):
        for trainer in (ours, plain):
            trainer.step(*batch_of(4, seed))
    check_same(ours, plain)
