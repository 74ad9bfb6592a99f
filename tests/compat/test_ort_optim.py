"""onnxblock.optim: the old signature over sequences, and the flat form beside it."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from onnxtrain.compat.ort import onnxblock
from onnxtrain.compat.ort.api import CheckpointState, Module, Optimizer
from onnxtrain.compat.ort.models import flatten, optimizer_model, uses_sequences
from onnxtrain.manifest import WeightSpec
from tests.compat.models import WEIGHTS, batch, mlp

SHAPES = [(3, 2), (4,), ()]
RNG = np.random.default_rng(0)
PARAMS, GRADS, M1, M2 = (
    [np.asarray(RNG.standard_normal(s), np.float32) for s in SHAPES] for _ in range(4)
)
M2 = [np.asarray(np.abs(m)) for m in M2]
TENSORS = [ir.serde.serialize_tensor(ir.Tensor(p, name=f"p{i}")) for i, p in enumerate(PARAMS)]
LR, STEP = np.float32(0.01), 3


def clipped(grads, max_norm):
    norm = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in grads))
    return [g * min(1.0, max_norm / (norm + 1e-6)) for g in grads]


def adamw(grads, correct=True, decay=0.0, eps=1e-6, b1=0.9, b2=0.999):
    new, first, second = [], [], []
    for p, g, m, v in zip(PARAMS, grads, M1, M2, strict=True):
        p, g, m, v = (a.astype(np.float64) for a in (p, np.asarray(g), m, v))
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        rate = LR * np.sqrt(1 - b2**STEP) / (1 - b1**STEP) if correct else LR
        p = p - rate * m / (np.sqrt(v) + eps)
        new.append(p - LR * decay * p)
        first.append(m)
        second.append(v)
    return new, first, second


def sgd(grads):
    return [p - LR * g for p, g in zip(PARAMS, grads, strict=True)]


def feeds(*names):
    scalars = {"learning_rate": np.array([LR]), "step": np.array([STEP])}
    values = {"params": PARAMS, "gradients": GRADS}
    values |= {"first_order_moments": M1, "second_order_moments": M2}
    return {**scalars, **{n: values[n] for n in ("params", "gradients", *names)}}


def build(optimizer, opset=None):
    with onnxblock.empty_base(opset) as accessor:
        flag = optimizer((TENSORS, []))
        model = accessor.model
    onnx.checker.check_model(model, full_check=True)
    return model, flag


def close(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)
        assert np.shape(a) == np.shape(b)


CASES = {
    "default": ({}, {}, None),
    "decay": (
        {"weight_decay": 0.1, "bias_correction": False},
        {"decay": 0.1, "correct": False},
        None,
    ),
    "betas": ({"betas": (0.8, 0.9), "eps": 1e-3}, {"b1": 0.8, "b2": 0.9, "eps": 1e-3}, None),
    "clipped": ({}, {}, 0.5),
    "not clipped": ({}, {}, 1e3),
}


@pytest.mark.parametrize("opset", [None, 13])
@pytest.mark.parametrize("case", CASES)
def test_adamw_over_sequences(case, opset):
    settings, reference, norm = CASES[case]
    clip = None if norm is None else onnxblock.optim.ClipGradNorm(norm)
    model, flag = build(onnxblock.optim.AdamW(**settings, clip_grad=clip), opset)
    moments = ["first_order_moments", "second_order_moments"]
    assert [x.name for x in model.graph.input] == [
        "learning_rate",
        "step",
        "params",
        "gradients",
        *moments,
    ]
    session = ort.InferenceSession(model.SerializeToString())
    names = [y.name for y in session.get_outputs()]
    assert names == [flag, "params.out", *(f"{m}.out" for m in moments)]
    done, new, first, second = session.run(None, feeds(*moments))
    assert done.tolist() == [True]
    grads = GRADS if norm is None else clipped(GRADS, norm)
    for actual, expected in zip((new, first, second), adamw(grads, **reference), strict=True):
        close(actual, expected)


@pytest.mark.parametrize("norm", [None, 0.5])
def test_sgd_over_sequences(norm):
    clip = None if norm is None else onnxblock.optim.ClipGradNorm(norm)
    model, _ = build(onnxblock.optim.SGD(clip_grad=clip))
    session = ort.InferenceSession(model.SerializeToString())
    _, new = session.run(None, feeds("first_order_moments"))
    close(new, sgd(GRADS if norm is None else clipped(GRADS, norm)))


def test_an_optimizer_needs_parameters_and_an_opset_with_sequences_in_loops():
    with onnxblock.empty_base(), pytest.raises(IndexError, match="no trainable parameter"):
        onnxblock.optim.AdamW()(([], []))
    with onnxblock.empty_base(12), pytest.raises(RuntimeError, match="opset 13"):
        onnxblock.optim.AdamW()((TENSORS, []))


def flat_feeds(model):
    values = {"learning_rate": np.array([LR]), "step": np.array([STEP])}
    values["grad_scale"] = np.array([1.0], np.float32)
    for i, (p, g, m, v) in enumerate(zip(PARAMS, GRADS, M1, M2, strict=True)):
        values |= {f"p{i}": p, f"p{i}_grad": g, f"p{i}.exp_avg": m, f"p{i}.exp_avg_sq": v}
    return {x.name: values[x.name] for x in model.graph.input}


def weights():
    return [WeightSpec(t.name, "float32", tuple(t.dims)) for t in TENSORS]


@pytest.mark.parametrize("norm", [None, 0.5])
@pytest.mark.parametrize("opset", [13, 17, 21])
def test_flat_forms_compute_the_same(opset, norm):
    clip = None if norm is None else onnxblock.optim.ClipGradNorm(norm)
    block = onnxblock.optim.AdamW(weight_decay=0.1, clip_grad=clip)
    sequences, _ = build(block, opset)
    assert uses_sequences(sequences)
    direct, spec, _ = optimizer_model(block.settings, norm, weights(), opset)
    wrapped = flatten(sequences, weights())
    results = []
    for model in (direct, wrapped):
        assert not uses_sequences(model)
        assert model.opset_import[0].version == opset
        assert {x.name for x in model.graph.input} == {t.name for t in spec.inputs}
        session = ort.InferenceSession(model.SerializeToString())
        names = [y.name for y in session.get_outputs()]
        results.append(dict(zip(names, session.run(None, flat_feeds(model)), strict=True)))
    assert results[0].keys() == results[1].keys()
    for name, array in results[0].items():
        np.testing.assert_allclose(array, results[1][name], rtol=1e-5, atol=1e-6)
    new, _, second = adamw(GRADS if norm is None else clipped(GRADS, norm), decay=0.1)
    close([results[0][f"p{i}.out"] for i in range(3)], new)
    close([results[0][f"p{i}.exp_avg_sq.out"] for i in range(3)], second)


def test_an_optimizer_model_over_sequences_can_be_loaded(tmp_path):
    class Loss(onnxblock.TrainingBlock):
        def build(self, name):
            return onnxblock.loss.CrossEntropyLoss()(name)

    block = Loss()
    for name in WEIGHTS:
        block.requires_grad(name)
    with onnxblock.base(mlp()):
        block("output")
    optimizer = onnxblock.optim.SGD()
    with onnxblock.empty_base():
        optimizer(block.parameters())
    training, _ = block.to_model_proto()
    onnx.save(training, tmp_path / "training_model.onnx")
    onnx.save(optimizer.to_model_proto(), tmp_path / "optimizer_model.onnx")
    onnxblock.save_checkpoint(block.parameters(), tmp_path / "checkpoint")

    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state)
    update = Optimizer(tmp_path / "optimizer_model.onnx", module)
    update.set_learning_rate(0.5)
    module(*batch())
    expected = {n: p.data - 0.5 * p.grad for n, p in state.parameters}
    update.step()
    for name, array in expected.items():
        np.testing.assert_allclose(state.parameters[name].data, array, rtol=1e-5, atol=1e-6)
