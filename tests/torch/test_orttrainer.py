"""The old trainer in both of its forms, against torch."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

from onnxtrain.compat import ort
from onnxtrain.compat.ort import amp, fused_adam, optim
from onnxtrain.compat.ort.orttrainer import (
    IODescription,
    ModelDescription,
    ORTTrainer,
    ORTTrainerOptions,
    load_checkpoint,
    save_checkpoint,
)
from onnxtrain.errors import CompatError

DESCRIPTION = {
    "inputs": [("x", ["batch", 4]), ("label", ["batch"])],
    "outputs": [("loss", [], True), ("scores", ["batch", 3])],
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    g = torch.Generator().manual_seed(1)
    return [
        (torch.randn(n, 4, generator=g), torch.randint(0, 3, (n,), generator=g))
        for n in ([6, 5, 7] * count)[:count]
    ]


def test_later_form_follows_torch(tmp_path: Path) -> None:
    """Adam with groups, a schedule, accumulated gradients, checkpoints."""
    theirs = network()
    config = optim.AdamConfig(
        [{"params": ["0.bias", "2.bias"], "lambda_coef": 0.0}],
        lr=0.02,
        lambda_coef=0.1,
        max_norm_clip=0.5,
    )
    options = ORTTrainerOptions(
        {
            "batch": {"gradient_accumulation_steps": 2},
            "lr_scheduler": optim.lr_scheduler.LinearWarmupLRScheduler(8, 0.25),
        }
    )
    ours = ORTTrainer(network(), DESCRIPTION, config, nn.CrossEntropyLoss(), options)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    biases = [p for n, p in theirs.named_parameters() if n.endswith("bias")]
    weights = [p for n, p in theirs.named_parameters() if n.endswith("weight")]
    twin = torch.optim.AdamW(
        [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]
    )
    rates = [0.0, 0.01, 0.02, 0.02 * 5 / 6]
    for i, (x, label) in enumerate(batches(8)):
        scores = theirs(x)
        loss = nn.functional.cross_entropy(scores, label)
        (loss / 2).backward()
        got = ours.train_step(x, label)
        assert got[0].item() == pytest.approx(loss.item(), rel=1e-4)
        torch.testing.assert_close(got[1], scores.detach(), rtol=1e-4, atol=1e-5)
        if i % 2:
            nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
            for group in twin.param_groups:
                group["lr"] = rates[i // 2]
            twin.step()
            twin.zero_grad()
    for name, p in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], p, rtol=1e-3, atol=1e-4)
    x, label = batches(1)[0]
    loss, scores = ours.eval_step(x, label=label)
    torch.testing.assert_close(scores, theirs(x).detach(), rtol=1e-3, atol=1e-4)
    ours.save_as_onnx(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
    actual = np.asarray(session.run(["scores"], {"x": x.numpy(), "label": label.numpy()})[0])
    np.testing.assert_allclose(actual, scores.numpy(), rtol=1e-4, atol=1e-5)
    ours.save_checkpoint(tmp_path / "c.safetensors", {"epoch": 3})
    kept = {n: t.clone() for n, t in ours.state_dict().items()}
    ours.train_step(x, label)
    ours.train_step(x, label)
    assert not torch.equal(ours.state_dict()["0.weight"], kept["0.weight"])
    assert ours.load_checkpoint(tmp_path / "c.safetensors") == {"epoch": 3}
    assert torch.equal(ours.state_dict()["0.weight"], kept["0.weight"])


def test_old_form_follows_torch(tmp_path: Path) -> None:
    theirs = network()
    description = ModelDescription(
        [IODescription("x", ["batch", 4]), IODescription("label", ["batch"], torch.int64)],
        [IODescription("loss", []), IODescription("scores", ["batch", 3])],
    )
    ours = ORTTrainer(
        network(),
        nn.CrossEntropyLoss(),
        description,
        "SGDOptimizer",
        None,
        IODescription("Learning_Rate", [1], torch.float32),
        "cpu",
        _opset_version=12,
    )
    ours.load_state_dict(theirs.state_dict())
    twin = torch.optim.SGD(theirs.parameters(), lr=0.1)
    x, label = batches(4)[-1]
    for x, label in batches(4):
        loss = nn.functional.cross_entropy(theirs(x), label)
        twin.zero_grad()
        loss.backward()
        twin.step()
        got = ours.train_step(x, label, torch.tensor([0.1]))
        assert got[0].item() == pytest.approx(loss.item(), rel=1e-4)
    for name, p in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], p, rtol=1e-4, atol=1e-5)
    with pytest.raises(CompatError, match="learning rate is missing"):
        ours.train_step(x, label)
    save_checkpoint(ours, tmp_path)
    ours.train_step(x, label, torch.tensor([1.0]))
    load_checkpoint(ours, tmp_path)
    torch.testing.assert_close(ours.state_dict()["0.bias"], theirs.get_parameter("0.bias").detach())
    ours.eval()
    assert ours(x, label, fetches=["scores"]).shape == (len(x), 3)


class OfOneSize(nn.Module):
    """The exporters write the number of rows into the graph; torch runs any number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.tensor([float(i) for i in range(x.shape[0])])
        return self.fc(x * rows[:, None])


