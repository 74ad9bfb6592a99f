"""Targets are data: they follow their profiles, and a new target needs only an entry."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import nn

import onnxtrain
from onnxtrain import losses, optim, profiles, targets
from onnxtrain.errors import PrepareError
from onnxtrain.targets import (
    ALSO_MISSING,
    LACKS,
    NOT_MISSING,
    PREFERS,
    TARGETS,
    Target,
    find,
)
from onnxtrain.torch import from_torch

SRC = Path(onnxtrain.__file__).parent


def test_only_the_tables_compare_targets_by_name() -> None:
    pattern = re.compile(r"\btarget(\.name)? (==|!=|in|not in)\s")
    hits = [
        f"{path.relative_to(SRC)}: {line.strip()}"
        for path in sorted(SRC.rglob("*.py"))
        for line in path.read_text().splitlines()
        if pattern.search(line) and path.name != "targets.py"
    ]
    assert hits == []


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_targets_follow_their_profile_except_where_a_reason_is_given(name: str) -> None:
    target = TARGETS[name]
    if target.profile is None:
        return
    probed = profiles.missing(target.profile, LACKS)
    assert target.missing - probed == ALSO_MISSING.get(name, {}).keys()
    assert probed - target.missing == NOT_MISSING.get(name, {}).keys()


def test_capabilities_missing_from_profiles() -> None:
    """An operator, a kernel version, an element type and an attribute; others are not probed."""
    absent = ["Celu", "MaxPool.opset22", "BatchNormalization.training_mode"]
    present = ["Sign", "LogSoftmax", "MaxPool.opset12", "Cast.bfloat16", "int64", "MatMulNBits"]
    assert profiles.missing("ort-cuda", absent + present) == set(absent)
    assert profiles.missing("ort-cpu", ["Det.bfloat16", "Det.int64"]) == {"Det.int64"}


def test_every_capability_and_preference_is_used() -> None:
    text = "\n".join(p.read_text() for p in SRC.rglob("*.py") if p.name != "targets.py")
    used_capabilities = set(re.findall(r"""(?:lacks\(|lacks=)"([^"]+)\"""", text))
    used_preferences = set(re.findall(r"""(?:prefers\(|prefers=)"([^"]+)\"""", text))
    assert used_capabilities == set(LACKS)
    assert used_preferences == set(PREFERS)


def test_unknown_names_raise() -> None:
    with pytest.raises(
        PrepareError, match=r"unknown target: 'tpu' \(expected one of cpu, webgpu, cuda"
    ):
        find("tpu")
    with pytest.raises(PrepareError, match="one of wasm, "):
        find("wasmm", bundles=True)
    with pytest.raises(PrepareError, match=r"portable, web\)"):
        find("tpu", bundles=True)
    with pytest.raises(PrepareError, match="unknown capability or preference: Sine"):
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


@pytest.fixture(scope="module")
def linear() -> ir.Model:
    return from_torch(nn.Linear(4, 3), (torch.randn(2, 4),))


@pytest.mark.parametrize("loss", ["cross_entropy", "nll", "multi_margin", "bce_with_logits", "l1"])
@pytest.mark.parametrize("lacked", ["GatherElements", "LogSoftmax", "Sign", "Softplus"])
def test_what_alone_is_lacked_is_not_emitted(
    linear: ir.Model, lacked: str, loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TARGETS, "toy", Target("toy", missing=frozenset({lacked})))
    artifacts = onnxtrain.build(linear, loss=loss, optimizer="lion", target="toy")
    assert [m for m, made in artifacts.models.items() if lacked in kinds(made)] == []


def run(model: onnx.ModelProto, values: list[np.ndarray]) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return session.run(None, dict(zip((x.name for x in session.get_inputs()), values, strict=True)))
