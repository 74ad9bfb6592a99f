"""Training and evaluation mode of BatchNormalization and Dropout."""

from __future__ import annotations

import numpy as np
import onnx.parser
import onnx_ir as ir
import onnxruntime
import pytest

import onnxtrain
from onnxtrain.autodiff.gradients import load_normalized
from onnxtrain.autodiff.rule_registry import select_variant_name
from onnxtrain.autodiff.rules.batch_norm import STATISTICS_CHOICES, STATISTICS_VARIANTS
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.modes import (
    running_statistics,
    to_evaluation,
    to_training,
    unshare_running_statistics,
)
from onnxtrain.modes.train_eval import has_batch_statistics
from onnxtrain.targets import TARGETS, Target
from tests.artifacts.models import with_norm

_HEAD = '<ir_version: 10, opset_import: ["" : 21]>\n'
_NORM = """<float[2] s = {1.0, 2.0}, float[2] b = {0.5, 0.0}, float[2] m = {0.0, 1.0},
 float[2] v = {1.0, 4.0}, float r = {0.5}, bool t = {1}>"""


def opened(text: str) -> ir.Model:
    return load_normalized(onnx.parser.parse_model(_HEAD + text)).model


def kinds(model: ir.Model) -> list[str]:
    return [n.op_type for n in model.graph.all_nodes()]


def test_training_mode() -> None:
    model = opened(
        f"""g (float[N, 2] x) => (float[N, 2] y) {_NORM}
        {{ h = BatchNormalization(x, s, b, m, v)  d = Dropout(h, r)  y = Dropout(d, r, t) }}"""
    )
    assert to_training(model, trainable={"s"}) == [
        "BatchNormalization put into training mode: 1 node(s)",
        "Dropout put into training mode: 1 node(s)",
    ]
    assert to_training(model, trainable={"s"}) == []
    (norm,) = (n for n in model.graph if n.op_type == "BatchNormalization")
    assert norm.attributes["training_mode"].as_int() == 1


def test_frozen_norms_keep_their_statistics() -> None:
    model = opened(
        f"g (float[N, 2] x) => (float[N, 2] y) {_NORM} {{ y = BatchNormalization(x, s, b, m, v) }}"
    )
    assert to_training(model, trainable={"b"}) == []


def test_norms_inside_branches_keep_their_statistics() -> None:
    model = opened(
        f"""g (bool c, float[N, 2] x) => (float[N, 2] y) {_NORM} {{
            y = If (c) <
                then_branch = a () => (float[N, 2] p) {{ p = BatchNormalization(x, s, b, m, v) }},
                else_branch = e () => (float[N, 2] q) {{ q = Identity(x) }}
            >
        }}"""
    )
    (line,) = to_training(model, trainable={"s"})
    assert line == "BatchNormalization in a loop or branch left on its statistics: 1"


@pytest.mark.parametrize(
    "body",
    [
        "h, m2, v2 = BatchNormalization<training_mode=1>(x, s, b, m, v) y = Dropout(h, r, t)",
        "h = Dropout(x, r, t) y = BatchNormalization(h, s, b, m, v)",
        "d, k = Dropout(x, r, t) f = Cast<to=1>(k) y = BatchNormalization(f, s, b, m, v)",
    ],
)
def test_evaluation_mode(body: str) -> None:
    """Evaluation uses the running statistics and disables dropout."""
    model = opened(f"g (float[N, 2] x) => (float[N, 2] y) {_NORM} {{ {body} }}")
    assert to_evaluation(model)
    assert to_evaluation(model) == [] or "k" in body
    x = np.array([[1, 2], [3, 4]], np.float32)
    seen = np.ones_like(x) if "k" in body else x  # the mask of an idle Dropout is all true
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    expected = (seen - [0, 1]) / np.sqrt(np.array([1, 4]) + 1e-5) * [1, 2] + [0.5, 0]
    np.testing.assert_allclose(session.run(None, {"x": x})[0], expected, rtol=1e-5)


