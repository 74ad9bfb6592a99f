"""BatchNormalization after convolutions, in the variant for GPUs: same values, fewer kernels."""

from __future__ import annotations

import collections

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import onnxtrain
from onnxtrain import optim, thresholds
from onnxtrain.torch import from_torch

F = nn.functional


class Net(nn.Module):
    """Two convolutions with BatchNorm, and a skip connection around the second."""

    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = first
        self.a, self.na = nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.b, self.nb = nn.Conv2d(6, 6, 3, padding=1, groups=2), nn.BatchNorm2d(6)
        for norm in (self.na, self.nb):
            nn.init.uniform_(norm.weight, 0.5, 1.5)
            nn.init.uniform_(norm.bias, -0.5, 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.na(self.a(self.first(x))))
        return torch.relu(self.nb(self.b(y)) + y).mean((2, 3))


def build(module: nn.Module, x: torch.Tensor) -> onnxtrain.Artifacts:
    return onnxtrain.build(
        from_torch(module, (x,)),
        loss="mse",
        optimizer=optim.SGD(lr=0.1),
        target="cuda",
        dims={"batch": len(x)},
    )


def count_large(model: onnx.ModelProto, elements: int) -> collections.Counter[str]:
    """Count the operators with an output of at least ``elements`` elements."""
    graph = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    sizes = {
        v.name: int(np.prod([d.dim_value for d in v.type.tensor_type.shape.dim]))
        for v in graph.value_info
    }
    return collections.Counter(
        n.op_type for n in graph.node if max(sizes.get(y, 0) for y in n.output) >= elements
    )


def check_training(
    module: nn.Module, trainer: onnxtrain.Trainer, x: torch.Tensor, steps: int = 4
) -> None:
    """Train both on the same batch; compare losses, parameters and running statistics."""
    module.train()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    target = torch.linspace(-1, 1, len(x) * 6).reshape(len(x), 6)
    for _ in range(steps):
        loss = F.mse_loss(module(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert trainer.step(x.numpy(), target.numpy()).loss == pytest.approx(loss.item(), rel=1e-4)
    for name, p in module.named_parameters():
        # The gradient of a bias before a BatchNorm is zero up to rounding.
        np.testing.assert_allclose(
            trainer.parameters[name], p.detach(), rtol=1e-3, atol=1e-5, err_msg=name
        )
    for name, b in module.named_buffers():
        if "running" in name:
            np.testing.assert_allclose(trainer.buffers[name], b, rtol=1e-4, atol=1e-6, err_msg=name)


def test_training_equals_torch_with_few_large_operators() -> None:
    x = torch.randn(8, 3, 12, 12)
    assert thresholds.NORM_KERNEL_POSITIONS < 12 * 12
    module = Net(nn.Identity())
    artifacts = build(module, x)
    counts = count_large(artifacts.models["step"], 8 * 6 * 12 * 12)
    # Per BatchNorm one Mul (for the sum) and one Sub; the scales are folded into the weights.
    assert (counts["Mul"], counts["Sub"]) == (2, 2)
    assert counts["BatchNormalization"] == 4
    check_training(module, onnxtrain.Trainer(artifacts), x)


def test_small_images_use_elementwise_operators() -> None:
    x = torch.randn(8, 3, 7, 7)
    module = Net(nn.Identity())
    artifacts = build(module, x)
    counts = count_large(artifacts.models["step"], 8 * 6 * 7 * 7)
    assert counts["BatchNormalization"] == 0
    # Per BatchNorm: the scale forward, the scale backward, the sum, and a square.
    assert (counts["Mul"], counts["Sub"], counts["Div"]) == (8, 4, 0)
    check_training(module, onnxtrain.Trainer(artifacts), x)


class Raw(nn.Module):
    """A BatchNorm on the raw input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.conv = nn.BatchNorm2d(3), nn.Conv2d(3, 6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.conv(self.norm(x))).mean((2, 3))


def test_raw_inputs_are_centered_before_the_gradient_is_summed() -> None:
    """With a mean of 2000, summing ``x * dy`` without centering loses most digits."""
    module, x = Raw(), torch.randn(8, 3, 12, 12) + 2000.0
    artifacts = build(module, x)
    (centered,) = (
        n for n in artifacts.models["step"].graph.node if n.op_type == "Sub" and "x" in n.input
    )
    readers = [
        n.op_type for n in artifacts.models["step"].graph.node if centered.output[0] in n.input
    ]
    assert readers == ["Mul"], "the product of the gradient and the centered input"
    trainer, target = onnxtrain.Trainer(artifacts), torch.zeros(8, 6)
    trainer.step(x.numpy(), target.numpy())
    exact = module.double().train()
    F.mse_loss(exact(x.double()), target.double()).backward()
    grad = exact.norm.weight.grad
    assert grad is not None
    step = (1.0 - trainer.parameters["norm.weight"]) / 0.1
    np.testing.assert_allclose(step, grad, rtol=2e-3, atol=1e-6)


class First(nn.Module):
    """A BatchNorm after a convolution (without padding by default) or a linear layer."""

    def __init__(self, *, linear: bool, padding: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(48, 6) if linear else nn.Conv2d(3, 6, 3, padding=padding, bias=False)
        self.norm = nn.BatchNorm1d(6) if linear else nn.BatchNorm2d(6)
        self.linear = linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.linear:
            return torch.tanh(self.norm(self.first(x[:, :, :4, :4].flatten(1))))
        return torch.tanh(self.norm(self.first(x)))[:, :, 1, 1]


@pytest.mark.parametrize("linear", [False, True])
def test_weight_gradient_is_accurate_for_inputs_with_a_large_mean(*, linear: bool) -> None:
    """The mean multiplies a sum of gradients that is zero up to rounding."""
    module, x = First(linear=linear), torch.randn(8, 3, 14, 14) * 5.0 + 2000.0
    module.train()
    artifacts, before = build(module, x), module.first.weight.detach().numpy().copy()
    trainer, target = onnxtrain.Trainer(artifacts), torch.linspace(-1, 1, 48).reshape(8, 6)
    trainer.step(x.numpy(), target.numpy())
    exact = module.double()
    F.mse_loss(exact(x.double()), target.double()).backward()
    grad = exact.first.weight.grad
    assert grad is not None
    error = np.abs((before - trainer.parameters["first.weight"]) / 0.1 - grad.numpy()).max()
    assert error < 2e-3 * float(grad.abs().max())


def test_only_layers_on_unpadded_inputs_center_the_gradient() -> None:
    """Without padding, the gradient has one Sub more."""
    x = torch.randn(8, 3, 14, 14)
    counts = [
        count_large(build(First(linear=False, padding=p), x).models["step"], 8 * 6 * 12 * 12)
        for p in (0, 1)
    ]
    assert counts[0]["Sub"] == counts[1]["Sub"] + 1
