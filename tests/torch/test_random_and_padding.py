"""Random numbers drawn inside forward, and options of embeddings: equal to torch, or refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import onnxtrain
from onnxtrain import optim
from onnxtrain.torch import TrainableModule, exporters, from_torch, last_report
from onnxtrain.torch.exporters import ExportError


class Tied(nn.Module):
    """An embedding whose table is the output layer, too."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4, **options)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(ids)).mean(1)


def gradients_of_torch(module: nn.Module, *batch: torch.Tensor) -> dict[str, np.ndarray]:
    *inputs, target = batch
    nn.functional.mse_loss(module(*inputs), target).backward()
    found = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    return {n: (g.to_dense() if g.is_sparse else g).numpy() for n, g in found.items()}


@pytest.mark.parametrize(
    "options", [{}, {"padding_idx": 2}, {"padding_idx": -1}, {"sparse": True}], ids=str
)
def test_gradients_of_embeddings_equal_torch(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    module, target = Tied(**options), torch.randn(5, 7)
    ids = torch.tensor([[2, 6, 1, 2]] * 4 + [[2, 2, 2, 2]])
    model = from_torch(module, ids)
    trainer = onnxtrain.Trainer(onnxtrain.build(model, loss="mse", optimizer=optim.SGD(lr=0.1)))
    expected = gradients_of_torch(module, ids, target)
    gradients = trainer.gradients(ids.numpy(), target.numpy())
    (expected_gradient,), (gradient,) = expected.values(), gradients.values()  # tied: one table
    np.testing.assert_allclose(gradient, expected_gradient, atol=1e-6)
    padded = any("padding_idx" in line for line in last_report(model).repairs)
    assert padded == ("padding_idx" in options)


def test_the_padding_row_of_an_embedding_does_not_train() -> None:
    module = nn.Sequential(nn.Embedding(5, 3, padding_idx=0), nn.Flatten(), nn.Linear(6, 2))
    ids, target = torch.tensor([[0, 1], [0, 2]]), torch.ones(2, 2)
    trainer = onnxtrain.Trainer(
        onnxtrain.build(from_torch(module, ids), loss="mse", optimizer=optim.SGD(lr=0.5))
    )
    for _ in range(3):
        trainer.step(ids.numpy(), target.numpy())
    table = trainer.parameters["0.weight"]
    np.testing.assert_array_equal(table[0], 0)
    assert not np.array_equal(table[1], module[0].weight[1].detach().numpy())
    wrapped = TrainableModule(module)
    wrapped(ids).sum().backward()
    grad = next(p.grad for n, p in wrapped.named_parameters() if n.endswith("0.weight"))
    assert grad is not None
    np.testing.assert_array_equal(grad[0].numpy(), 0)
    assert grad[1].abs().sum() > 0


def test_the_padding_row_in_an_export_of_the_legacy_exporter(monkeypatch) -> None:
    monkeypatch.setattr(exporters, "dynamo", None)
    module = nn.Sequential(nn.Embedding(5, 3, padding_idx=0), nn.GELU())
    wrapped = TrainableModule(module)
    ids, (table,) = torch.tensor([[0, 1], [0, 2]]), module.parameters()
    gradients = [torch.autograd.grad(m(ids).sum(), table)[0] for m in (wrapped, module)]
    torch.testing.assert_close(*gradients)
    assert not gradients[0][0].any()


@pytest.mark.parametrize("option", ["max_norm", "scale_grad_by_freq"])
def test_embeddings_that_onnx_cannot_express_are_refused(option: str) -> None:
    torch.manual_seed(0)
    module = Tied(**{option: 0.5 if option == "max_norm" else True})
    before = module.embedding.weight.detach().clone()
    with pytest.raises(ExportError, match=f"an embedding uses {option}, which ONNX cannot.*\nhint"):
        from_torch(module, torch.tensor([[1, 2, 3]]))
    assert torch.equal(before, module.embedding.weight)  # max_norm changes it in the forward pass


class Twice(Tied):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        other = nn.functional.embedding(ids, self.embedding.weight)
        return self.head(self.embedding(ids) + other).mean(1)


def test_a_table_with_and_without_padding_is_refused() -> None:
    with pytest.raises(ExportError, match="looked up with padding_idx and without it"):
        from_torch(Twice(padding_idx=1), torch.tensor([[1, 2, 3]]))


class Autoencoder(nn.Module):
    """A variational autoencoder that draws its noise itself."""

    def __init__(self, noise: Any) -> None:
        super().__init__()
        self.encoder, self.decoder, self.noise = nn.Linear(8, 6), nn.Linear(3, 8), noise

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, 1)
        z = self.noise(mean, torch.exp(0.5 * log_variance))
        return self.decoder(z), mean, log_variance


NOISES = {
    "randn_like": lambda m, s: m + s * torch.randn_like(m),
    "rand": lambda m, s: m + s * torch.rand_like(m),
}


@pytest.mark.parametrize("noise", ["randn_like", "rand"])
def test_a_module_that_draws_random_numbers_exports(noise: str) -> None:
    torch.manual_seed(0)
    module, x = Autoencoder(NOISES[noise]), torch.rand(64, 8)
    model = from_torch(module, x)
    names = [y.name for y in model.graph.outputs]

    def loss(op: Any, y: Any, mean: Any, log_variance: Any) -> Any:
        x = next(v for v in op.graph.inputs if v.name == "x")
        kl = (mean**2 + op.Exp(log_variance) - log_variance - 1) * 0.5
        return op.ReduceMean((y - x) ** 2, keepdims=0) + op.ReduceMean(kl, keepdims=0) * 0.01

    artifacts = onnxtrain.build(
        model, loss=onnxtrain.losses.LossTerm(loss, output=names), optimizer=optim.Adam(lr=0.02)
    )
    first, second = onnxtrain.Trainer(artifacts), onnxtrain.Trainer(artifacts, seed=1)
    losses = [first.step(x.numpy()).loss for _ in range(60)]
    assert losses[-1] < 0.6 * losses[0]
    assert second.step(x.numpy()).loss != losses[0]  # another seed, other noise
    again = onnxtrain.Trainer(artifacts)
    assert again.step(x.numpy()).loss == losses[0]


class Exponential(Autoencoder):
    def __init__(self) -> None:
        super().__init__(lambda m, s: m + s * torch.empty_like(m).exponential_())


def test_other_random_numbers_are_named() -> None:
    with pytest.raises(ExportError, match=r"draws random numbers \(exponential_\).*\nhint: draw"):
        from_torch(Exponential(), torch.rand(4, 8))


@pytest.mark.parametrize("options", [{}, {"mode": "mean"}, {"mode": "sum", "padding_idx": 2}])
def test_embedding_bags_that_onnxruntime_does_not_run_are_refused(options: dict) -> None:
    """Exports of the mean crashed onnxruntime; those with ``padding_idx`` ignored it."""
    module = nn.Sequential(nn.EmbeddingBag(5, 3, **options), nn.Linear(3, 2))
    with pytest.raises(ExportError, match=r"(?s)EmbeddingBag uses .*hint: nn\.Embedding, then"):
        from_torch(module, (torch.ones(2, 4, dtype=torch.long),))
