"""Losses of logits on models that end in Softmax or Sigmoid: equal to torch on the logits."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
import torch.nn.functional as F

import onnxtrain
from onnxtrain import losses as L
from onnxtrain.errors import PrepareError, hints_name_flags
from onnxtrain.graph.builder import OpBuilder
from tests.losses.small import FLOAT, W1, X, model_of, weight

LABELS = np.array([0, 2, 1, 1, 0, 2])
HALVES = (np.arange(18).reshape(6, 3) % 2).astype(np.float32)
SCORES = 9.0 * torch.tensor(X, dtype=torch.float64) @ torch.tensor(W1, dtype=torch.float64)


def net(ending: Callable[[OpBuilder, ir.Value], ir.Value]) -> onnx.ModelProto:
    """Return ``p = ending(9 x w)``."""

    def build(op: OpBuilder) -> dict[str, ir.Value]:
        x = op.input("x", FLOAT, ["batch", 4])
        return {"p": ending(op, op.MatMul(x, weight(op, "w", 9 * W1)))}

    return model_of(build)


def trained(model: onnx.ModelProto, loss: L.LossLike, **options: object) -> onnxtrain.Trainer:
    artifacts = onnxtrain.build(model, loss=loss, optimizer="sgd", **options)
    return onnxtrain.Trainer(artifacts)


def reads(trainer: onnxtrain.Trainer) -> list[str]:
    return [line for line in trainer.artifacts.manifest.options["repairs"] if " reads the " in line]


def normalized(op: OpBuilder, u: ir.Value) -> ir.Value:
    """Divide by the sum of the row, as skl2onnx's Normalizer does."""
    total = op.ReduceSum(op.Abs(u), [-1], keepdims=1)
    return op.Div(u, op.Where(op.Greater(total, 0.0), total, 1.0))


SOFTMAX = {
    "softmax": lambda op, z: op.Softmax(z, axis=-1),
    "axis 1": lambda op, z: op.Softmax(z, axis=1),
    "identity": lambda op, z: op.Identity(op.Softmax(z, axis=1)),
    "reshape": lambda op, z: op.Reshape(op.Softmax(z, axis=1), [-1, 3]),
    "cast": lambda op, z: op.Cast(op.Cast(op.Softmax(z), to=11), to=1),
    "clip of Keras": lambda op, z: op.Clip(op.Softmax(z), 1e-7, 1 - 1e-7),
    "squeeze": lambda op, z: op.Squeeze(op.Softmax(op.Unsqueeze(z, [1]), axis=2), [1]),
    "transpose": lambda op, z: op.Transpose(
        op.Softmax(op.Transpose(z, perm=[1, 0]), axis=0), perm=[1, 0]
    ),
    "normalizer": lambda op, z: normalized(op, op.Softmax(z)),
    "exp": lambda op, z: normalized(op, op.Exp(z)),
    "normalizer behind a cast": lambda op, z: normalized(op, op.Cast(op.Exp(z), to=1)),
    "reciprocal": lambda op, z: op.Mul(
        op.Exp(z), op.Reciprocal(op.ReduceSum(op.Exp(z), [1], keepdims=1))
    ),
    "sum without its axis": lambda op, z: op.Div(
        (e := op.Exp(z)), op.Unsqueeze(op.ReduceSum(e, [1], keepdims=0), [1])
    ),
    "expanded sum": lambda op, z: op.Div(
        (e := op.Exp(z)), op.Expand(op.ReduceSum(e, [1], keepdims=1), op.Shape(e))
    ),
    "norm": lambda op, z: op.LpNormalization(op.Exp(z), p=1, axis=1),
    "exp of log-softmax": lambda op, z: op.Exp(op.LogSoftmax(z)),
    "exp of a difference": lambda op, z: op.Exp(op.Sub(z, op.ReduceLogSumExp(z, [1], keepdims=1))),
    "log of a sum of exp": lambda op, z: op.Exp(
        op.Sub(z, op.Log(op.ReduceSum(op.Exp(z), [1], keepdims=1)))
    ),
    "maximum": lambda op, z: op.Max(op.Min(op.Softmax(z), 1 - 1e-7), 1e-7),
    "epsilon": lambda op, z: op.Add(op.Softmax(z), 1e-7),
    "times one": lambda op, z: op.Relu(op.Mul(op.Softmax(z), op.const([1.0]))),
    "concat of one": lambda op, z: op.Concat(op.Softmax(z), axis=1),
}


