"""TrainableModule in training frameworks of others, which know nothing of it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from onnxtrain.torch import TrainableModule, as_module, from_torch

pytestmark = pytest.mark.filterwarnings("ignore")  # of the frameworks; they have many

WITHOUT_LIGHTNING = importlib.util.find_spec("lightning") is None


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def of_a_file() -> nn.Module:
    """The same network from its file; it has the same names."""
    return as_module(from_torch(network(), torch.randn(2, 6)), threads=1)


WRAPPED = pytest.mark.parametrize(
    "ours_of", [lambda: TrainableModule(network(), threads=1), of_a_file], ids=["module", "file"]
)


def data() -> DataLoader:
    g = torch.Generator().manual_seed(1)
    x, y = torch.randn(24, 6, generator=g), torch.randint(0, 3, (24,), generator=g)
    return DataLoader(TensorDataset(x, y), batch_size=4)


def same(ours: nn.Module, theirs: nn.Module, losses: tuple[list[float], list[float]]) -> None:
    assert len(losses[0]) == 12
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for name, p in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], p, rtol=1e-4, atol=1e-5)


@WRAPPED
def test_accelerate(ours_of: Callable[[], nn.Module]) -> None:
    """Accumulated, clipped gradients and a schedule, all by Accelerate."""
    from accelerate import Accelerator

    def train(module: nn.Module) -> tuple[nn.Module, list[float]]:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
        module, optimizer, batches, schedule = accelerator.prepare(
            module, optimizer, data(), schedule
        )
        losses = []
        for _ in range(2):
            for x, y in batches:
                with accelerator.accumulate(module):
                    loss = nn.functional.cross_entropy(module(x), y)
                    accelerator.backward(loss)
                    accelerator.clip_grad_norm_(module.parameters(), 1.0)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                    losses.append(loss.item())
        return accelerator.unwrap_model(module), losses

    theirs, ours = train(network()), train(ours_of())
    assert type(ours[0]) is type(ours_of())
    same(ours[0], theirs[0], (ours[1], theirs[1]))


@pytest.mark.skipif(
    WITHOUT_LIGHTNING, reason="lightning is not installed: pip install lightning==2.6.6"
)
@WRAPPED
def test_lightning(tmp_path: Path, ours_of: Callable[[], nn.Module]) -> None:
    """A trainer with validation, checkpoints and clipped, accumulated gradients."""
    import lightning

    class Classifier(lightning.LightningModule):
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net, self.losses = net, []

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def train(net: nn.Module, folder: str) -> Any:
        module = Classifier(net)
        trainer = lightning.Trainer(
            max_epochs=2,
            accelerator="cpu",
            logger=False,
            default_root_dir=tmp_path / folder,
            enable_progress_bar=False,
            enable_model_summary=False,
            gradient_clip_val=1.0,
            accumulate_grad_batches=2,
        )
        trainer.fit(module, data(), data())
        return module, trainer

    (theirs, _), (ours, trainer) = train(network(), "a"), train(ours_of(), "b")
    same(ours, theirs, (ours.losses, theirs.losses))
    saved = torch.load(trainer.checkpoint_callback.best_model_path, weights_only=False)
    assert list(saved["state_dict"]) == list(theirs.state_dict())
