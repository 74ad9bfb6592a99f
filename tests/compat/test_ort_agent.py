"""The old forward and backward calls, over two models on stock onnxruntime."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

import onnxtrain
from onnxtrain import vjp
from onnxtrain.compat.ort.agent import OrtValueCache, PartialGraphExecutionState, TrainingAgent
from onnxtrain.compat.ort.graph_builder import (
    GradientGraphBuilder,
    OrtModuleGraphBuilder,
    OrtModuleGraphBuilderConfiguration,
    TrainingGraphTransformerConfiguration,
)
from onnxtrain.errors import CompatError
from onnxtrain.examples import digits_data, digits_model

from .models import WEIGHTS, arrays_of, batch, mlp, model_of, two_outputs

ROOT = Path(__file__).resolve().parents[2]
OrtValueVector: Any = importlib.import_module("onnxruntime.capi._pybind_state").OrtValueVector


def built(model, weights=None, train=None, inputs=()):
    config = OrtModuleGraphBuilderConfiguration()
    config.initializer_names = list(arrays_of(model)) if weights is None else weights
    config.initializer_names_to_train = config.initializer_names if train is None else train
    config.input_names_require_grad = list(inputs)
    config.build_gradient_graph = True
    config.graph_transformer_config = TrainingGraphTransformerConfiguration()
    builder = OrtModuleGraphBuilder()
    builder.initialize(model.SerializeToString(), config)
    builder.build()
    return builder


def agent_of(builder) -> TrainingAgent:
    session = onnxruntime.InferenceSession(builder.get_gradient_model())
    feeds = [x.name for x in session.get_inputs()]
    fetches = [y.name for y in session.get_outputs()]
    return TrainingAgent(session._sess, feeds, [], fetches, [])


def expected(model, wrt, feeds, grads):
    """Return outputs and gradients of one call of the joint model."""
    session = onnxruntime.InferenceSession(vjp(model, wrt).SerializeToString())
    names = [x.name for x in session.get_inputs()]
    feeds_by_name = dict(zip(names, [*feeds, *grads], strict=True))
    return [np.asarray(y) for y in session.run(None, feeds_by_name)]


def numbers(values) -> list[np.ndarray]:
    return [values[i].numpy() for i in range(len(values))]


def test_passes_equal_the_joint_model():
    model = mlp()
    builder, weights = built(model, inputs=["input"]), list(arrays_of(model).values())
    info = builder.get_graph_info()
    assert info.user_input_names == ["input"]
    assert info.user_input_grad_names == {"input": "input_grad"}
    assert info.initializer_names == WEIGHTS
    assert info.initializer_grad_names_to_train == [f"{n}_grad" for n in WEIGHTS]
    assert info.user_output_names == ["output"]
    assert info.module_output_gradient_name == ["output_grad"]
    agent = agent_of(builder)
    x, _ = batch()
    grad = np.random.default_rng(0).standard_normal((8, 3)).astype(np.float32)
    outputs, grads, state = [], [], PartialGraphExecutionState()
    agent.run_forward([x, *weights], outputs, state, OrtValueCache())
    agent.run_backward([grad], grads, state)
    wanted = expected(model, ["input", *WEIGHTS], [x, *weights], [grad])
    for got, want in zip([*numbers(outputs), *numbers(grads)], wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_several_forwards_before_their_backwards():
    """Passes end in another order than they began; weights change in between, in place."""
    model = mlp()
    agent, weights = agent_of(built(model)), [w.copy() for w in arrays_of(model).values()]
    rng, states, wanted = np.random.default_rng(1), [], []
    for size in (3, 5, 2):
        x, grad = (rng.standard_normal((size, n)).astype(np.float32) for n in (6, 3))
        state = PartialGraphExecutionState()
        agent.run_forward([x, *weights], [], state)
        states.append((state, grad))
        wanted.append(expected(model, WEIGHTS, [x, *weights], [grad])[1:])
        for w in weights:
            w *= 1.5
    for i in (1, 0, 2):
        state, grad = states[i]
        grads: list = []
        agent.run_backward([grad], grads, state)
        for got, want in zip(numbers(grads), wanted[i], strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_values_and_vectors_of_onnxruntime():
    model = mlp()
    agent, x = agent_of(built(model)), batch()[0]
    arrays = [x, *arrays_of(model).values()]
    values = [onnxruntime.OrtValue.ortvalue_from_numpy(a) for a in arrays]
    feeds, fetches, grads = OrtValueVector(), OrtValueVector(), OrtValueVector()
    for value in values:
        feeds.push_back(value._ortvalue)
    state = PartialGraphExecutionState()
    agent.run_forward(feeds, fetches, state)
    grad = OrtValueVector()
    grad.push_back(fetches[0])
    agent.run_backward(grad, grads, state)
    wanted = expected(model, WEIGHTS, arrays, [fetches[0].numpy()])
    for got, want in zip([*numbers(fetches), *numbers(grads)], wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [OrtValueVector, list])
def test_vectors_are_overwritten(kind):
    """Programs pass the same vectors in every step and read element 0."""
    model = mlp()
    agent, weights = agent_of(built(model)), list(arrays_of(model).values())
    rng, outputs, grads = np.random.default_rng(3), kind(), kind()
    for _ in range(3):
        x, grad = (rng.standard_normal((4, n)).astype(np.float32) for n in (6, 3))
        state = PartialGraphExecutionState()
        agent.run_forward([x, *weights], outputs, state)
        agent.run_backward([grad], grads, state)
        wanted = expected(model, WEIGHTS, [x, *weights], [grad])
        for got, want in zip([*numbers(outputs), *numbers(grads)], wanted, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_overwritten_outputs_do_not_change_earlier_passes():
    """Backward of a Sigmoid reads its output, which the vector holds, too."""
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]>
        g (float[N, 2] x) => (float[N, 2] y) <float[2] w = {1, 2}> { a = Mul(x, w) y = Sigmoid(a) }
        """
    )
    agent, w, outputs = agent_of(built(model)), np.array([1, 2], np.float32), OrtValueVector()
    rows = [np.full((1, 2), v, np.float32) for v in (0.5, -2.0)]
    states = [PartialGraphExecutionState() for _ in rows]
    for x, state in zip(rows, states, strict=True):
        agent.run_forward([x, w], outputs, state)
    for x, state in zip(rows, states, strict=True):
        grads: list = []
        agent.run_backward([np.ones((1, 2), np.float32)], grads, state)
        y = 1 / (1 + np.exp(-x * w))
        np.testing.assert_allclose(grads[0].numpy(), (y * (1 - y) * x)[0], rtol=1e-5)