@pytest.mark.parametrize(
    ("ending", "loss"),
    [
        *((ending, "cross_entropy") for ending in SOFTMAX),
        *((ending, "nll") for ending in ("softmax", "transpose", "exp", "exp of log-softmax")),
    ],
)
def test_softmax_is_not_applied_twice(ending: str, loss: str) -> None:
    trainer = trained(net(SOFTMAX[ending]), loss, metrics=["accuracy"], outputs=["p"])
    result = trainer.evaluate_batch(x=X, labels=LABELS)
    expected = F.cross_entropy(SCORES, torch.tensor(LABELS))
    np.testing.assert_allclose(result.loss, expected.item(), rtol=1e-5)
    accuracy = (SCORES.argmax(1).numpy() == LABELS).mean()
    np.testing.assert_allclose(result.metrics["accuracy"], accuracy)
    assert len(reads(trainer)) == 1
    assert "output 'p'" in reads(trainer)[0]
    probabilities = torch.softmax(SCORES, 1).numpy()
    np.testing.assert_allclose(trainer.predict(x=X)["p"], probabilities, rtol=1e-3, atol=1e-6)


def test_gradients_are_those_of_the_logits() -> None:
    weights = {}
    for ending in (SOFTMAX["softmax"], lambda op, z: z):
        trainer = trained(net(ending), "cross_entropy")
        trainer.step(x=X, labels=LABELS)
        weights[ending] = np.array(trainer.parameters["w"])
    np.testing.assert_array_equal(*weights.values())


def complement(op: OpBuilder, z: ir.Value) -> ir.Value:
    """Two columns of one score, as skl2onnx's binary classifiers have."""
    p = op.Sigmoid(op.Slice(z, [0], [1], [1]))
    return op.Concat(op.Sub(1.0, p), p, axis=1)


def test_binary_classifiers_with_two_columns() -> None:
    trainer = trained(net(complement), "cross_entropy", metrics=["accuracy"])
    labels = LABELS % 2
    result = trainer.evaluate_batch(x=X, labels=labels)
    expected = F.binary_cross_entropy_with_logits(SCORES[:, 0], torch.tensor(labels).double())
    np.testing.assert_allclose(result.loss, expected.item(), rtol=1e-5)


@pytest.mark.parametrize("divided", [True, False])
def test_one_against_the_rest(divided: bool) -> None:
    """Sigmoids, divided by their sum or not: the logits are their logarithms."""

    def ending(op: OpBuilder, z: ir.Value) -> ir.Value:
        return normalized(op, op.Sigmoid(z)) if divided else op.Sigmoid(z)

    trainer = trained(net(ending), "cross_entropy")
    loss = trainer.evaluate_batch(x=X, labels=LABELS).loss
    expected = F.cross_entropy(F.logsigmoid(SCORES), torch.tensor(LABELS))
    np.testing.assert_allclose(loss, expected.item(), rtol=1e-5)


SIGMOID = {
    "sigmoid": lambda op, z: op.Sigmoid(z),
    "clip": lambda op, z: op.Clip(op.Sigmoid(z), 1e-7, 1 - 1e-7),
    "reshape": lambda op, z: op.Reshape(op.Sigmoid(z), [-1, 3]),
    "columns": lambda op, z: op.Concat(
        *(op.Sigmoid(op.Slice(z, [i], [i + 1], [1])) for i in range(3)), axis=1
    ),
    "quotient": lambda op, z: op.Div(1.0, op.Add(1.0, op.Exp(op.Neg(z)))),
    "quotient of vectors": lambda op, z: op.Div(
        op.const([1.0]), op.Add(op.const([1.0]), op.Exp(op.Neg(z)))
    ),
    "exp over one plus exp": lambda op, z: op.Div((e := op.Exp(z)), op.Add(e, 1.0)),
    "tanh": lambda op, z: op.Mul(op.Add(1.0, op.Tanh(op.Mul(z, 0.5))), 0.5),
    "half of tanh": lambda op, z: op.Add(op.Mul(op.Tanh(op.Div(z, 2.0)), 0.5), 0.5),
    "log-sigmoid": lambda op, z: op.Exp(op.Neg(op.Softplus(op.Neg(z)))),
    "maximum": lambda op, z: op.Max(op.Sigmoid(z), 1e-7),
}


@pytest.mark.parametrize("ending", SIGMOID)
def test_sigmoid_is_not_applied_twice(ending: str) -> None:
    trainer = trained(net(SIGMOID[ending]), "bce_with_logits", metrics=["accuracy"])
    result = trainer.evaluate_batch(x=X, target=HALVES)
    expected = F.binary_cross_entropy_with_logits(SCORES, torch.tensor(HALVES).double())
    np.testing.assert_allclose(result.loss, expected.item(), rtol=1e-5)
    accuracy = ((SCORES.numpy() > 0) == (HALVES > 0.5)).mean()
    np.testing.assert_allclose(result.metrics["accuracy"], accuracy)
    np.testing.assert_allclose(
        trainer.predict(x=X)["p"], torch.sigmoid(SCORES).numpy(), rtol=1e-3, atol=1e-6
    )


