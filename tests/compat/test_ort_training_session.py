"""The oldest API: every run of a session is a training step."""

from __future__ import annotations

import importlib
from typing import Any

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
        arrays = [np.asarray(y) for y in grads.run(names, {**feeds, **weights})]
        want = dict(zip(names, arrays, strict=True))
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


def test_bindings_of_onnxruntime(model):
    """Inputs by value and by pointer, outputs to the host and into a value."""
    native: Any = importlib.import_module("onnxruntime.capi._pybind_state")
    cpu = native.OrtDevice(native.OrtDevice.cpu(), native.OrtDevice.default_memory(), 0)
    first, second = (TrainingSession(model.SerializeToString(), settings()) for _ in range(2))
    bind, x = second.io_binding()._iobinding, data()["input"]
    assert isinstance(bind, native.SessionIOBinding)
    values = {n: onnxruntime.OrtValue.ortvalue_from_numpy(v) for n, v in data().items()}
    predicted = onnxruntime.OrtValue.ortvalue_from_shape_and_type([len(x), 1], np.float32)
    for name, value in values.items():
        bind.bind_ortvalue_input(name, value._ortvalue)
    bind.bind_output("loss", cpu)
    bind.bind_ortvalue_output("output", predicted._ortvalue)
    for half in (False, True, True):
        feeds = data()
        if half:
            feeds = {**feeds, "input": x[:4], "label": feeds["label"][:4]}
            for name in ("input", "label"):
                array = feeds[name] = np.ascontiguousarray(feeds[name])
                bind.bind_input(name, cpu, array.dtype, array.shape, array.ctypes.data)
            bind.clear_binding_outputs()
            bind.bind_output("loss", cpu)
        second._sess.run_with_iobinding(bind, None)
        loss, output = first.run(None, feeds)
        np.testing.assert_array_equal(bind.get_outputs()[0].numpy(), loss)
        np.testing.assert_array_equal(bind.copy_outputs_to_cpu()[0], loss)
        if not half:
            np.testing.assert_array_equal(predicted.numpy(), output)
    for name, value in first.get_state().items():
        np.testing.assert_array_equal(second.get_state()[name], value)
    binding = second.io_binding()
    binding.bind_cpu_input("input", x)
    binding.bind_output("loss")
    with pytest.raises(RuntimeError, match=r"missing inputs: label, Learning_Rate\nhint: bind"):
        second.run_with_iobinding(binding)
    bind.clear_binding_inputs()
    with pytest.raises(RuntimeError, match="missing inputs: input"):
        second.run_with_iobinding(bind)
    with pytest.raises(RuntimeError, match="cannot go to a pointer"):
        bind.bind_output("loss", cpu, np.float32, [1, 1], x.ctypes.data)


def test_a_loss_declared_as_a_scalar_may_have_dimensions(model):
    """onnxcustom's pages declare ``[]`` for a ReduceSum that keeps its dimensions."""
    declared = type(model)()
    declared.CopyFrom(model)
    del declared.graph.output[0].type.tensor_type.shape.dim[:]
    first, second = (TrainingSession(m.SerializeToString(), settings()) for m in (model, declared))
    assert [y.shape for y in second.get_outputs()] == [[], ["batch", 1]]
    for _ in range(2):
        got, want = second.run(["loss"], data())[0], first.run(["loss"], data())[0]
        np.testing.assert_array_equal(got, want, strict=True)
        assert got.shape == (1, 1)


def test_graphs_are_saved_on_request(model, tmp_path):
    paths = [str(tmp_path / name) for name in ("gradient.onnx", "training.onnx")]
    given = dict(zip(("gradient", "training"), paths, strict=True))
    given = {f"model_with_{n}_graph_path": path for n, path in given.items()}
    TrainingSession(model.SerializeToString(), settings(**given))
    gradient, step = (onnxruntime.InferenceSession(path) for path in paths)
    assert {"learning_rate", "fc1.weight"} < {x.name for x in step.get_inputs()}
    assert "fc1.weight.out" in {y.name for y in step.get_outputs()}
    assert "learning_rate" not in {x.name for x in gradient.get_inputs()}


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
