"""Classes by name: one decorator adds a class."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from onnxtrain import losses, optim
from onnxtrain.artifacts.build import build
from onnxtrain.errors import PrepareError
from onnxtrain.optim import transforms
from onnxtrain.registry import Registry
from onnxtrain.training import Trainer
from tests.artifacts.models import classifier, data
from tests.registries import restore_afterwards


def test_a_new_optimizer_and_a_new_loss_train_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    restore_afterwards(monkeypatch)

    @optim.OPTIMIZERS.named("halved", "half_sgd")
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Halved(optim.Optimizer):
        by: float = 2.0

        def chain(self, weight_decay: float) -> tuple[transforms.Transform, ...]:
            def update(u: transforms.Update) -> None:
                u.gradient = u.op.Div(u.gradient, self.by)

            return (transforms.Transform(update),)

    @losses.LOSSES.named("scaled_squares")
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class ScaledSquares(losses.Loss):
        factor: float = 1.0

        def per_element(self, op, prediction, *targets):
            difference = op.Sub(prediction, targets[0])
            return op.Mul(op.Mul(difference, difference), self.factor)

    x, _ = data(8, seed=0)
    batch = {"x": x, "target": np.ones((8, 3), np.float32)}

    def trained(loss: str, optimizer: str) -> Trainer:
        term = losses.LossTerm(loss, output="scores", target="target")
        trainer = Trainer(build(classifier(), loss=term, optimizer=optimizer))
        for _ in range(3):
            trainer.step(**batch)
        return trainer

    ours = trained("scaled_squares:factor=2", "half-sgd:lr=0.1")
    theirs = trained("mse", "sgd:lr=0.1")
    assert ours.manifest.optimizer["name"] == "Halved"
    for name, value in theirs.parameters.items():
        assert not np.array_equal(value, Trainer(ours.artifacts).parameters[name])
        np.testing.assert_allclose(ours.parameters[name], value, rtol=1e-5, atol=1e-6)


def test_a_new_metric_and_a_new_schedule_are_called_as_registered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    restore_afterwards(monkeypatch)

    @losses.METRICS.named("largest")
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Largest(losses.Metric):
        pass

    @optim.SCHEDULES.named("stairs")
    @dataclasses.dataclass(frozen=True)
    class Stairs(optim.Schedule):
        height: float = 0.5

        def at(self, base: float, t: int) -> float:
            return base * self.height**t

    assert Largest().label == "largest"
    schedule = optim.resolve_schedule("stairs:height=0.25")
    assert schedule == Stairs(0.25)
    assert schedule.to_dict() == {"name": "stairs", "height": 0.25}
    assert optim.resolve_schedule(schedule.to_dict()) == schedule


def shapes() -> Registry[object]:
    registry: Registry[object] = Registry("shape")

    @registry.named("square", "box")
    @dataclasses.dataclass(frozen=True)
    class Square:
        side: float
        color: str = "red"

    return registry


def test_a_mapping_in_the_order_of_registration() -> None:
    registry = shapes()
    assert list(registry) == ["square", "box"]
    assert len(registry) == 2
    assert registry["box"] is registry["square"]
    assert "Box" not in registry
    assert registry.find("Box") is registry["box"]
    assert registry.make("box:side=2", {"side": 3, "color": "blue"}) == registry["box"](2, "blue")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sqare", "unknown shape: 'sqare'\nhint: did you mean square?"),
        ("zzz", "unknown shape: 'zzz' (expected one of square, box)"),
        ("square:size=1", "square has no option 'size'\nhint: it has side, color"),
        ("square", "square needs side\nhint: write square:side=..."),
        ("square:side", "not an option: 'side' in 'square:side'\nhint: write name:key=value"),
    ],
)
def test_refusals(text: str, message: str) -> None:
    with pytest.raises(PrepareError) as caught:
        shapes().make(text)
    assert str(caught.value).startswith(message)


def test_a_name_belongs_to_one_class() -> None:
    registry = shapes()
    registry.named("square")(registry["square"])
    with pytest.raises(PrepareError, match=r"the shape 'box' is .*Square\nhint: choose another"):
        registry.named("cube", "box")(int)
    assert "cube" not in registry