def test_a_threshold_and_an_error_are_those_of_the_output() -> None:
    metrics = [L.Accuracy(threshold=0.5), L.MAE()]
    trainer = trained(net(SIGMOID["sigmoid"]), "bce_with_logits", metrics=metrics)
    metrics = trainer.evaluate_batch(x=X, target=HALVES).metrics
    p = torch.sigmoid(SCORES).numpy()
    np.testing.assert_allclose(metrics["accuracy"], ((p > 0.5) == (HALVES > 0.5)).mean())
    np.testing.assert_allclose(metrics["mae"], np.abs(p - HALVES).mean(), rtol=1e-5)


UNTOUCHED = {
    "logits": (lambda op, z: z, "cross_entropy"),
    "log-softmax and nll": (lambda op, z: op.LogSoftmax(z), "nll"),
    "log-softmax and cross entropy": (lambda op, z: op.LogSoftmax(z), "cross_entropy"),
    "log of softmax": (lambda op, z: op.Log(op.Softmax(z)), "nll"),
    "gate of experts": (lambda op, z: op.Mul(op.Softmax(z), z), "cross_entropy"),
}


@pytest.mark.parametrize("name", UNTOUCHED)
def test_other_endings_are_read_as_they_are(name: str) -> None:
    ending, loss = UNTOUCHED[name]
    trainer = trained(net(ending), loss)
    assert reads(trainer) == []
    if name != "gate of experts":
        expected = F.cross_entropy(SCORES, torch.tensor(LABELS)).item()
        value = trainer.evaluate_batch(x=X, labels=LABELS).loss
        np.testing.assert_allclose(value, expected, rtol=1e-4)


def test_bce_reads_probabilities() -> None:
    trainer = trained(net(SIGMOID["sigmoid"]), "bce")
    assert reads(trainer) == []


