"""Training mode is never taken for evaluation mode, whatever an exporter does."""

from __future__ import annotations

import copy
from typing import Any

import onnx_ir as ir
import pytest
import torch
from torch import nn

from onnxtrain.torch import TrainableModule, exporters, from_torch
from onnxtrain.torch.exporters import ExportError

_dynamo = exporters.dynamo


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))


def in_evaluation_mode(module: nn.Module, *arguments: Any) -> ir.Model:
    """Export as if training mode had never been asked for, and leave the module so."""
    module.eval()
    return _dynamo(module, *arguments)


def with_other_names(module: nn.Module, *arguments: Any) -> ir.Model:
    """The same, and what is a running statistic cannot be seen."""
    model = in_evaluation_mode(module, *arguments)
    for name, value in list(model.graph.initializers.items()):
        if "running" in name:
            del model.graph.initializers[name]
            value.name = name.replace("running_", "kept_")
            model.graph.register_initializer(value)
    return model


def use(monkeypatch: pytest.MonkeyPatch, exporter: Any) -> None:
    monkeypatch.setattr(exporters, "dynamo", exporter)
    monkeypatch.setattr(exporters, "legacy", exporter)


def test_an_exporter_that_ignores_training_mode_is_repaired(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use(monkeypatch, in_evaluation_mode)
    plain = net()
    wrapped = TrainableModule(copy.deepcopy(plain))
    x = torch.randn(6, 4)
    for _ in range(2):
        torch.testing.assert_close(wrapped(x), plain(x))
    for (name, a), (_, b) in zip(wrapped.named_buffers(), plain.named_buffers(), strict=True):
        torch.testing.assert_close(a, b, msg=name)
    assert wrapped.training
    assert all(part.training for part in wrapped.modules())
    (norm,) = (n for n in from_torch(plain, x).graph if n.op_type == "BatchNormalization")
    assert norm.attributes["training_mode"].as_int() == 1


def test_lost_training_mode_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, with_other_names)
    x = torch.randn(6, 4)
    with pytest.raises(ExportError, match="training mode"):
        TrainableModule(net())(x)
    with pytest.raises(ExportError, match="training mode"):
        from_torch(net(), x)


def test_lost_updates_of_running_statistics_are_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use(monkeypatch, with_other_names)
    module = net()
    x = torch.randn(64, 4)
    with torch.no_grad():  # outputs of both modes are equal: only the statistics differ
        module[1].weight.zero_()  # pyright: ignore[reportIndexIssue, reportOperatorIssue]
    with pytest.raises(ExportError, match=r"does not update the running statistics of 1"):
        from_torch(module, x)