def test_a_vector_of_another_shape_is_named():
    model = mlp()
    agent, weights = agent_of(built(model)), list(arrays_of(model).values())
    outputs = OrtValueVector()
    agent.run_forward(
        [np.zeros((4, 6), np.float32), *weights], outputs, PartialGraphExecutionState()
    )
    with pytest.raises(
        CompatError, match=r"\[4, 3\]; the results are .*\[2, 3\]\nhint: pass a new"
    ):
        agent.run_forward(
            [np.zeros((2, 6), np.float32), *weights], outputs, PartialGraphExecutionState()
        )


def test_shapes_that_differ_in_dimensions_of_1():
    """skl2onnx stores an intercept as [1, 3] where scikit-learn has [3]; labels come in one row."""
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]>
        g (float[N, 2] x) => (float[N, 3] y)
        <float[1, 3] b = {1, 2, 3}, float[2, 3] w = {1, 2, 3, 4, 5, 6}>
        { a = MatMul(x, w) y = Add(a, b) }
        """
    )
    agent, (b, w) = agent_of(built(model)), arrays_of(model).values()
    x, grad = np.ones((4, 2), np.float32), np.arange(12, dtype=np.float32)
    for shape in ((4, 3), (12,), (1, 12)):
        outputs, grads, state = [], [], PartialGraphExecutionState()
        agent.run_forward([x, b[0], w], outputs, state)
        agent.run_backward([grad.reshape(shape)], grads, state)
        np.testing.assert_array_equal(outputs[0].numpy(), x @ w + b)
        np.testing.assert_array_equal(grads[0].numpy(), grad.reshape(4, 3).sum(0))
        np.testing.assert_array_equal(grads[1].numpy(), x.T @ grad.reshape(4, 3))
    state = PartialGraphExecutionState()
    agent.run_forward([x, b, w], [], state)
    with pytest.raises(CompatError, match=r"'y_grad' has shape \[3, 4\]\nhint: .* \[4, 3\]"):
        agent.run_backward([grad.reshape(3, 4)], [], state)
    with pytest.raises(CompatError, match=r"'w' has shape \[6\]"):
        agent.run_forward([x, b, w.ravel()], [], state)


def test_frozen_weights_are_inputs_and_fetches_choose():
    model = two_outputs()
    names = list(arrays_of(model))
    builder = built(model, train=["weight3", "bias1"])
    info = builder.get_graph_info()
    assert info.module_output_gradient_name == ["output1_grad", "output2_grad"]
    session = onnxruntime.InferenceSession(builder.get_gradient_model())
    assert [x.name for x in session.get_inputs()] == ["input", *names]
    agent = TrainingAgent(session, ["input", *names], bw_fetches_names=["weight3_grad"])
    rng = np.random.default_rng(2)
    x = rng.standard_normal((2, 4)).astype(np.float32)
    grads = [rng.standard_normal((2, n)).astype(np.float32) for n in (3, 2)]
    outputs, got, state = [], [], PartialGraphExecutionState()
    agent.run_forward([x, *arrays_of(model).values()], outputs, state)
    agent.run_backward(grads, got, state)
    weight = arrays_of(model)["weight3"]
    *own, want = expected(model, ["weight3"], [x, weight], grads)
    for a, b in zip([*numbers(outputs), *numbers(got)], [*own, want], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_models_run_by_themselves():
    """The gradient model gives gradients of the sum of outputs, the forward model its outputs."""
    model = mlp()
    builder, weights = built(model), arrays_of(model)
    x, _ = batch()
    ones = np.ones((8, 3), np.float32)
    want = expected(model, WEIGHTS, [x, *weights.values()], [ones])
    alone = onnxruntime.InferenceSession(builder.get_gradient_model())
    forward = onnxruntime.InferenceSession(builder.get_inference_optimized_model())
    feeds = {"input": x, **weights}
    for a, b in zip([*forward.run(None, feeds), *alone.run(None, feeds)], want, strict=True):
        np.testing.assert_allclose(np.asarray(a), b, rtol=1e-5, atol=1e-6)


def test_wrong_use_is_named():
    model = mlp()
    agent, weights = agent_of(built(model)), list(arrays_of(model).values())
    x, state = batch()[0], PartialGraphExecutionState()
    grad = np.ones((8, 3), np.float32)
    with pytest.raises(CompatError, match="holds no forward pass"):
        agent.run_backward([grad], [], state)
    with pytest.raises(RuntimeError, match=r"got 4 values, expected 5(?s:.)*input, fc1\.weight"):
        agent.run_forward(weights, [], state)
    with pytest.raises(CompatError, match=r"'input' is tensor\(double\) \[8, 6\]"):
        agent.run_forward([x.astype(np.float64), *weights], [], state)
    with pytest.raises(CompatError, match=r"'input' has shape \[8, 5\]"):
        agent.run_forward([x[:, :5], *weights], [], state)
    with pytest.raises(TypeError, match="expected an OrtValue or an array, got str"):
        agent.run_forward(["x", *weights], [], state)
    agent.run_forward([x, *weights], [], state)
    with pytest.raises(CompatError, match="got 2 values, expected 1"):
        agent.run_backward([grad, grad], [], state)
    with pytest.raises(CompatError, match=r"backward(?s:.)*'output_grad' is tensor\(int64\)"):
        agent.run_backward([grad.astype(np.int64)], [], state)
    with pytest.raises(CompatError, match="belongs to another agent"):
        agent_of(built(model)).run_backward([grad], [], state)
    agent.run_backward([grad], [], state)
    with pytest.raises(CompatError, match="holds no forward pass"):
        agent.run_backward([grad], [], state)


def test_wrong_builds_are_named():
    model = mlp()
    builder = OrtModuleGraphBuilder()
    with pytest.raises(CompatError, match="has no model"):
        builder.build()
    with pytest.raises(CompatError, match=r"unknown initializer: fc9\.weight"):
        built(model, ["fc9.weight"])
    with pytest.raises(CompatError, match=r"to_train has fc1\.bias"):
        built(model, ["fc1.weight"], ["fc1.bias"])
    with pytest.raises(CompatError, match="unknown input: image"):
        built(model, inputs=["image"])
    builder.initialize(model.SerializeToString(), OrtModuleGraphBuilderConfiguration())
    with pytest.raises(CompatError, match="no gradient graph"):
        builder.get_gradient_model()
    plain = onnxruntime.InferenceSession(model.SerializeToString())
    with pytest.raises(CompatError, match="has no backward pass"):
        TrainingAgent(plain, ["input"])
    session = onnxruntime.InferenceSession(built(model).get_gradient_model())
    with pytest.raises(CompatError, match="the model has input"):
        TrainingAgent(session, ["input"])
    with pytest.raises(CompatError, match="unknown gradient: x"):
        TrainingAgent(session, ["input", *WEIGHTS], bw_fetches_names=["x"])


def test_the_page_gives_right_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "coming-from-onnxruntime-training.md").read_text()
    section = page.partition("## Forward and backward as two calls")[2]
    (block,) = re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    model = digits_model("model.onnx", hidden=8)
    scope: dict = {"onnx": onnx, "onnxtrain": onnxtrain, "digits": digits_data(16)}
    exec(compile(block, "coming-from", "exec"), scope)
    grad = 2 * scope["outputs"][0].numpy()
    names = list(scope["weights"])
    want = expected(model, names, [scope["features"], *scope["weights"].values()], [grad])
    for got, value in zip(numbers(scope["gradients"]), want[1:], strict=True):
        np.testing.assert_allclose(got, value, rtol=1e-5, atol=1e-6)


def test_cache():
    cache = OrtValueCache()
    cache.insert("a", 1)
    cache.insert("a", 2)
    assert (cache.keys(), cache.count("a"), cache.count("b")) == (["a"], 1, 0)
    with pytest.raises(RuntimeError, match="NodeArg not found in cache: b"):
        cache.remove("b")
    cache.remove("a")
    cache.insert("c", 3)
    cache.clear()
    assert cache.keys() == []


def test_gradient_graph_builder(tmp_path: Path) -> None:
    """One model of outputs and gradients: f = sum((x W)^2) has gradient 2 x^T x W."""

    def build(op, x, weight):
        y = op.MatMul(x, weight)
        return {"scores": y, "loss": op.ReduceSum(op.Mul(y, y), keepdims=0)}

    model = model_of({"x": ["batch", 2]}, {"weight": [2, 3]}, build)
    builder = GradientGraphBuilder(model.SerializeToString(), {"loss"}, {"weight"}, "loss")
    assert [y.name for y in onnx.load_from_string(builder.get_model()).graph.output] == [
        "scores",
        "loss",
    ]
    builder.build()
    builder.save(str(tmp_path / "gradient.onnx"))
    session = onnxruntime.InferenceSession(tmp_path / "gradient.onnx")
    assert [y.name for y in session.get_outputs()] == ["scores", "loss", "weight_grad"]
    x, weight = np.ones((4, 2), np.float32), arrays_of(model)["weight"]
    gradient = np.asarray(session.run(["weight_grad"], {"x": x, "weight": weight})[0])
    np.testing.assert_allclose(gradient, 2 * x.T @ x @ weight, rtol=1e-6)
    with pytest.raises(CompatError, match="unknown input or initializer: wight"):
        GradientGraphBuilder(model.SerializeToString(), {"loss"}, {"wight"}, "loss")
    with pytest.raises(CompatError, match=r"onnxtrain\.vjp"):
        GradientGraphBuilder(model.SerializeToString(), {"loss", "scores"}, {"weight"}, "loss")
