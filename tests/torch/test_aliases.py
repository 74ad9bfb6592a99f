"""Tied weights are one parameter with all its names."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn

from onnxtrain.artifacts.build import build
from onnxtrain.artifacts.trainable import ALIASES
from onnxtrain.errors import CheckpointError, PrepareError
from onnxtrain.torch import from_torch
from onnxtrain.training import Trainer


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(ids))


def test_tied_weights_have_aliases() -> None:
    net = Tied().train()
    model = from_torch(net, (torch.zeros(2, dtype=torch.long),))
    artifacts = build(ir.to_proto(model), loss="cross_entropy", optimizer="sgd")
    (weight,) = artifacts.manifest.parameters
    assert {weight.name, *weight.aliases} == {"words.weight", "head.weight"}
    trainer = Trainer(artifacts, threads=1)
    new = torch.randn(7, 4)
    assert trainer.load_weights(dict.fromkeys(net.state_dict(), new)) == [weight.name]
    np.testing.assert_array_equal(trainer.parameters[weight.name], new.numpy())
    trainer.load_weights({weight.aliases[0]: 2 * new})
    np.testing.assert_array_equal(trainer.parameters[weight.name], 2 * new.numpy())
    with pytest.raises(CheckpointError, match="unknown nothing like it"):
        trainer.load_weights({weight.name: new, "nothing like it": new})


def test_damaged_record_is_refused() -> None:
    model = from_torch(Tied().train(), (torch.zeros(2, dtype=torch.long),))
    model.metadata_props[ALIASES] = '{"words.weight": [1]}'
    with pytest.raises(PrepareError, match="is damaged: names are strings"):
        build(model, loss="cross_entropy", optimizer="sgd")
