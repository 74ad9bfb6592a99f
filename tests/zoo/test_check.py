"""The comparison notices wrong gradients, wrong outputs and foreign operators."""

import dataclasses

import onnx
import pytest

import onnxtrain

from . import check as checking
from .models import ZOO


def _spoil(monkeypatch: pytest.MonkeyPatch, change) -> None:
    """Let ``vjp`` give a model that ``change`` has been applied to."""
    honest = onnxtrain.vjp

    def vjp(*arguments, **options):
        model = honest(*arguments, **options)
        change(model)
        return model

    monkeypatch.setattr(onnxtrain, "vjp", vjp)


def _scale_output(model: onnx.ModelProto, index: int, factor: float) -> None:
    name = model.graph.output[index].name
    for node in model.graph.node:
        for items in (node.input, node.output):
            items[:] = ["spoiled" if item == name else item for item in items]
    constant = model.graph.initializer.add(name="factor", data_type=onnx.TensorProto.FLOAT)
    constant.float_data.append(factor)
    model.graph.node.add(op_type="Mul", input=["spoiled", "factor"], output=[name])


@pytest.mark.parametrize(("index", "message"), [(-1, "_grad"), (0, "output 0")])
def test_small_error_is_noticed(monkeypatch, index, message):
    _spoil(monkeypatch, lambda model: _scale_output(model, index, 1.001))
    result = checking.check(ZOO["mlp"])
    assert result.status == "fail"
    assert any(message in note for note in result.notes)


def test_foreign_operator_is_noticed(monkeypatch):
    def use_gelu(model: onnx.ModelProto) -> None:
        model.opset_import.add(domain="com.microsoft", version=1)
        name = model.graph.output[0].name
        model.graph.node.add(
            op_type="Gelu", domain="com.microsoft", input=[name], output=["unused"]
        )

    _spoil(monkeypatch, use_gelu)
    result = checking.check(ZOO["mlp"])
    assert any("com.microsoft::Gelu" in note for note in result.notes)


@pytest.mark.parametrize(("kink", "status"), [("ReLU at zero", "pass"), ("", "fail")])
def test_float64_settles_known_kinks_only(monkeypatch, kink, status):
    monkeypatch.setattr(checking, "_misses", lambda *_: ["a gradient is off"])
    result = checking.check(dataclasses.replace(ZOO["mlp"], kink=kink))
    assert result.status == status
    assert any("in float64: worst" in note for note in result.notes)


def test_float64_does_not_settle_a_wrong_graph(monkeypatch):
    _spoil(monkeypatch, lambda model: _scale_output(model, -1, 1.001))
    result = checking.check(dataclasses.replace(ZOO["mlp"], kink="ReLU at zero"))
    assert result.status == "fail"
