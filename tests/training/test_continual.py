"""Continual learning: the replay buffer, and elastic weight consolidation against torch."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import onnxtrain
from onnxtrain import ReplayBuffer
from onnxtrain.checkpoint import load_checkpoint, save_checkpoint, state_key
from onnxtrain.errors import CheckpointError, OnnxTrainError
from onnxtrain.torch import from_torch

EWC = 2.5


def rows(start: int, count: int) -> dict[str, np.ndarray]:
    numbers = np.arange(start, start + count)
    return {"x": np.tile(numbers[:, None], 3).astype(np.float32), "labels": numbers}


def test_the_buffer_is_a_uniform_sample_within_its_limit() -> None:
    counts = np.zeros(200)
    for seed in range(300):
        buffer = ReplayBuffer(max_bytes=20 * 40 + 15, seed=seed)
        for start, count in ((0, 13), (13, 0), (13, 87), (100, 100)):
            buffer.add(rows(start, count))
        assert len(buffer) == 40
        assert buffer.seen == 200
        assert sum(a.nbytes for a in buffer.rows.values()) <= buffer.max_bytes
        picked = buffer.rows["labels"]
        assert len(set(picked)) == 40
        np.testing.assert_array_equal(buffer.rows["x"][:, 1], picked)
        counts[picked] += 1
    # 60 of 300 are expected for each row, with a standard deviation of 7.
    assert counts.min() > 30
    assert counts.max() < 90
    for part in np.split(counts, 4):
        assert abs(part.mean() - 60) < 4


def test_wrong_rows() -> None:
    buffer = ReplayBuffer(max_bytes=100)
    with pytest.raises(OnnxTrainError, match=r"different numbers of rows: \[2, 3\]"):
        buffer.add({"x": np.zeros(2), "y": np.zeros(3)})
    with pytest.raises(OnnxTrainError, match=r"a row has more than max_bytes=100"):
        buffer.add({"x": np.zeros((2, 30))})
    buffer.add(rows(0, 4))
    with pytest.raises(OnnxTrainError, match=r"rows differ .*float64\[3\].*float32\[3\]"):
        buffer.mix({**rows(0, 2), "x": np.zeros((2, 3))})


def test_checkpoints_contain_the_buffer(tmp_path: Path) -> None:
    trainer = trainer_of("sgd")
    trainer.replay = ReplayBuffer(max_bytes=200, seed=3)
    trainer.replay.add(rows(0, 50))
    trainer.save(tmp_path / "a.safetensors")
    other = trainer_of("sgd")
    other.load(tmp_path / "a.safetensors")
    assert other.replay is not None
    for buffer in (trainer.replay, other.replay):
        buffer.add(rows(50, 50))
    for name, array in trainer.replay.rows.items():
        np.testing.assert_array_equal(other.replay.rows[name], array)
    tensors, meta = load_checkpoint(tmp_path / "a.safetensors")
    save_checkpoint(tmp_path / "b.safetensors", tensors, {**meta, "replay": {"seed": 0}})
    with pytest.raises(CheckpointError, match="replay buffer is damaged: 'max_bytes'"):
        other.load(tmp_path / "b.safetensors")
    save_checkpoint(tmp_path / "c.safetensors", {**tensors, "replay/x": np.zeros((2, 3))}, meta)
    with pytest.raises(CheckpointError, match="replay buffer is damaged: its rows are incomplete"):
        other.load(tmp_path / "c.safetensors")
    without = {n: a for n, a in tensors.items() if not n.startswith("replay/")}
    save_checkpoint(tmp_path / "d.safetensors", without, meta)
    third = trainer_of("sgd")
    third.load(tmp_path / "d.safetensors")
    assert third.replay is None


def net() -> torch.nn.Module:
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))


def data(seed: int, count: int = 24) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((count, 4)).astype(np.float32), rng.integers(0, 3, count)


@functools.cache
def exported() -> Any:
    return from_torch(net(), (torch.zeros(8, 4),))


def trainer_of(optimizer: str, target: str = "cpu", **options: Any) -> onnxtrain.Trainer:
    artifacts = onnxtrain.build(
        exported(), loss="cross_entropy", optimizer=optimizer, target=target
    )
    return onnxtrain.Trainer(artifacts, **options)


def fisher_of(module: torch.nn.Module, x: np.ndarray, y: np.ndarray) -> dict[str, torch.Tensor]:
    total = {n: torch.zeros_like(p) for n, p in module.named_parameters()}
    for row, label in zip(x, y, strict=True):
        module.zero_grad()
        z = module(torch.tensor(row[None]))
        torch.nn.functional.cross_entropy(z, torch.tensor([label])).backward()
        for n, p in module.named_parameters():
            assert p.grad is not None
            total[n] += p.grad.square() / len(x)
    return total


@pytest.mark.parametrize(
    ("target", "layout"),
    [("cpu", "fused"), ("cpu", "separate"), ("cpu", "vector"), ("wasm", "fused")],
)
def test_consolidation_equals_the_penalty_in_torch(target: str, layout: str) -> None:
    module = net()
    trainer = trainer_of(f"sgd:lr=0.2,momentum=0.5,ewc={EWC}", target, layout=layout)
    tasks = [data(1), data(2)]
    fisher = [fisher_of(module, *task) for task in tasks]
    for task in tasks:  # the second call adds to the first
        trainer.consolidate(*task)
    state = trainer.state_dict()
    for n, p in module.named_parameters():
        total = (fisher[0][n] + fisher[1][n]).numpy()
        np.testing.assert_allclose(state[state_key(n, "fisher")], total, rtol=1e-4, atol=1e-7)
        np.testing.assert_array_equal(state[state_key(n, "anchor")], p.detach().numpy())
    anchors = {n: p.detach().clone() for n, p in module.named_parameters()}
    descent = torch.optim.SGD(module.parameters(), lr=0.2, momentum=0.5)
    for seed in range(3, 8):
        x, y = data(seed, 8)
        descent.zero_grad()
        loss = torch.nn.functional.cross_entropy(module(torch.tensor(x)), torch.tensor(y))
        pulls = [
            ((fisher[0][n] + fisher[1][n]) * (p - anchors[n]).square()).sum()
            for n, p in module.named_parameters()
        ]
        (loss + EWC / 2 * sum(pulls)).backward()
        descent.step()
        trainer.step(x, y)
    for n, p in module.named_parameters():
        np.testing.assert_allclose(trainer.parameters[n], p.detach().numpy(), rtol=1e-4, atol=1e-6)


def test_consolidation_needs_its_optimizer() -> None:
    with pytest.raises(OnnxTrainError, match=r"no elastic weight.*\nhint: .*'adamw:ewc=100'"):
        trainer_of("sgd").consolidate(*data(0))
    with pytest.raises(OnnxTrainError, match="no rows to consolidate"):
        trainer_of("sgd:ewc=1").consolidate(*data(0), max_rows=0)


def test_a_teacher_with_fewer_classes() -> None:
    teacher = onnxtrain.examples.digits_model()
    student = onnxtrain.replace_head(teacher, "logits", add_classes=2)
    trainer = onnxtrain.Trainer(
        onnxtrain.distill(student, teacher, classes=10, optimizer="sgd", metrics=["accuracy"])
    )
    batch = onnxtrain.examples.digits_data(16)
    # The logits of the old classes are still those of the teacher: only the task is left.
    task = onnxtrain.Trainer(onnxtrain.build(student, loss="cross_entropy", optimizer="sgd"))
    expected = task.evaluate_batch(**batch).loss
    result = trainer.evaluate_batch(**batch)
    assert result.loss == pytest.approx(expected / 2, rel=1e-5)
    assert 0 <= result.metrics["accuracy"] <= 1
    stored = onnxtrain.distill(student, None, classes=10, optimizer="sgd")
    (target,) = [t for t in stored.manifest.models[0].inputs if t.name == "teacher_logits"]
    assert target.shape == ("batch", 10)


def test_earlier_classes_stay(tmp_path: Path) -> None:
    """Two more digits cost the first eight nearly everything, with replay a few points."""
    data = onnxtrain.examples.digits_data(1500)
    old = {n: a[data["labels"] < 8] for n, a in data.items()}
    new = {n: a[data["labels"] >= 8] for n, a in data.items()}
    model = onnxtrain.replace_head(onnxtrain.examples.digits_model(), "logits", classes=8)
    options: dict[str, Any] = {"loss": "cross_entropy", "metrics": ["accuracy"]}
    trainer = onnxtrain.Trainer(onnxtrain.build(model, optimizer="adamw:lr=0.003", **options))
    trainer.fit(old, epochs=10, progress=False)
    trainer.export(tmp_path / "before.onnx")
    grown = onnxtrain.replace_head(tmp_path / "before.onnx", "logits", add_classes=2)

    def lost(optimizer: str, rows: dict[str, np.ndarray], *, consolidated: bool = False) -> float:
        student = onnxtrain.Trainer(onnxtrain.build(grown, optimizer=optimizer, **options))
        before = student.evaluate(old).metrics["accuracy"]
        if consolidated:
            student.consolidate(old, max_rows=200)
        student.fit(rows, epochs=6, progress=False)
        assert student.evaluate(new).metrics["accuracy"] > 0.7
        return before - student.evaluate(old).metrics["accuracy"]

    buffer = ReplayBuffer(max_bytes=100_000)
    buffer.add(old)
    naive = lost("adamw:lr=0.003", new)
    assert naive > 0.6
    assert lost("adamw:lr=0.003", buffer.mix(new)) < 0.12
    assert lost("adamw:lr=0.003,ewc=100", new, consolidated=True) < 0.7 * naive
