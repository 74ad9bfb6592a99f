"""Their Trainer trains a TrainableModule as it trains the module; the page runs in tests/docs.

``make hugging-face`` makes an environment that has transformers, and runs both there.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from onnxtrain.torch import OnnxModule, TrainableModule, as_module, from_torch

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None,
        reason="transformers is not installed: make hugging-face",
    ),
    pytest.mark.filterwarnings("ignore"),  # of the frameworks; they have many
]


class Classifier(nn.Module):
    """What their Trainer wants: a loss, then the scores."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.net(input_ids=input_ids)["logits"]
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=8,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForSequenceClassification(config)


def train(net: nn.Module, folder: Path) -> list[float]:
    """The losses of two epochs with clipping, a schedule and accumulated gradients."""
    from transformers import Trainer, TrainingArguments

    draw = torch.Generator().manual_seed(1)
    rows = [
        {"input_ids": ids, "labels": ids[0] % 3}
        for ids in torch.randint(1, 40, (24, 6), generator=draw)
    ]
    arguments = TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=2,
        per_device_train_batch_size=4,
        seed=3,
        learning_rate=5e-3,
        warmup_steps=2,
        max_grad_norm=1.0,
        gradient_accumulation_steps=2,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
    )
    trainer: Any = Trainer(Classifier(net), arguments, train_dataset=rows)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


class ByName(nn.Module):
    """A file whose only output is the logits."""

    def __init__(self, file: OnnxModule) -> None:
        super().__init__()
        self.file = file

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.file(input_ids=input_ids)}


def test_their_trainer_with_a_file(tmp_path: Path) -> None:
    theirs = bert()
    path = tmp_path / "bert.onnx"
    example = {"input_ids": torch.randint(1, 40, (2, 6))}
    from_torch(theirs, example, dynamic_shapes={"input_ids": {0: "batch", 1: "length"}}).save(path)
    file = as_module(path, threads=1)
    losses = train(ByName(file), tmp_path / "ours")
    assert losses == pytest.approx(train(theirs, tmp_path / "theirs"), abs=2e-4)
    file.to_onnx(path)
    weights = as_module(path, threads=1).state_dict()
    assert weights.keys() == file.state_dict().keys()
    torch.testing.assert_close(weights, file.state_dict())


def test_their_trainer(tmp_path: Path) -> None:
    theirs, ours = bert(), bert()
    wanted = train(theirs, tmp_path / "theirs")
    losses = train(TrainableModule(ours, threads=1), tmp_path / "ours")
    assert len(losses) == 6
    assert losses == pytest.approx(wanted, abs=2e-4)  # they log four digits
    for (name, a), b in zip(theirs.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-3, atol=1e-4, msg=name)