def test_a_new_size_exports_again_and_training_continues() -> None:
    """Weights, moments and the number of the step move to the export for another batch size."""
    theirs, config = OfOneSize(), optim.AdamConfig(lr=0.05, max_norm_clip=1e9)
    ours = ORTTrainer(OfOneSize(), DESCRIPTION, config, nn.CrossEntropyLoss())
    twin = torch.optim.AdamW(theirs.parameters(), lr=0.05, weight_decay=0.0)
    for x, label in [batches(2)[i] for i in (0, 1, 0, 0, 1)]:
        loss = nn.functional.cross_entropy(theirs(x), label)
        got = ours.train_step(x, label)
        assert got[0].item() == pytest.approx(loss.item(), rel=1e-4)
        twin.zero_grad()
        loss.backward()
        twin.step()
    assert len(ours._others) == 1  # one export for each of the two sizes
    torch.testing.assert_close(ours.state_dict()["fc.weight"], theirs.fc.weight.detach())
    x, label = batches(2)[1]
    torch.testing.assert_close(ours.eval_step(x, label)[1], theirs(x).detach())
    options = ORTTrainerOptions({"batch": {"gradient_accumulation_steps": 2}})
    ours = ORTTrainer(OfOneSize(), DESCRIPTION, config, nn.CrossEntropyLoss(), options)
    ours.train_step(*batches(1)[0])
    with pytest.raises(CompatError, match="other sizes than the ones accumulated"):
        ours.train_step(x, label)


def lamb(p, g, m, v, t, *, lr, decay, low, high):
    """One step of LAMB without bias correction."""
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
    update = m / (np.sqrt(v) + 1e-6) + decay * p
    ratio = np.clip(np.linalg.norm(p) / np.linalg.norm(update), low, high)
    return p - lr * ratio * update, m, v


