"""Private gradients beside Opacus, on the same net and data; epsilons beside its accountant."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from opacus import GradSampleModule
from opacus.accountants import RDPAccountant
from opacus.optimizers import DPOptimizer

import onnxtrain
from onnxtrain import DP
from tests.flower.inside.federations import net, rows

CLIP, NOISE, LR = 0.8, 1.3, 0.1


def torch_net() -> torch.nn.Module:
    module = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3))
    weights = {x.name: x.const_value.numpy() for x in net().graph.initializers.values()}
    for layer, name in ((module[0], "fc1"), (module[2], "fc2")):
        layer.weight.data = torch.tensor(weights[f"{name}.weight"].T.copy())
        layer.bias.data = torch.tensor(weights[f"{name}.bias"])
    return module


def opacus_step(noise: float, data: dict[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
    """Return the weights after a step of Opacus."""
    module = GradSampleModule(torch_net())
    optimizer = DPOptimizer(
        torch.optim.SGD(module.parameters(), lr=LR),
        noise_multiplier=noise,
        max_grad_norm=CLIP,
        expected_batch_size=len(data["x"]),
        generator=torch.Generator().manual_seed(seed),
    )
    scores = module(torch.tensor(data["x"]))
    torch.nn.functional.cross_entropy(scores, torch.tensor(data["labels"])).backward()
    optimizer.step()
    first, _, last = module._module
    layers = {"fc1": first, "fc2": last}
    found = {f"{n}.weight": layer.weight.detach().numpy().T for n, layer in layers.items()}
    return {**found, **{f"{n}.bias": layer.bias.detach().numpy() for n, layer in layers.items()}}


def our_step(noise: float, data: dict[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
    """Return the weights after a step of ours."""
    dp = DP(clip=CLIP, noise=noise)
    artifacts = onnxtrain.build(net(), loss="cross_entropy", optimizer=f"sgd:lr={LR}", dp=dp)
    trainer = onnxtrain.Trainer(artifacts, seed=seed)
    trainer.step(**data)
    return {p.name: np.array(trainer.parameters[p.name]) for p in artifacts.manifest.parameters}


def test_clipped_gradients_are_those_of_opacus() -> None:
    ours, theirs = our_step(0.0, rows(1), 0), opacus_step(0.0, rows(1), 0)
    assert ours.keys() == theirs.keys()
    start = {x.name: x.const_value.numpy() for x in net().graph.initializers.values()}
    for name, value in theirs.items():
        assert np.abs(value - start[name]).max() > 1e-4
        np.testing.assert_allclose(ours[name], value, rtol=1e-5, atol=1e-6)


def test_noise_has_the_spread_of_opacus() -> None:
    clean = opacus_step(0.0, rows(1), 0)

    def spread(step) -> float:
        noises = [step(NOISE, rows(1), seed) for seed in range(1, 13)]
        return float(
            np.std([np.concatenate([(w[n] - clean[n]).ravel() for n in clean]) for w in noises])
        )

    count = 12 * sum(a.size for a in clean.values())
    ours, theirs = spread(our_step), spread(opacus_step)
    assert ours == pytest.approx(LR * NOISE * CLIP / 24, rel=5 / np.sqrt(2 * count))
    assert ours == pytest.approx(theirs, rel=8 / np.sqrt(2 * count))


@pytest.mark.parametrize(
    ("noise", "batch", "steps"), [(1.1, 256, 2000), (0.8, 64, 500), (4.0, 600, 100)]
)
def test_epsilon_is_that_of_opacus(noise: float, batch: int, steps: int) -> None:
    theirs = RDPAccountant()
    theirs.history = [(noise, batch / 6000, steps)]
    found = DP(1.0, noise).epsilon(examples=6000, batch_size=batch, steps=steps, delta=1e-5)
    assert found == pytest.approx(theirs.get_epsilon(1e-5), rel=0.02)
