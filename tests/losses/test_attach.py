"""Everything that can be a loss, attached to small models."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F

from onnxtrain import losses as L
from onnxtrain.autodiff.gradients import load_normalized
from onnxtrain.autodiff.selection import trainable
from onnxtrain.errors import PrepareError, ShapeError
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.importer import Prepared
from onnxtrain.losses import LossTerm, attach_loss
from tests.losses.small import (
    FLOAT,
    INT64,
    W1,
    W2,
    X,
    classifier,
    gradients,
    model_of,
    run,
    two_heads,
    weight,
)

rng = np.random.default_rng(1)
LABELS = rng.integers(0, 3, 6)
TA, TB = (rng.standard_normal((6, n)).astype(np.float32) for n in (3, 2))


def signature(attached: L.Attached) -> list[tuple]:
    return [(x.name, x.dtype, tuple(str(d) for d in x.shape)) for x in attached.targets]


def check_cross_entropy(attached: L.Attached, labels: str = "labels") -> None:
    """Check value and gradient of a mean cross entropy on the classifier."""
    feeds = {"x": X, labels: LABELS}
    w = torch.tensor(W1, dtype=torch.float64, requires_grad=True)
    expected = F.cross_entropy(torch.tensor(X, dtype=torch.float64) @ w, torch.tensor(LABELS))
    expected.backward()
    outputs = run(attached, **feeds)
    assert outputs["loss"].shape == ()
    np.testing.assert_allclose(outputs["loss"], expected.item(), rtol=1e-5)
    np.testing.assert_allclose(outputs["logits"], X @ W1, rtol=1e-5)
    grad = gradients(attached, ["w"], **feeds)["w"]
    np.testing.assert_allclose(grad, w.grad.numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "loss",
    [
        "cross_entropy",
        "cross-entropy:ignore_index=none",
        L.CrossEntropy(),
        L.CrossEntropy,
        LossTerm("cross_entropy", output="logits"),
        [L.CrossEntropy()],
    ],
    ids=str,
)
def test_names_and_objects(loss: L.LossLike) -> None:
    attached = attach_loss(classifier(), loss)
    assert signature(attached) == [("labels", INT64, ("batch",))]
    assert [y.name for y in attached.model.graph.outputs] == ["loss", "logits"]
    assert attached.loss is attached.model.graph.outputs[0]
    assert attached.loss.shape == ir.Shape([])
    check_cross_entropy(attached)


def test_only_the_models_own_weights_are_trainable() -> None:
    loss = L.CrossEntropy(weight=[1.0, 2.0, 3.0], label_smoothing=0.1)
    attached = attach_loss(classifier(), [loss, LossTerm("mse", target="t", weight=0.3)])
    assert [x.name for x in trainable(Prepared.of(attached.model))] == ["w"]


def test_float_targets() -> None:
    attached = attach_loss(classifier(), "mse")
    assert signature(attached) == [("target", FLOAT, ("batch", "3"))]
    outputs = run(attached, x=X, target=TA)
    np.testing.assert_allclose(outputs["loss"], np.mean((X @ W1 - TA) ** 2), rtol=1e-5)


def test_int32_labels_for_webgpu() -> None:
    attached = attach_loss(classifier(), "cross_entropy", target="webgpu")
    assert signature(attached) == [("labels", ir.DataType.INT32, ("batch",))]
    outputs = run(attached, x=X, labels=LABELS.astype(np.int32))
    expected = F.cross_entropy(torch.tensor(X @ W1), torch.tensor(LABELS))
    np.testing.assert_allclose(outputs["loss"], expected, rtol=1e-5)


def test_weighted_sum_over_two_outputs() -> None:
    attached = attach_loss(
        two_heads(), [LossTerm("mse", output="a", weight=0.4), LossTerm("l1", "b", 0.6)]
    )
    assert signature(attached) == [
        ("target_1", FLOAT, ("batch", "3")),
        ("target_2", FLOAT, ("batch", "2")),
    ]
    feeds = {"x": X, "target_1": TA, "target_2": TB}
    expected = 0.4 * np.mean((X @ W1 - TA) ** 2) + 0.6 * np.mean(np.abs(X @ W2 - TB))
    np.testing.assert_allclose(run(attached, **feeds)["loss"], expected, rtol=1e-5)
    grads = gradients(attached, ["wa", "wb"], **feeds)
    np.testing.assert_allclose(grads["wa"], 0.4 * 2 / 18 * X.T @ (X @ W1 - TA), rtol=1e-4)
    np.testing.assert_allclose(grads["wb"], 0.6 / 12 * X.T @ np.sign(X @ W2 - TB), rtol=1e-4)


def test_two_terms_share_a_target_by_name() -> None:
    terms = [LossTerm("cross_entropy", "a", target="labels"), LossTerm("nll", "b", target="labels")]
    attached = attach_loss(two_heads(), terms)
    assert signature(attached) == [("labels", INT64, ("batch",))]
    labels = LABELS % 2
    outputs = run(attached, x=X, labels=labels)
    a, b = torch.tensor(X @ W1), torch.tensor(X @ W2)
    expected = F.cross_entropy(a, torch.tensor(labels)) + F.nll_loss(b, torch.tensor(labels))
    np.testing.assert_allclose(outputs["loss"], expected, rtol=1e-5)


def test_an_autoencoders_target_is_its_input() -> None:
    def build(op: OpBuilder) -> dict[str, ir.Value]:
        x = op.input("x", FLOAT, ["batch", 4])
        return {"y": op.MatMul(x, weight(op, "w", np.eye(4, dtype=np.float32) * 2))}

    attached = attach_loss(load_normalized(model_of(build)).model, LossTerm("mse", target="x"))
    assert attached.targets == []
    np.testing.assert_allclose(run(attached, x=X)["loss"], np.mean(X**2), rtol=1e-5)


def test_a_triplet_of_outputs_or_of_inputs() -> None:
    def build(op: OpBuilder) -> dict[str, ir.Value]:
        w = weight(op, "w", W1)
        return {n: op.MatMul(op.input(f"x_{n}", FLOAT, ["batch", 4]), w) for n in "apn"}

    rows = [X, X[::-1].copy(), X[[1, 0, 3, 2, 5, 4]]]
    expected = F.triplet_margin_loss(*(torch.tensor(r @ W1) for r in rows))
    for loss in ("triplet_margin", LossTerm("triplet_margin", output=["a", "p", "n"])):
        attached = attach_loss(load_normalized(model_of(build)).model, loss)
        assert attached.targets == []
        outputs = run(attached, **{f"x_{n}": r for n, r in zip("apn", rows, strict=True)})
        np.testing.assert_allclose(outputs["loss"], expected, rtol=1e-5)
    attached = attach_loss(classifier(), "triplet_margin")
    assert [x.name for x in attached.targets] == ["positive", "negative"]
    outputs = run(attached, x=rows[0], positive=rows[1] @ W1, negative=rows[2] @ W1)
    np.testing.assert_allclose(outputs["loss"], expected, rtol=1e-5)


@pytest.mark.parametrize("name", ["loss", "total"])
@pytest.mark.parametrize("shape", [[], [1]], ids=str)
def test_a_scalar_that_is_there_already(name: str, shape: list[int]) -> None:
    def build(op: OpBuilder) -> dict[str, ir.Value]:
        y = op.MatMul(op.input("x", FLOAT, ["batch", 4]), weight(op, "w", W1))
        mean = op.ReduceMean(op.Mul(y, y), keepdims=0)
        return {"y": y, name: op.Reshape(mean, op.const(shape))}

    attached = attach_loss(load_normalized(model_of(build)).model, name)
    assert attached.targets == []
    outputs = [y.name for y in attached.model.graph.outputs]
    assert outputs == (["loss", "y"] if name == "loss" else ["loss", "y", "total"])
    values = run(attached, x=X)
    assert values["loss"].shape == ()
    np.testing.assert_allclose(values["loss"], np.mean((X @ W1) ** 2), rtol=1e-5)
    grad = gradients(attached, ["w"], x=X)["w"]
    np.testing.assert_allclose(grad, 2 / 18 * X.T @ X @ W1, rtol=1e-4)


def by_name(op: OpBuilder, b: ir.Value, a: ir.Value) -> ir.Value:
    t = op.input("t", FLOAT, op.dims(b))
    return op.Add(op.ReduceSum(op.Mul(b, t), keepdims=0), op.ReduceMean(a, keepdims=0))


def in_order(op: OpBuilder, first: ir.Value, second: ir.Value) -> ir.Value:
    return by_name(op, second, first)


def all_of_them(op: OpBuilder, *outputs: ir.Value) -> ir.Value:
    return by_name(op, outputs[1], outputs[0])


@pytest.mark.parametrize("function", [by_name, in_order, all_of_them])
def test_functions_over_the_builder(function) -> None:
    attached = attach_loss(two_heads(), function)
    assert signature(attached) == [("t", FLOAT, ("batch", "2"))]
    expected = np.sum(X @ W2 * TB) + np.mean(X @ W1)
    np.testing.assert_allclose(run(attached, x=X, t=TB)["loss"], expected, rtol=1e-4)
    assert np.all(np.isfinite(gradients(attached, ["wa", "wb"], x=X, t=TB)["wb"]))


def test_a_function_on_chosen_outputs() -> None:
    attached = attach_loss(
        two_heads(), LossTerm(lambda op, y: op.ReduceMax(y, keepdims=0), "b", 2.0)
    )
    np.testing.assert_allclose(run(attached, x=X)["loss"], 2 * np.max(X @ W2), rtol=1e-5)


def loss_model(logits: str = "logits", scale: bool = True):
    """Return a model of the mean of (scale * (logits - wanted))^2, and another output."""

    def build(op: OpBuilder) -> dict[str, ir.Value]:
        d = op.Sub(op.input(logits, FLOAT, ["N", 3]), op.input("wanted", FLOAT, ["N", 3]))
        if scale:
            d = op.Mul(d, weight(op, "w", np.array([1.0, 2.0, 3.0], np.float32)))
        square = op.Mul(d, d)
        return {"mean": op.ReduceMean(square, keepdims=0), "square": square}

    return model_of(build)


@pytest.mark.parametrize("form", ["proto", "path", "str", "bytes", "ir"])
def test_another_model(form: str, tmp_path) -> None:
    proto = loss_model()
    path = tmp_path / "loss.onnx"
    path.write_bytes(proto.SerializeToString())
    source = {
        "proto": proto,
        "path": path,
        "str": str(path),
        "bytes": proto.SerializeToString(),
        "ir": ir.from_proto(proto),
    }[form]
    attached = attach_loss(classifier(), source)
    assert signature(attached) == [("wanted", FLOAT, ("batch", "3"))]
    expected = np.mean(([1, 2, 3] * (X @ W1 - TA)) ** 2)
    np.testing.assert_allclose(run(attached, x=X, wanted=TA)["loss"], expected, rtol=1e-5)
    # the loss model's own parameter is called w, too: it is fixed and does not disturb the model's
    assert [x.name for x in trainable(Prepared.of(attached.model))] == ["w"]
    grad = gradients(attached, ["w"], x=X, wanted=TA)["w"]
    np.testing.assert_allclose(grad, 2 / 18 * X.T @ ([1, 4, 9] * (X @ W1 - TA)), rtol=1e-4)


def test_another_model_on_a_chosen_output() -> None:
    attached = attach_loss(two_heads(), LossTerm(loss_model(), output="a", weight=0.5))
    loss = run(attached, x=X, wanted=TA)["loss"]
    np.testing.assert_allclose(loss, 0.5 * np.mean(([1, 2, 3] * (X @ W1 - TA)) ** 2), rtol=1e-5)


def test_reduction_none_is_reduced_only_on_request() -> None:
    with pytest.raises(ShapeError, match=r"the loss is not a scalar: .*FLOAT\[batch,3\]"):
        attach_loss(classifier(), L.MSE(reduction="none"))
    attached = attach_loss(classifier(), LossTerm(L.MSE(reduction="none"), reduce="mean"))
    loss = run(attached, x=X, target=TA)["loss"]
    np.testing.assert_allclose(loss, np.mean((X @ W1 - TA) ** 2), rtol=1e-5)


def test_inner_values_can_be_asked_for() -> None:
    def build(op: OpBuilder) -> dict[str, ir.Value]:
        h = op.Tanh(op.input("x", FLOAT, ["batch", 4]))
        h.name = "hidden"
        return {"y": op.MatMul(h, weight(op, "w", W1))}

    attached = attach_loss(
        load_normalized(model_of(build)).model,
        [L.MSE(), LossTerm("l1", output="hidden", weight=0.1)],
        outputs=["hidden"],
    )
    assert attached.outputs["hidden"].name == "hidden"
    assert [x.name for x in attached.targets] == ["target_1", "target_2"]


def test_an_inner_value_called_loss_makes_room() -> None:
    def build(op: OpBuilder) -> dict[str, ir.Value]:
        h = op.Tanh(op.input("x", FLOAT, ["batch", 4]))
        h.name = "loss"
        return {"y": op.Exp(op.MatMul(h, weight(op, "w", W1)))}

    attached = attach_loss(load_normalized(model_of(build)).model, "mse")
    assert run(attached, x=X, target=TA)["loss"].shape == ()


def test_a_name_that_is_taken() -> None:
    def build(op: OpBuilder) -> dict[str, ir.Value]:
        x, other = op.input("labels", FLOAT, ["batch", 4]), op.input("unused", FLOAT, [1])
        return {"y": op.Add(op.MatMul(x, weight(op, "w", W1)), other)}

    attached = attach_loss(load_normalized(model_of(build)).model, "cross_entropy")
    assert [x.name for x in attached.targets] == ["labels_1"]


REFUSED = [
    (
        classifier,
        "cross_entorpy",
        "unknown loss or output: 'cross_entorpy'\nhint: did you mean cross_ent",
    ),
    (classifier, "logit", "unknown loss or output: 'logit'\nhint: did you mean logits"),
    (classifier, "mse:delta=1", "mse has no option 'delta'"),
    (classifier, [], "the list of losses is empty"),
    (classifier, LossTerm([L.MSE()]), "a LossTerm holds one loss"),
    (classifier, 3, "not a loss: int"),
    (
        two_heads,
        "mse",
        "MSE: the model has several outputs: a, b\nhint: select one, for example LossTerm",
    ),
    (two_heads, LossTerm("mse", output="c"), "unknown output: 'c'\nhint: the model has a, b"),
    (classifier, LossTerm("mse", target=["t", "u"]), r"MSE takes 1 target\(s\), got t, u"),
    (classifier, LossTerm("mse", target="logits"), "the model already has a value named 'logits'"),
    (
        classifier,
        LossTerm("nll", target="x"),
        r"NLL expects class indices, got x: FLOAT\[batch,4\]",
    ),
    (classifier, LossTerm(lambda op, y: y, target="t"), "target=t: only a loss object has targets"),
    (classifier, lambda op, y: 3.0, "the loss function returned float"),
    (two_heads, lambda op, y: y, r"the loss function takes \(y\), but the model has a, b"),
    (classifier, lambda op, y: op.Cast(op.Size(y), to=INT64), "the loss is not a float"),
    (
        two_heads,
        loss_model(),
        "the loss model reads no output of the model: its inputs are logits, wanted",
    ),
]


@pytest.mark.parametrize(("model", "loss", "message"), REFUSED, ids=[r[2][:30] for r in REFUSED])
def test_refusals(model, loss: L.LossLike, message: str) -> None:
    with pytest.raises(PrepareError, match=message):
        attach_loss(model(), loss)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ("logits", r"the loss is not a scalar: logits: FLOAT\[batch,3\]"),
        (lambda op, y: y, r"the loss is not a scalar: logits: FLOAT\[batch,3\]"),
        ("ctc", r"CTC does not accept logits: FLOAT\[batch,3\]\nhint: it expects log-prob"),
        (LossTerm("mse", target="x"), "MSE: target and prediction have different shapes"),
    ],
    ids=["output", "function", "rank", "target"],
)
def test_shapes_that_do_not_fit(loss: L.LossLike, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        attach_loss(classifier(), loss)


def test_a_loss_model_that_does_not_fit() -> None:
    with pytest.raises(
        ShapeError, match=r"the loss model expects logits: FLOAT\[N,3\], but the model has b: FLOAT"
    ):
        attach_loss(two_heads(), LossTerm(loss_model(), output="b"))

    def build(op: OpBuilder) -> dict[str, ir.Value]:
        y = op.input("logits", FLOAT, ["N", 3])
        return {"a": op.ReduceMax(y, keepdims=0), "b": op.ReduceMin(y, keepdims=0)}

    with pytest.raises(PrepareError, match=r"the loss model has several outputs: a, b"):
        attach_loss(classifier(), model_of(build))


def test_loss_is_the_name_of_something_else() -> None:
    def build(op: OpBuilder) -> dict[str, ir.Value]:
        x = op.input("loss", FLOAT, ["batch", 4])
        return {"y": op.MatMul(x, weight(op, "w", W1))}

    with pytest.raises(
        PrepareError, match=r"the model already uses the name 'loss': loss: FLOAT\[batch,4\]"
    ):
        attach_loss(load_normalized(model_of(build)).model, "mse")


def test_an_unknown_target() -> None:
    with pytest.raises(PrepareError, match="unknown target: 'tpu'"):
        attach_loss(classifier(), "mse", target="tpu")
    with pytest.raises(PrepareError, match="reduce must be 'mean' or 'sum': 'max'"):
        LossTerm("mse", reduce="max")
    with pytest.raises(PrepareError, match="unknown output: 'hiden'"):
        attach_loss(classifier(), "mse", outputs=["hiden"])


def test_outputs_a_term_cannot_read() -> None:
    def build(op: OpBuilder) -> dict[str, ir.Value]:
        y = op.MatMul(op.input("x", FLOAT, ["batch", 4]), weight(op, "w", W1))
        return {"y": y, "best": op.ArgMax(y, axis=1), "size": op.ReduceMean(y, keepdims=0)}

    model = load_normalized(model_of(build)).model
    with pytest.raises(
        PrepareError, match=r"a loss needs a float output, got best: INT64\[batch,1\]"
    ):
        attach_loss(model, LossTerm("mse", output="best"))
    with pytest.raises(
        PrepareError, match="loss='size' is an output of the model and takes no output="
    ):
        attach_loss(model, LossTerm("size", output="y"))