def test_lamb_and_mixed_precision() -> None:
    """Bounds of the trust ratio; a loss that is not finite changes nothing."""
    torch.manual_seed(0)
    module = nn.Linear(4, 1, bias=False)
    description = {
        "inputs": [("x", ["batch", 4]), ("target", ["batch", 1])],
        "outputs": [("loss", [], True)],
    }
    config = optim.LambConfig(
        lr=0.1, lambda_coef=0.01, ratio_min=0.3, ratio_max=0.5, max_norm_clip=100.0
    )
    scaler = amp.DynamicLossScaler(loss_scale=8.0, up_scale_window=2)
    options = ORTTrainerOptions({"mixed_precision": {"enabled": True, "loss_scaler": scaler}})
    with pytest.warns(UserWarning, match="computes in float32"):
        ours = ORTTrainer(module, description, config, nn.MSELoss(), options)
    p = module.weight.detach().numpy().astype(np.float64)
    m = v = np.zeros_like(p)
    g = torch.Generator().manual_seed(2)
    for t in range(1, 4):
        x, target = torch.randn(5, 4, generator=g), torch.randn(5, 1, generator=g)
        error = x.numpy() @ p.T - target.numpy()
        gradient = 2 * (error.T @ x.numpy()) / 5
        p, m, v = lamb(p, gradient, m, v, t, lr=0.1, decay=0.01, low=0.3, high=0.5)
        ours.train_step(x, target)
        np.testing.assert_allclose(ours.state_dict()["weight"].numpy(), p, rtol=1e-4, atol=1e-5)
    assert scaler.loss_scale == 16.0
    ours.train_step(torch.full((5, 4), math.inf), torch.zeros(5, 1))
    assert scaler.loss_scale == 8.0
    np.testing.assert_allclose(ours.state_dict()["weight"].numpy(), p, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("schedule", "wanted"),
    [
        (optim.ConstantWarmupLRScheduler(10, 0.2), [0.0, 0.5, 1.0, 1.0]),
        (optim.LinearWarmupLRScheduler(10, 0.2), [0.0, 0.5, 1.0, 0.5]),
        (optim.CosineWarmupLRScheduler(10, 0.5, 0.2), [0.0, 0.5, 1.0, 0.5]),
        (optim.PolyWarmupLRScheduler(10, 0.0, 2.0, 0.2), [0.0, 0.5, 1.0, 0.25]),
    ],
    ids=["constant", "linear", "cosine", "poly"],
)
def test_schedules(schedule, wanted: list[float]) -> None:
    config = optim.SGDConfig(lr=2.0)
    rates = [
        schedule.get_lr(SimpleNamespace(optimizer_config=config, optimization_step=step))[0]
        for step in (0, 1, 2, 6)
    ]
    assert rates == pytest.approx([2.0 * w for w in wanted])


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown option: batch\.size"):
        ORTTrainerOptions({"batch": {"size": 3}})
    with pytest.raises(ValueError, match="from 1"):
        ORTTrainerOptions({"batch": {"gradient_accumulation_steps": 0}})
    with pytest.raises(ValueError, match="exactly one output"):
        ORTTrainer(network(), {"inputs": [], "outputs": [("y", [])]}, optim.SGDConfig())
    with pytest.raises(ValueError, match="no 'lr'"):
        optim.AdamConfig([{"params": ["w"], "lr": 1.0}])
    with pytest.raises(ValueError, match="must be empty"):
        optim.SGDConfig([{"params": ["w"]}])
    with pytest.raises(CompatError, match="unknown optimizer"):
        ORTTrainer(network(), None, ModelDescription([], [IODescription("loss", [])]), "Adam")
    options = ORTTrainerOptions({"distributed": {"world_size": 2}})
    with pytest.raises(CompatError, match="one process"):
        ORTTrainer(network(), DESCRIPTION, optim.SGDConfig(), None, options)


def test_old_names_are_there() -> None:
    from onnxtrain.torch import TrainableModule, export_gradient_graph

    assert ort.is_ortmodule_available()
    assert issubclass(ort.ORTModule, TrainableModule)
    assert ort.experimental.export_gradient_graph is export_gradient_graph
    assert ort.ORTTrainer is ORTTrainer
    with pytest.raises(AttributeError, match="nothing"):
        _ = ort.nothing
    ours = ort.ortmodule.ORTModule(nn.Linear(2, 2), debug_options=ort.ortmodule.DebugOptions())
    assert list(ours.state_dict()) == ["weight", "bias"]


def adam(mode: fused_adam.AdamWMode, decay: float) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the parameters after three steps of ``FusedAdam``, and of the formula in float64."""
    torch.manual_seed(0)
    p, grads = torch.randn(5), torch.randn(3, 5)
    ours = nn.Parameter(p.clone())
    optimizer = fused_adam.FusedAdam([ours], lr=0.1, weight_decay=decay, adam_w_mode=mode)
    x, m, v, results, expected = p.double(), torch.zeros(5), torch.zeros(5), [], []
    for t, g in enumerate(grads.double(), 1):
        ours.grad = g.float()
        optimizer.step()
        results.append(ours.detach().clone())
        g = g + decay * x if mode == 0 else g
        x = x * (1 - 0.1 * decay) if mode == 2 else x
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        if mode == 1:
            x = x - 0.1 * math.sqrt(1 - 0.999**t) / (1 - 0.9**t) * m / (v.sqrt() + 1e-6)
            x = x * (1 - 0.1 * decay)
        else:
            x = x - 0.1 * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-6)
        expected.append(x.float())
    return results, expected


@pytest.mark.parametrize("mode", list(fused_adam.AdamWMode))
def test_fused_adam_follows_the_formula(mode: fused_adam.AdamWMode) -> None:
    for result, expected in zip(*adam(mode, 0.3), strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)
    parameter = nn.Parameter(torch.ones(2))
    optimizer = fused_adam.FusedAdam([parameter])
    assert optimizer.step(closure=lambda: 2.0) == 2.0  # no gradient: nothing to update
    parameter.grad = torch.ones(2)
    optimizer.zero_grad()
    assert parameter.grad is None
