"""move_relu_after_maxpool: values and gradients of both orders are equal."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

from onnxtrain import build, optim
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.optimize.convolution import move_relu_after_maxpool
from onnxtrain.torch import from_torch
from onnxtrain.training import Trainer


@pytest.mark.parametrize("pool", [nn.MaxPool2d(2), nn.MaxPool2d(3, 2, 1)], ids=["apart", "overlap"])
def test_a_step_with_swapped_operators_equals_torch(pool: nn.Module) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), pool, nn.Flatten(), nn.LazyLinear(4))
    x, labels = torch.randn(5, 1, 10, 10), torch.randint(0, 4, (5,))
    net(x)
    artifacts = build(from_torch(net, (x,)), loss="cross_entropy", optimizer=optim.SGD(lr=0.5))
    kinds = [node.op_type for node in artifacts.models["train"].graph.node]
    assert kinds.index("MaxPool") < kinds.index("Relu")
    trainer = Trainer(artifacts, threads=1)
    rate = torch.optim.SGD(net.parameters(), lr=0.5)
    for _ in range(3):
        loss = nn.functional.cross_entropy(net(x), labels)
        rate.zero_grad()
        loss.backward()
        rate.step()
        ours = trainer.step(x.numpy(), labels.numpy())
        assert ours.loss == pytest.approx(loss.item(), rel=1e-5)
    for ours, theirs in zip(trainer.parameters.values(), net.parameters(), strict=True):
        np.testing.assert_allclose(ours, theirs.detach().numpy(), rtol=1e-4, atol=1e-6)


def test_a_relu_with_other_readers_stays() -> None:
    class Both(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.relu(x)
            return nn.functional.max_pool2d(y, 2).sum() + y.sum()

    model = from_torch(Both(), (torch.randn(2, 1, 4, 4),), dynamic_batch=False)
    assert move_relu_after_maxpool(model, OpBuilder(model.graph)) == 0


@pytest.mark.parametrize(("domain", "moved"), [("", 1), ("acme", 0)])
def test_a_relu_of_another_domain_stays(domain: str, moved: int) -> None:
    text = """<ir_version: 10, opset_import: ["" : 21, "acme" : 1]>
        g (float[1,1,4,4] x) => (float[1,1,2,2] y) {
            r = Relu(x)
            p = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (r)
            y = Tanh(p)
        }"""
    proto = onnx.parser.parse_model(text)
    proto.graph.node[0].domain = domain
    model = ir.from_proto(proto)
    assert move_relu_after_maxpool(model, OpBuilder(model.graph)) == moved
