"""Checkpoints of another model, loss or optimizer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from onnxtrain import losses, optim
from onnxtrain.artifacts.build import build
from onnxtrain.checkpoint import load_checkpoint, save_checkpoint
from onnxtrain.errors import CheckpointError
from onnxtrain.training import Trainer
from tests.artifacts.models import classifier, data

from .made import LOSS, made, same


def with_relu() -> Trainer:
    model = classifier()
    (node,) = (n for n in model.graph.node if n.op_type == "Tanh")
    node.op_type = "Relu"
    return Trainer(build(model, loss=LOSS, optimizer=optim.SGD(lr=0.1)))


def smooth(value: float) -> list[losses.LossTerm]:
    return [losses.LossTerm(losses.CrossEntropy(label_smoothing=value), output="scores")]


OTHERS = {
    "model": (with_relu, "the model has other nodes"),
    "loss": (
        lambda: Trainer(made(loss=[losses.LossTerm("multi_margin", output="scores")])),
        "has other nodes",
    ),
    "smoothing": (lambda: Trainer(made(loss=smooth(0.1))), "has other nodes"),
    "lr": (
        lambda: Trainer(made(optimizer=optim.SGD(lr=0.5))),
        r"optimizer\.lr is 0\.1 in the checkpoint, 0\.5 here",
    ),
    "clip": (lambda: Trainer(made(clip=1.0)), "clip is .* in the checkpoint, .* here"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_origin_is_an_error(other: str, tmp_path: Path) -> None:
    trainer = Trainer(made())
    trainer.fit(data(16), directory=tmp_path, progress=False)
    path = tmp_path / "checkpoints" / "step-000000001.safetensors"
    make, message = OTHERS[other]
    another = make()
    before = another.state_dict()
    with pytest.raises(CheckpointError, match=message):
        another.load(path)
    with pytest.raises(CheckpointError, match=message):
        another.fit(data(16), epochs=2, directory=tmp_path, resume=True, progress=False)
    same(before, another.state_dict())
    assert another.global_step == 0
    assert len(another.load(path, strict=False)["differences"]) == 1
    same(trainer.state_dict(), another.state_dict())


def test_state_of_another_optimizer(tmp_path: Path) -> None:
    trainer = Trainer(made(optimizer="adamw"))
    trainer.step(*data(8))
    trainer.save(tmp_path / "c")
    with pytest.raises(
        CheckpointError, match=r"optimizer\.name is 'AdamW' in the checkpoint, 'SGD' here"
    ):
        Trainer(made()).load(tmp_path / "c")


def test_differences_that_do_not_count(tmp_path: Path) -> None:
    """Initial weights, directories and older metadata are not differences."""
    trainer = Trainer(made())
    trainer.step(*data(8))
    trainer.save(tmp_path / "c")
    model = classifier()
    for tensor in model.graph.initializer:
        tensor.raw_data = bytes(len(tensor.raw_data))
    fresh = build(model, loss=LOSS, optimizer=optim.SGD(lr=0.1))
    fresh.save(tmp_path / "art", prefix="p_")
    tensors, meta = load_checkpoint(tmp_path / "c")
    save_checkpoint(tmp_path / "older", tensors, {n: v for n, v in meta.items() if n != "graphs"})
    save_checkpoint(tmp_path / "bare", tensors, {"step": 1})
    for name in ("c", "older", "bare"):
        other = Trainer(fresh)
        assert "differences" not in other.load(tmp_path / name)
        same(trainer.state_dict(), other.state_dict())
    in_place = Trainer(made())
    made().save(tmp_path / "same")
    saved = Trainer(tmp_path / "same")
    saved.load(tmp_path / "c")
    saved.save(tmp_path / "again")
    in_place.load(tmp_path / "again")
    assert np.isfinite(in_place.step(*data(8)).loss)


def zeroed(*names: str) -> onnx.ModelProto:
    model = classifier()
    for tensor in model.graph.initializer:
        if tensor.name in names:
            tensor.raw_data = bytes(len(tensor.raw_data))
    return model


def build_at(folder: Path, model: onnx.ModelProto, **options: object) -> None:
    made_of = {"loss": LOSS, "optimizer": optim.SGD(lr=0.1), **options}
    build(model, **made_of).save(folder, force=True)  # type: ignore[arg-type]


def test_a_run_in_a_directory_belongs_to_the_weights_it_started_from(tmp_path: Path) -> None:
    folder = tmp_path / "art"
    build_at(folder, classifier())
    Trainer(folder).fit(data(16), directory=folder / "run", progress=False)
    build_at(folder, classifier())  # the same model: the run continues
    again = {"epochs": 2, "directory": folder / "run", "resume": True, "progress": False}
    assert Trainer(folder).fit(data(16), **again).epochs[-1]["epoch"] == 2  # type: ignore[arg-type]
    build_at(folder, zeroed("fc1.weight"))
    with pytest.raises(CheckpointError, match="this run started from other weights than those"):
        Trainer(folder).fit(data(16), **{**again, "epochs": 3})  # type: ignore[arg-type]
    # In memory every weight comes from the checkpoint, as in a script that builds a torch module.
    artifacts = build(zeroed("fc1.weight"), loss=LOSS, optimizer=optim.SGD(lr=0.1))
    assert Trainer(artifacts).fit(data(16), **{**again, "epochs": 3}).best  # type: ignore[arg-type]


def test_other_frozen_weights_are_another_origin(tmp_path: Path) -> None:
    trainer = Trainer(made(freeze="fc1.weight"))
    trainer.save(tmp_path / "a")
    model = zeroed("fc1.weight")
    other = Trainer(build(model, loss=LOSS, optimizer=optim.SGD(lr=0.1), freeze="fc1.weight"))
    with pytest.raises(CheckpointError, match="the frozen weights have other values"):
        other.load(tmp_path / "a")
    assert other.load(tmp_path / "a", strict=False)["differences"]