REFUSED = {
    "softmax with bce": (SOFTMAX["softmax"], "bce_with_logits", "Softmax"),
    "quotient with bce": (SOFTMAX["expanded sum"], "bce_with_logits", "Div"),
    "exp with bce": (SOFTMAX["exp of log-softmax"], "bce_with_logits", "Exp"),
    "tight clip": (lambda op, z: op.Clip(op.Softmax(z), 0.1, 0.9), "cross_entropy", "Softmax"),
    "softmax with nll": (lambda op, z: op.Mul(op.Softmax(z), 2.0), "nll", "Softmax"),
    "dropout": (lambda op, z: op.Dropout(op.Softmax(z), 0.5), "cross_entropy", "Softmax"),
    "square root": (lambda op, z: op.Sqrt(op.Softmax(z)), "cross_entropy", "Softmax"),
    "log with bce": (lambda op, z: op.Log(op.Sigmoid(z)), "bce_with_logits", "Sigmoid"),
    "log-softmax with bce": (lambda op, z: op.LogSoftmax(z), "bce_with_logits", "LogSoftmax"),
    "average of classifiers": (
        lambda op, z: op.Mul(op.Add(op.Softmax(z), op.Softmax(op.Neg(z))), 0.5),
        "cross_entropy",
        "Softmax",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_probabilities_without_logits_are_refused(name: str) -> None:
    ending, loss, activation = REFUSED[name]
    with pytest.raises(PrepareError, match=f"probabilities of {activation}") as error:
        trained(net(ending), loss)
    hint = re.search(r"read a value before it: loss=(LossTerm\(.*?\))", str(error.value))
    assert hint is not None
    reader = eval(hint[1], {"LossTerm": L.LossTerm})  # the hint, followed
    assert reads(trained(net(ending), reader)) == []
    with hints_name_flags(), pytest.raises(PrepareError, match=f"--loss-output {reader.output}"):
        trained(net(ending), loss)


@pytest.mark.parametrize(
    "ending",
    [
        lambda op, z: op.HardSigmoid(z),
        lambda op, z: op.Clip(op.Add(op.Mul(z, 0.2), 0.5), 0.0, 1.0),
        lambda op, z: op.Mul(op.Clip(op.Add(z, 3.0), 0.0, 6.0), 1 / 6),  # tf2onnx
    ],
)
def test_a_hard_sigmoid_has_probabilities(ending: Callable) -> None:
    with pytest.raises(PrepareError, match=r"\nhint: use loss='bce', which reads probabilities$"):
        trained(net(ending), "bce_with_logits")
    assert trained(net(ending), "bce").evaluate_batch(x=X, target=HALVES).loss > 0


def test_one_probability_with_cross_entropy_names_the_loss_that_works() -> None:
    model = net(lambda op, z: op.Sigmoid(op.Slice(z, [0], [1], [1])))
    with pytest.raises(PrepareError, match=r"\nhint: use loss='bce_with_logits', whose targets"):
        trained(model, "cross_entropy")
    assert len(reads(trained(model, "bce_with_logits"))) == 1


def test_a_softmax_of_opset_11_names_the_value_of_the_file() -> None:
    """It flattens to rows, which the conversion writes as nodes whose names no user knows."""
    model = onnx.parser.parse_model("""<ir_version: 7, opset_import: ["": 11]> g
        (float[n, 2, 5] x) => (float[n, 3, 5] y) <float[3, 2, 1] w = {1, 2, 3, 4, 5, 6}> {
        z = Conv(x, w) y = Softmax<axis = 1>(z) }""")
    with pytest.raises(PrepareError, match=r"LossTerm\('cross_entropy', output='z'\)"):
        trained(model, "cross_entropy")
    trained(model, L.LossTerm("cross_entropy", output="z"))


def test_an_activation_in_a_branch_is_refused() -> None:
    branch = "b{i} () => (float[n, 3] p{i}) {{ p{i} = Sigmoid(z) }}"
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 18]> g
        (float[n, 4] x, bool c) => (float[n, 3] y) <float[4, 3] w = {{{"1," * 11} 2}}> {{
        z = MatMul(x, w) y = If(c) <then_branch = {branch.format(i=0)},
        else_branch = {branch.format(i=1)}> }}""")
    hint = "export the model without this activation; or use loss='bce', which reads probabilities"
    with pytest.raises(PrepareError, match=f"\nhint: {hint}$"):
        trained(model, "bce_with_logits")
    trained(model, "bce")


def test_an_output_without_a_gradient_names_the_loss_of_the_caller() -> None:
    model = net(lambda op, z: op.Round(z))
    with pytest.raises(PrepareError, match=r"LossTerm\('mse', output="):
        trained(model, "mse")


def test_an_output_of_labels_names_the_value_before_it() -> None:
    def labels(op: OpBuilder, z: ir.Value) -> ir.Value:
        return op.Cast(op.ArgMax(op.Softmax(z), axis=1, keepdims=0), to=ir.DataType.FLOAT)

    with pytest.raises(PrepareError, match="no gradient flows from the outputs") as error:
        trained(net(labels), "cross_entropy")
    hint = re.search(r"loss=(LossTerm\(.*\))", str(error.value))
    assert hint is not None
    trainer = trained(net(labels), eval(hint[1], {"LossTerm": L.LossTerm}))
    (repair,) = reads(trainer)
    assert "CrossEntropy reads the logits" in repair


def test_an_unknown_output_lists_every_output_once() -> None:
    with pytest.raises(PrepareError, match=r"unknown output: 'scorez'\nhint: the model has \w+$"):
        trained(net(lambda op, z: op.Softmax(z)), L.LossTerm("mse", output="scorez"))


def test_trees_are_not_told_to_have_weights() -> None:
    ensemble = pytest.importorskip("sklearn.ensemble")
    to_onnx = pytest.importorskip("skl2onnx").to_onnx
    forest = ensemble.RandomForestClassifier(3).fit(X, LABELS)
    with pytest.raises(PrepareError, match="hint: decision trees have no weights that gradient"):
        trained(to_onnx(forest, X[:1]), "cross_entropy")


def test_another_axis_is_refused_and_the_hint_works() -> None:
    def sequence(op: OpBuilder, z: ir.Value) -> ir.Value:
        return op.Softmax(op.Reshape(z, [-1, 2, 3]), axis=-1)

    with pytest.raises(PrepareError, match="normalizes axis 2") as error:
        trained(net(sequence), "cross_entropy")
    assert "'cross_entropy:axis=2'" in str(error.value)
    trainer = trained(net(sequence), "cross_entropy:axis=2")
    loss = trainer.evaluate_batch(x=X, labels=LABELS.reshape(3, 2)).loss
    expected = F.cross_entropy(SCORES, torch.tensor(LABELS)).item()
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


def test_the_axis_of_classes_is_that_of_the_output() -> None:
    """tf2onnx ends segmentation models with a Transpose to channels last."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 18]> g
        (float[n, 1, 4, 4] x) => (float[n, 4, 4, 3] y) <float[3, 1, 1, 1] w = {1, 2, 3}> {
        z = Conv(x, w) p = Softmax<axis = 1>(z) y = Transpose<perm = [0, 2, 3, 1]>(p) }""")
    with pytest.raises(PrepareError, match="'cross_entropy:axis=3'"):
        trained(model, "cross_entropy")
    trainer = trained(model, "cross_entropy:axis=3")
    assert len(reads(trainer)) == 1
    x = np.random.default_rng(0).standard_normal((2, 1, 4, 4)).astype(np.float32)
    labels = np.arange(32).reshape(2, 4, 4) % 3
    scores = torch.tensor(x) * torch.tensor([1.0, 2.0, 3.0]).reshape(1, 3, 1, 1)
    loss = trainer.evaluate_batch(x=x, labels=labels).loss
    np.testing.assert_allclose(loss, F.cross_entropy(scores, torch.tensor(labels)), rtol=1e-5)


KERAS = """
<ir_version: 7, opset_import: ["" : 9]>
sequential (float[unk__6, 4] dense_input) => (float[unk__7, 3] dense_1)
{
  "sequential/dense_1/MatMul:0" = MatMul(dense_input, "sequential/dense_1/kernel:0")
  "sequential/dense_1/BiasAdd:0" = Add("sequential/dense_1/MatMul:0", "sequential/dense_1/bias:0")
  dense_1 = Softmax <axis: int = 1> ("sequential/dense_1/BiasAdd:0")
}
"""


def test_keras_file_of_an_old_opset(tmp_path: Path) -> None:
    """tf2onnx writes Softmax of opset 9, which normalizes all axes from axis 1 on."""
    model = ir.to_proto(ir.from_onnx_text(KERAS))
    for name, array in {"kernel": 9 * W1, "bias": np.zeros(3, np.float32)}.items():
        tensor = ir.serde.serialize_tensor(ir.Tensor(array, name=f"sequential/dense_1/{name}:0"))
        model.graph.initializer.append(tensor)
    trainer = trained(model, "cross_entropy", metrics=["accuracy"])
    loss = trainer.evaluate_batch(dense_input=X, labels=LABELS).loss
    expected = F.cross_entropy(SCORES, torch.tensor(LABELS)).item()
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    trainer.export(tmp_path / "trained.onnx")
    assert onnx.load(tmp_path / "trained.onnx").graph.node[-1].op_type == "Softmax"


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("zipmap", [True, False])
@pytest.mark.parametrize("kind", ["MLPClassifier", "LogisticRegression"])
def test_files_of_skl2onnx(tmp_path: Path, kind: str, classes: int, zipmap: bool) -> None:
    neural_network = pytest.importorskip("sklearn.neural_network")
    linear_model = pytest.importorskip("sklearn.linear_model")
    to_onnx = pytest.importorskip("skl2onnx").to_onnx
    classes_of = {
        "MLPClassifier": lambda: neural_network.MLPClassifier([5], max_iter=500, tol=1.0),
        "LogisticRegression": linear_model.LogisticRegression,
    }
    x = np.random.default_rng(0).standard_normal((60, 4)).astype(np.float32)
    labels = np.arange(60) % classes
    estimator = classes_of[kind]().fit(x, labels)
    model = to_onnx(estimator, x[:1], options={id(estimator): {"zipmap": zipmap}})
    trainer = trained(model, "cross_entropy", metrics=["accuracy"])
    result = trainer.evaluate_batch(X=x, labels=labels)
    p = estimator.predict_proba(x)
    np.testing.assert_allclose(result.loss, -np.log(p[np.arange(60), labels]).mean(), rtol=1e-4)
    np.testing.assert_allclose(result.metrics["accuracy"], estimator.score(x, labels))
    trainer.export(tmp_path / "trained.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "trained.onnx")
    label, probabilities = session.run(None, {"X": x})
    np.testing.assert_array_equal(label, estimator.predict(x))
    np.testing.assert_allclose(probabilities, p, rtol=1e-4, atol=1e-6)


def test_losses_that_read_logits_say_so() -> None:
    reading = {name: L.LOSSES.find(name).reads.name for name in L.LOSSES}
    assert {n for n, r in reading.items() if r != "VALUES"} == {
        *("cross_entropy", "nll", "bce_with_logits", "causal_lm", "kl_div", "ctc"),
        *("dpo", "ipo", "kto", "orpo", "distillation", "focal", "sigmoid_focal", "dice"),
        *("sigmoid_dice", "multilabel_soft_margin"),
    }
    assert dataclasses.fields(L.NLL)  # `reads` is no option
    assert "reads" not in {f.name for f in dataclasses.fields(L.NLL)}