def test_statistics_as_model_outputs() -> None:
    """Outputs keep ONNX's running statistics; the trained ones use torch's unbiased variance."""
    model = with_norm(training=True)
    (norm,) = (n for n in model.graph.node if n.op_type == "BatchNormalization")
    for name in norm.output[1:]:
        value = model.graph.output.add()
        value.name = name
        value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
        value.type.tensor_type.shape.dim.add().dim_value = 4
    shown = list(norm.output[1:])
    artifacts = onnxtrain.build(
        model,
        loss=[onnxtrain.losses.LossTerm("mse", output="y")],
        optimizer="sgd",
        outputs=shown,
    )
    trainer = onnxtrain.Trainer(artifacts)
    x = np.random.default_rng(0).standard_normal((3, 4, 5)).astype(np.float32)
    result = trainer.step(x, np.zeros((3, 3), np.float32))
    mean, variance = (result.outputs[n] for n in shown)
    batch = x.transpose(1, 0, 2).reshape(4, -1)
    np.testing.assert_allclose(mean, 0.1 * batch.mean(1), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(variance, 0.9 + 0.1 * batch.var(1), rtol=1e-5)
    unbiased = 0.9 + 0.1 * batch.var(1, ddof=1)
    np.testing.assert_allclose(trainer.buffers["norm.running_var"], unbiased, rtol=1e-5)


def test_statistics_get_initializers_of_their_own() -> None:
    model = opened(
        "g (float[N, 2] x) => (float[N, 2] y)"
        "<float[2] one = {1.0, 1.0}, float[2] zero = {0.0, 0.0}>"
        "{ y = BatchNormalization(x, one, zero, zero, one) }"
    )
    assert unshare_running_statistics(model) == ["statistics stored apart from parameters: 2"]
    assert unshare_running_statistics(model) == []
    assert list(model.graph.initializers) == ["one", "zero", "one.running_mean", "one.running_var"]


def test_evaluation_mode_of_old_models() -> None:
    """Opset 13: five outputs mean training; the file keeps its opset."""
    text = f"""<ir_version: 7, opset_import: ["" : 13]>
    g (float[N, 2] x) => (float[N, 2] y) {_NORM} {{
        h, m2, v2, sm, sv = BatchNormalization(x, s, b, m, v)  d = Dropout(h, r, t)
        y = Mul(d, s)
    }}"""
    artifacts = onnxtrain.build(onnx.parser.parse_model(text), loss="mse", optimizer="sgd:lr=0.1")
    model = artifacts.models["infer"]
    assert [n.op_type for n in model.graph.node] == ["BatchNormalization", "Mul"]
    assert model.opset_import[0].version == 13
    trainer = onnxtrain.Trainer(artifacts)
    x = np.array([[1, 2], [3, 4]], np.float32)
    norm = (x - [0, 1]) / np.sqrt(np.array([1, 4]) + 1e-5) * [1, 2] + [0.5, 0]
    np.testing.assert_allclose(trainer.predict(x)["y"], norm * [1, 2], rtol=1e-5)
    trainer.step(x, x)
    np.testing.assert_allclose(trainer.buffers["m"], [0.2, 1.2], rtol=1e-5)


@pytest.mark.parametrize("target", TARGETS.values(), ids=list(TARGETS))
def test_gradient_rule_reads_the_batch_statistics_outputs(target: Target) -> None:
    model = load_normalized(with_norm()).model
    scales = {n.inputs[1].name for n in model.graph if n.op_type == "BatchNormalization"}
    to_training(model, trainable=scales)
    (node,) = (n for n in model.graph if n.op_type == "BatchNormalization")
    assert select_variant_name(target, node, STATISTICS_VARIANTS, STATISTICS_CHOICES) == "computed"
    running_statistics(model, OpBuilder(model.graph, "new/", target=target))
    put_out = target.prefers("batch-statistics-output")
    assert has_batch_statistics(node) == put_out
    form = select_variant_name(target, node, STATISTICS_VARIANTS, STATISTICS_CHOICES)
    assert form == ("outputs" if put_out else "computed")
