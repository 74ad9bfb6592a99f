"""DP-SGD: clipped gradients equal torch's per-example ones, noise has the right distribution."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import onnxtrain
from onnxtrain import DP
from onnxtrain.errors import PrepareError
from onnxtrain.torch import from_torch

CLIP = 0.7


def conv_net() -> torch.nn.Module:
    torch.manual_seed(2)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 3, 3, padding=1),
        torch.nn.GroupNorm(1, 3),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(48, 4),
    )


def dense_net(*more: torch.nn.Module) -> torch.nn.Module:
    torch.manual_seed(2)
    first, last = torch.nn.Linear(16, 5), torch.nn.Linear(5, 4)
    return torch.nn.Sequential(torch.nn.Flatten(), first, *more, torch.nn.Tanh(), last)


def batch(size: int = 6) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.standard_normal((size, 1, 4, 4)).astype(np.float32), rng.integers(0, 4, size)


EXPORTED: dict[str, Any] = {}


def built(module: torch.nn.Module, dp: DP | None, **options: Any) -> onnxtrain.Artifacts:
    if str(module) not in EXPORTED:  # they have the same weights
        EXPORTED[str(module)] = from_torch(module, (torch.zeros(2, 1, 4, 4),))
    model = EXPORTED[str(module)]
    options = {
        "loss": "cross_entropy",
        "optimizer": "sgd:lr=0.5",
        "metrics": ["accuracy"],
        **options,
    }
    return onnxtrain.build(model, dp=dp, **options)


def clipped_mean(module: torch.nn.Module, x: np.ndarray, y: np.ndarray) -> dict[str, np.ndarray]:
    """The mean of per-example gradients, each clipped as Opacus does."""
    parameters = {n: p.detach() for n, p in module.named_parameters()}

    def loss(values: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        scores = torch.func.functional_call(module, values, (x[None],))
        return torch.nn.functional.cross_entropy(scores, y[None])

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))
    grads = each(parameters, torch.tensor(x), torch.tensor(y))
    norms = sum(g.flatten(1).square().sum(1) for g in grads.values()).sqrt()
    factors = (CLIP / (norms + 1e-6)).clamp(max=1.0)
    assert (factors < 1).any()
    return {n: torch.einsum("n,n...->...", factors, g).numpy() / len(x) for n, g in grads.items()}


@pytest.mark.parametrize("net", [conv_net, dense_net])
def test_each_example_is_clipped_separately(net) -> None:
    module = net()
    x, y = batch()
    trainer = onnxtrain.Trainer(built(module, DP(clip=CLIP, noise=0.0)))
    expected = clipped_mean(module, x, y)
    found = trainer.gradients(x, y)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        np.testing.assert_allclose(found[name], gradient, rtol=2e-4, atol=2e-6)
    result = trainer.step(x, y)
    plain = onnxtrain.Trainer(built(module, None)).step(x, y)
    assert result.loss == pytest.approx(plain.loss, rel=1e-5)
    assert result.metrics["accuracy"] == pytest.approx(plain.metrics["accuracy"])
    for name, p in module.named_parameters():
        new = p.detach().numpy() - 0.5 * expected[name]
        np.testing.assert_allclose(trainer.parameters[name], new, rtol=1e-4, atol=2e-6)


def test_nothing_is_clipped_below_the_limit() -> None:
    x, y = batch()
    private = onnxtrain.Trainer(built(conv_net(), DP(clip=1e4, noise=0.0))).gradients(x, y)
    plain = onnxtrain.Trainer(built(conv_net(), None)).gradients(x, y)
    for name, gradient in plain.items():
        np.testing.assert_allclose(private[name], gradient, rtol=1e-4, atol=1e-6)


def test_noise_is_normal_with_the_requested_scale() -> None:
    """What DP-SGD adds to the mean: standard deviation noise * clip / examples."""
    noise, (x, y) = 1.5, batch()
    trainer = onnxtrain.Trainer(built(conv_net(), DP(clip=CLIP, noise=noise)), seed=77)
    clean = onnxtrain.Trainer(built(conv_net(), DP(clip=CLIP, noise=0.0))).gradients(x, y)
    drawn = []
    for step in range(60):
        trainer.global_step = step
        found = trainer.gradients(x, y)
        parts = [(found[n] - clean[n]).ravel() for n in clean]
        drawn.append(np.concatenate(parts) * len(x) / (CLIP * noise))
    numbers = np.stack(drawn)
    count = numbers.size
    assert abs(numbers.mean()) < 5 / np.sqrt(count)
    assert abs(numbers.var() - 1) < 5 * np.sqrt(2 / count)
    assert abs((numbers**4).mean() - 3) < 5 * np.sqrt(96 / count)
    # Noise differs between elements and between steps.
    between = np.corrcoef(numbers)[np.triu_indices(len(numbers), 1)]
    assert np.abs(between).max() < 6 / np.sqrt(numbers.shape[1])
    trainer.global_step = 0
    again = trainer.gradients(x, y)
    first = np.concatenate([(again[n] - clean[n]).ravel() for n in clean])
    np.testing.assert_allclose(first * len(x) / (CLIP * noise), numbers[0], atol=1e-5)


def test_a_run_learns_and_resumes(tmp_path) -> None:
    artifacts = built(dense_net(torch.nn.Dropout(0.3)), DP(clip=1.0, noise=0.3))
    assert artifacts.manifest.options["dp"] == {"clip": 1.0, "noise": 0.3}
    x, y = batch(64)
    trainer = onnxtrain.Trainer(artifacts, seed=5)
    history = trainer.fit((x, y), epochs=12, batch_size=16, progress=False)
    assert history.epochs[-1]["loss"] < history.epochs[0]["loss"]
    trainer.save(tmp_path / "checkpoint")
    again = onnxtrain.Trainer(artifacts)
    again.load(tmp_path / "checkpoint")
    assert again.step(x[:16], y[:16]).loss == trainer.step(x[:16], y[:16]).loss


@pytest.mark.parametrize("target", ["wasm", "portable"])
def test_other_targets_give_equal_gradients(target: str) -> None:
    x, y = batch()
    found = onnxtrain.Trainer(built(conv_net(), DP(CLIP, 0.5), target=target), seed=3).gradients(
        x, y
    )
    cpu = onnxtrain.Trainer(built(conv_net(), DP(CLIP, 0.5)), seed=3).gradients(x, y)
    for name, gradient in cpu.items():
        np.testing.assert_allclose(found[name], gradient, rtol=1e-4, atol=1e-5)


def test_models_that_mix_examples_are_refused() -> None:
    dp = DP(1.0, 1.0)
    with pytest.raises(PrepareError, match="mixes examples"):
        built(dense_net(torch.nn.BatchNorm1d(5)), dp)
    with pytest.raises(PrepareError, match="accumulate"):
        built(dense_net(), dp, accumulate=2)
    with pytest.raises(PrepareError, match="float32"):
        built(dense_net(), dp, precision="bf16-mixed")
    with pytest.raises(PrepareError, match="dynamic batch dimension"):
        built(dense_net(), dp, dims={"batch": 4})
    with pytest.raises(PrepareError, match="clip must be positive"):
        DP(0.0, 1.0)
    with pytest.raises(PrepareError, match="noise must not be negative"):
        DP(1.0, -1.0)


def test_no_noise_is_no_privacy() -> None:
    assert DP(1.0, 0.0).epsilon(examples=100, batch_size=10, steps=5, delta=1e-5) == np.inf
