"""Targets are data: what the table says is so, and a new target needs nothing but an entry."""

from __future__ import annotations

import json
import re
from importlib import resources
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import onnxtrain
from onnxtrain import losses, optim, targets
from onnxtrain.errors import PrepareError
from onnxtrain.targets import LACKS, PREFERS, TARGETS, Target, find
from onnxtrain.torch import from_torch

SRC = Path(onnxtrain.__file__).parent
# A kernel is there, yet not for what it would be used for.
KERNEL_OF_NO_USE = {
    ("webgpu", "ArgMax"): "its result is int64, which no kernel casts",
    ("webgpu", "GatherElements"): "labels would have to be int64",
    ("webgpu", "ScatterElements"): "the native provider has it, the browser's has not",
    ("webgpu", "Softplus"): "the native provider has it, the browser's has not",
}


def test_only_the_tables_compare_targets_by_name() -> None:
    pattern = re.compile(r"\btarget(\.name)? (==|!=|in|not in)\s")
    hits = [
        f"{path.relative_to(SRC)}: {line.strip()}"
        for path in sorted(SRC.rglob("*.py"))
        for line in path.read_text().splitlines()
        if pattern.search(line) and path.name != "targets.py"
    ]
    assert hits == []


def test_what_a_target_lacks_is_not_in_its_profile() -> None:
    folder = resources.files("onnxtrain.lowering") / "profiles"
    for target in TARGETS.values():
        if target.profile is None:
            continue
        known = json.loads((folder / f"{target.profile}.json").read_text())["ops"]
        for name in sorted(target.missing):
            operator, _, part = name.partition(".")
            if part or not operator[0].isupper() or (target.name, name) in KERNEL_OF_NO_USE:
                continue
            assert operator not in known, f"{target.profile} has {operator}"


def test_every_question_is_asked_and_every_answer_known() -> None:
    text = "\n".join(p.read_text() for p in SRC.rglob("*.py") if p.name != "targets.py")
    asked = set(re.findall(r"""(?:lacks\(|lacks=)"([^"]+)\"""", text))
    chosen = set(re.findall(r"""(?:prefers\(|prefers=)"([^"]+)\"""", text))
    assert asked == set(LACKS)
    assert chosen == set(PREFERS)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(PrepareError, match="no such target: 'tpu'\nhint: one of cpu, cuda"):
        find("tpu")
    with pytest.raises(PrepareError, match="portable, web"):
        find("tpu", bundles=True)
    with pytest.raises(PrepareError, match="nobody asks for Sine"):
        Target("toy", missing=frozenset({"Sine"}))


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> str:
    """A made-up runtime that lacks three operators, added by one entry."""
    entry = Target("toy", missing=frozenset({"Sign", "ConstantOfShape", "SoftmaxCrossEntropyLoss"}))
    monkeypatch.setitem(targets.TARGETS, "toy", entry)
    return "toy"


class Small(nn.Module):
    """A convolution, a maximum, absolute values and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.head = nn.Linear(4 * 4 * 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.abs(nn.functional.max_pool2d(self.conv(x), 2))
        return self.head(y.flatten(1))


def kinds(model: onnx.ModelProto) -> set[str]:
    return {node.op_type for node in model.graph.node}


def test_a_new_target_is_one_entry(toy: str) -> None:
    net = Small()
    x, labels = torch.randn(6, 1, 8, 8), torch.tensor([0, 1, 2, 2, 1, 0])
    model = from_torch(net, (x,))
    artifacts = onnxtrain.build(
        model, loss=losses.CrossEntropy(), optimizer=optim.Lion(lr=0.01), target=toy
    )
    emitted = set().union(*(kinds(m) for m in artifacts.models.values()))
    assert not emitted & {"Sign", "ConstantOfShape", "SoftmaxCrossEntropyLoss"}
    assert {m.target for m in artifacts.manifest.models if m.role != "infer"} == {toy}
    trainer, other = (
        onnxtrain.Trainer(a, threads=1)
        for a in (
            artifacts,
            onnxtrain.build(model, loss="cross_entropy", optimizer=optim.Lion(lr=0.01)),
        )
    )
    for _ in range(5):
        ours = trainer.step(x.numpy(), labels.numpy()).loss
        assert ours == pytest.approx(other.step(x.numpy(), labels.numpy()).loss, rel=1e-5)


def test_a_new_target_for_gradients(toy: str) -> None:
    x = torch.randn(3, 1, 8, 8)
    model = from_torch(Small(), (x,))
    plain, composed = onnxtrain.vjp(model), onnxtrain.vjp(model, target=toy)
    assert "Sign" in kinds(plain)
    assert "Sign" not in kinds(composed)
    values = [x.numpy(), *onnxtrain.parameters(model).values(), np.ones((3, 3), np.float32)]
    for a, b in zip(run(plain, values), run(composed, values), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loss", ["cross_entropy", "nll", "multi_margin", "bce_with_logits", "l1"])
@pytest.mark.parametrize("lacked", ["GatherElements", "LogSoftmax", "Sign", "Softplus"])
def test_what_alone_is_lacked_is_not_emitted(
    lacked: str, loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TARGETS, "toy", Target("toy", missing=frozenset({lacked})))
    model = from_torch(nn.Linear(4, 3), (torch.randn(2, 4),))
    artifacts = onnxtrain.build(model, loss=loss, optimizer="lion", target="toy")
    assert [m for m, made in artifacts.models.items() if lacked in kinds(made)] == []


def run(model: onnx.ModelProto, values: list[np.ndarray]) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return session.run(None, dict(zip((x.name for x in session.get_inputs()), values, strict=True)))
