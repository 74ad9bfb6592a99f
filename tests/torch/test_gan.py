"""Two nets that train against each other, each with its own optimizer: equal to torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from onnxtrain.errors import OnnxTrainError
from onnxtrain.torch import TrainableModule

bce = nn.functional.binary_cross_entropy_with_logits


def nets() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))
    return generator, nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))


def trained(generator: nn.Module, critic: nn.Module, *, penalty: bool = False) -> np.ndarray:
    """Return the losses of some steps; the critic is inside the generator's graph."""
    optimizers = [torch.optim.Adam(net.parameters(), 1e-2) for net in (critic, generator)]
    numbers, losses = torch.Generator().manual_seed(1), []
    for _ in range(6):
        real, z = (torch.randn(16, 2, generator=numbers) for _ in range(2))
        fake = generator(z).detach()
        a, b = critic(real + 2), critic(fake)
        loss = bce(a, torch.ones_like(a)) + bce(b, torch.zeros_like(b))
        if penalty:
            x = ((real + fake) / 2).requires_grad_()
            (gradient,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
            loss = loss + ((gradient.norm(dim=1) - 1) ** 2).mean()
        optimizers[0].zero_grad()
        loss.backward()
        optimizers[0].step()
        y = critic(generator(z))
        loss_of_generator = bce(y, torch.ones_like(y))
        optimizers[1].zero_grad()
        loss_of_generator.backward()
        optimizers[1].step()
        losses.append((loss.item(), loss_of_generator.item()))
    return np.array(losses)


def test_a_gan_with_two_optimizers_equals_torch() -> None:
    wrapped = trained(*map(TrainableModule, nets()))
    np.testing.assert_allclose(wrapped, trained(*nets()), rtol=1e-5)


def test_a_gradient_penalty_with_the_critic_in_torch() -> None:
    generator, critic = nets()
    expected = trained(*nets(), penalty=True)
    np.testing.assert_allclose(
        trained(TrainableModule(generator), critic, penalty=True), expected, rtol=1e-5
    )


def test_a_second_derivative_through_a_wrapped_module_is_refused() -> None:
    with pytest.raises(OnnxTrainError, match=r"cannot be differentiated again\nhint: leave the"):
        trained(*map(TrainableModule, nets()), penalty=True)
