"""The oldest API: every run of a session is a training step."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest

from onnxtrain import grad
from onnxtrain.compat.onnxcustom import add_loss_output
from onnxtrain.compat.ort.training_session import TrainingParameters, TrainingSession
from onnxtrain.errors import CompatError

from .models import WEIGHTS, arrays_of, batch, mlp

RATE = np.array([0.01], np.float32)


def settings(**given) -> TrainingParameters:
    parameters = TrainingParameters()
    parameters.loss_output_name = "loss"
    parameters.training_optimizer_name = "SGDOptimizer"
    for name, value in given.items():
        assert hasattr(parameters, name)
        setattr(parameters, name, value)
    return parameters


@pytest.fixture(scope="module")
def model():
    return add_loss_output(mlp(classes=1))


def data():
    x, _ = batch()
    return {"input": x, "label": x[:, :1] * 2, "Learning_Rate": RATE}


def test_sgd_takes_the_steps_of_the_gradient(model, tmp_path):
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    session = TrainingSession(str(path), settings(weights_to_train=set(WEIGHTS)))
    assert [x.name for x in session.get_inputs()] == ["input", "label", "Learning_Rate"]
    assert [(y.name, y.shape) for y in session.get_outputs()] == [
        ("loss", [1, 1]),
        ("output", ["batch", 1]),
    ]
    weights = {n: w.copy() for n, w in arrays_of(model).items() if n in WEIGHTS}
    grads = onnxruntime.InferenceSession(
        grad(add_scalar(model), WEIGHTS, "total").SerializeToString()
    )
    feeds = {n: v for n, v in data().items() if n != "Learning_Rate"}
    for _ in range(3):
        names = ["total", "output", *(f"{n}_grad" for n in WEIGHTS)]
        want = dict(zip(names, grads.run(names, {**feeds, **weights}), strict=True))
        loss, output = session.run(["loss", "output"], data())
        assert loss.shape == (1, 1)
        np.testing.assert_allclose(loss.item(), want["total"], rtol=1e-5)
        np.testing.assert_allclose(output, want["output"], rtol=1e-5, atol=1e-6)
        weights = {n: w - 0.01 * want[f"{n}_grad"] for n, w in weights.items()}
    state = session.get_state()
    assert set(state) == set(WEIGHTS)
    for name, want in weights.items():
        np.testing.assert_allclose(state[name], want, rtol=1e-4, atol=1e-6)


def add_scalar(model):
    """Return the model with its loss also as a scalar."""
    import onnx_ir as ir

    from onnxtrain.graph.builder import OpBuilder

    work = ir.from_proto(model)
    total = OpBuilder(work.graph).ReduceSum(work.graph.outputs[0], keepdims=0)
    total.name, total.shape = "total", ir.Shape([])
    work.graph.outputs.append(total)
    return ir.to_proto(work)


def test_state_goes_on_elsewhere(model):
    attributes = {n: {"alpha": 0.8, "epsilon": 1e-7} for n in WEIGHTS}
    parameters = settings(
        training_optimizer_name="AdamOptimizer",
        optimizer_attributes_map=attributes,
        optimizer_int_attributes_map={n: {"do_bias_correction": 1} for n in WEIGHTS},
        weights_to_train=WEIGHTS,
    )
    first, second = (TrainingSession(model.SerializeToString(), parameters) for _ in range(2))
    for _ in range(3):
        first.run(None, data())
    state = first.get_state()
    assert {"Moment_1_fc1.weight", "Moment_2_fc2.bias", "Update_Count_fc1.bias"} < set(state)
    second.load_state(state, strict=True)
    for _ in range(2):
        np.testing.assert_array_equal(first.run(["loss"], data()), second.run(["loss"], data()))
    with pytest.raises(
        CompatError, match=r"missing or unknown names in the state: Moment_1_fc1\.bias"
    ):
        second.load_state({n: state[n] for n in WEIGHTS}, strict=True)
    with pytest.raises(RuntimeError, match=r"fc1\.bias"):
        second.load_state({"fc1.bias": np.zeros(9, np.float32)})


def test_weights_that_stay(model):
    session = TrainingSession(
        model.SerializeToString(), settings(weights_not_to_train=["fc1.weight"])
    )
    session.run(None, data())
    assert set(session.get_state()) == set(WEIGHTS) - {"fc1.weight"}
    assert session.is_output_fp32_node("loss")


def test_wrong_use_is_named(model):
    source = model.SerializeToString()
    with pytest.raises(CompatError, match="loss_output_name='cost'"):
        TrainingSession(source, settings(loss_output_name="cost"))
    with pytest.raises(CompatError, match="more than one element"):
        TrainingSession(source, settings(loss_output_name="output"))
    with pytest.raises(CompatError, match="unknown weight: w"):
        TrainingSession(source, settings(weights_to_train={"w"}))
    with pytest.raises(CompatError, match="unknown optimizer: 'Adam'"):
        TrainingSession(source, settings(training_optimizer_name="Adam"))
    with pytest.raises(CompatError, match="is empty"):
        TrainingSession(source, settings(training_optimizer_name=""))
    with pytest.raises(CompatError, match="one process only, got world_size"):
        TrainingSession(source, settings(world_size=2))
    with pytest.raises(CompatError, match="in float32"):
        TrainingSession(source, settings(use_mixed_precision=True))
    with pytest.raises(CompatError, match="does not return gradients"):
        TrainingSession(source, settings(set_gradients_as_graph_outputs=True))
    with pytest.raises(TypeError, match="Unable to load from type"):
        TrainingSession(model, settings())
    session = TrainingSession(source, settings())
    feeds = data()
    with pytest.raises(CompatError, match="missing inputs: Learning_Rate"):
        session.run(None, {n: feeds[n] for n in ("input", "label")})
    with pytest.raises(CompatError, match=r"'input' is tensor\(double\)"):
        session.run(None, {**feeds, "input": feeds["input"].astype(np.float64)})
    with pytest.raises(CompatError, match="unknown output: y"):
        session.run(["y"], feeds)
    with pytest.raises(CompatError, match="unknown input: z"):
        session.run(None, {**feeds, "z": RATE})
