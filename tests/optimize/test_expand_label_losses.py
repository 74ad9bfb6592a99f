"""expand_label_losses: plain operators return the same losses."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from onnxtrain import thresholds
from onnxtrain.autodiff.differentiate import differentiate
from onnxtrain.autodiff.gradients import load_normalized
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.simplify import simplify
from onnxtrain.losses import NLL, CrossEntropy, Loss, attach_loss
from onnxtrain.optimize.cross_entropy import expand_label_losses
from onnxtrain.targets import Target
from tests.losses.compare import session_of
from tests.losses.small import FLOAT, model_of

rng = np.random.default_rng(4)
WEIGHT = [0.5, 2.0, 1.5, 1.0]


def training_model(loss: Loss, expand: bool) -> ir.Model:
    prepared = load_normalized(
        model_of(lambda op: {"y": op.Mul(op.input("x", FLOAT, ["n", 4]), 2.0)})
    ).model
    attached = attach_loss(prepared, loss, metrics=["perplexity"])
    op = OpBuilder(prepared.graph, prefix="grad/")
    x = prepared.graph.inputs[0]
    grad = differentiate(op, {attached.loss: op.const(1.0, FLOAT)}, [x])[x]
    out = op.Identity(grad)
    out.name = "x_grad"
    prepared.graph.outputs.append(out)
    if expand:
        expand_label_losses(prepared, op)
    return simplify(prepared)


@pytest.mark.parametrize(
    "loss",
    [
        CrossEntropy(),
        CrossEntropy(ignore_index=None),
        CrossEntropy(reduction="sum", weight=WEIGHT),
        CrossEntropy(weight=WEIGHT, ignore_index=1, label_smoothing=0.2),
        NLL(),
        NLL(weight=WEIGHT, ignore_index=None),
    ],
    ids=str,
)
def test_same_values_in_fewer_nodes(loss: Loss) -> None:
    feeds = {
        "x": rng.standard_normal((5, 4)).astype(np.float32),
        "labels": np.array([0, 1, 3, 2, 1]),
    }
    plain, expanded = (training_model(loss, e) for e in (False, True))
    kinds = {n.op_type for n in expanded.graph}
    assert not kinds & {"SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"}
    names = [y.name for y in plain.graph.outputs]
    assert (
        [y.name for y in expanded.graph.outputs] == names == ["loss", "perplexity", "y", "x_grad"]
    )
    before, after = (session_of(ir.to_proto(m)).run(names, feeds) for m in (plain, expanded))
    for name, a, b in zip(names, before, after, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-6, atol=1e-7, err_msg=name)


def test_the_gradient_shares_what_the_loss_computes() -> None:
    expanded = training_model(CrossEntropy(ignore_index=None), expand=True)
    kinds = [n.op_type for n in expanded.graph]
    assert kinds.count("LogSoftmax") == 1
    assert kinds.count("Unsqueeze") == 1


def test_nothing_to_do() -> None:
    prepared = load_normalized(
        model_of(lambda op: {"y": op.Tanh(op.input("x", FLOAT, ["n", 4]))})
    ).model
    assert expand_label_losses(prepared, OpBuilder(prepared.graph)) == 0
    assert [n.op_type for n in prepared.graph] == ["Tanh"]


LOSSES = [
    CrossEntropy(),
    CrossEntropy(ignore_index=None, reduction="sum"),
    CrossEntropy(ignore_index=2, weight=WEIGHT),
]


@pytest.fixture
def all_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four classes are many."""
    monkeypatch.setattr(thresholds, "SOFTMAX_CLASSES", 4)


def gradient_model(loss: Loss, target: str | Target) -> ir.Model:
    prepared = load_normalized(
        model_of(lambda op: {"y": op.Mul(op.input("x", FLOAT, ["n", 4]), 2.0)})
    ).model
    attached = attach_loss(prepared, loss)
    op = OpBuilder(prepared.graph, prefix="grad/")
    x = prepared.graph.inputs[0]
    grad = differentiate(op, {attached.loss: op.ones_like(attached.loss)}, [x])[x]
    out = op.Identity(grad)
    out.name = "x_grad"
    prepared.graph.outputs.append(out)
    expand_label_losses(prepared, OpBuilder(prepared.graph, target=target))
    return simplify(prepared)


def test_few_classes_keep_logarithms() -> None:
    kinds = [n.op_type for n in gradient_model(CrossEntropy(), "cpu").graph]
    assert "NonZero" not in kinds
    assert kinds.count("LogSoftmax") == kinds.count("Exp") == 1


@pytest.mark.usefixtures("all_wide")
@pytest.mark.parametrize("loss", LOSSES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 30.0, 200.0, 1e6])
def test_probabilities_instead_of_log_probabilities(loss: Loss, scale: float) -> None:
    """Scores so far apart that probabilities vanish have exact losses all the same."""
    feeds = {
        "x": (scale * rng.standard_normal((7, 4))).astype(np.float32),
        "labels": np.array([0, 1, 3, 2, 1, 0, 3]),
    }
    quick, plain = (gradient_model(loss, target) for target in ("cpu", "cuda"))
    kinds = [n.op_type for n in quick.graph]
    assert kinds.count("Softmax") == 1
    assert "Exp" not in kinds
    assert "Softmax" not in [n.op_type for n in plain.graph]
    names = ["loss", "x_grad"]
    actual, expected = (session_of(ir.to_proto(m)).run(names, feeds) for m in (quick, plain))
    np.testing.assert_allclose(actual[0], expected[0], rtol=2e-6)
    np.testing.assert_allclose(actual[1], expected[1], rtol=1e-5, atol=1e-7)


@pytest.mark.usefixtures("all_wide")
@pytest.mark.parametrize("odd", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("label", [0, 1])
def test_scores_that_are_infinite_or_nan(odd: float, label: int) -> None:
    feeds = {"x": np.array([[odd, 0, 1, 2]], np.float32), "labels": np.array([label])}
    models = (gradient_model(CrossEntropy(ignore_index=None), t) for t in ("cpu", "cuda"))
    actual, expected = (session_of(ir.to_proto(m)).run(["loss", "x_grad"], feeds) for m in models)
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
