"""A local function named like a standard operator is ambiguous: runtimes disagree on it."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import onnxtrain
from onnxtrain.errors import PrepareError
from tests.wild import graphs as g


def _model(domain: str) -> onnx.ModelProto:
    body = onnx.FunctionProto(
        name="Relu",
        domain=domain,
        input=["a"],
        output=["b"],
        node=[g.node("Abs", "a", "b")],
        opset_import=[onnx.OperatorSetIdProto(domain="", version=17)],
    )
    nodes = [g.node("MatMul", "x w", "h"), g.node("Relu", "h", "y", domain=domain)]
    model = g.model(nodes, {"x": (4, 3)}, {"y": (4, 2)}, {"w": g.random(3, 2)})
    model.functions.append(body)
    if domain:
        model.opset_import.append(onnx.OperatorSetIdProto(domain=domain, version=1))
    return model


def test_it_raises() -> None:
    x = np.random.default_rng(3).standard_normal((4, 3)).astype(np.float32)
    (run,) = g.run(_model(""), {"x": x})
    assert (run == 0).any()  # the runtime's Relu, not the function, which is Abs
    with pytest.raises(PrepareError, match="names of standard operators: Relu"):
        onnxtrain.build(_model(""), loss="mse", optimizer="sgd")


def test_other_domains_are_inlined() -> None:
    x = np.random.default_rng(3).standard_normal((4, 3)).astype(np.float32)
    model = _model("mine")
    trainer = onnxtrain.Trainer(onnxtrain.build(model, loss="mse", optimizer="sgd"))
    (want,) = g.run(model, {"x": x})
    np.testing.assert_allclose(trainer.predict(x=x)["y"], want, rtol=1e-6)
    assert (want > 0).all()
