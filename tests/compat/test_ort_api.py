"""CheckpointState, Module, Optimizer: steps, gradients, buffers, export, nominal checkpoints."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch

from onnxtrain.compat.ort import artifacts
from onnxtrain.compat.ort.api import CheckpointState, Module, Optimizer
from tests.compat.models import WEIGHTS, arrays_of, batch, mlp, model_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Artifacts of the small network with SGD; the last bias is frozen."""
    path = tmp_path_factory.mktemp("artifacts")
    artifacts.generate_artifacts(
        mlp(),
        requires_grad=WEIGHTS[:3],
        frozen_params=WEIGHTS[3:],
        artifact_directory=path,
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.SGD,
        nominal_checkpoint=True,
    )
    return path


@pytest.fixture
def state(folder):
    return CheckpointState.load_checkpoint(folder / "checkpoint")


@pytest.fixture
def module(folder, state):
    return Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")


class Torch:
    """The same network in torch."""

    def __init__(self):
        self.w = {n: torch.tensor(a, requires_grad=True) for n, a in arrays_of(mlp()).items()}

    def loss(self, x, labels):
        w = self.w
        hidden = torch.relu(torch.tensor(x) @ w["fc1.weight"].T + w["fc1.bias"])
        out = hidden @ w["fc2.weight"].T + w["fc2.bias"]
        return torch.nn.functional.cross_entropy(out, torch.tensor(labels))


def test_steps_follow_torch(folder, module, state):
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(0.5)
    reference = Torch()
    sgd = torch.optim.SGD([reference.w[n] for n in WEIGHTS[:3]], lr=0.5)
    for seed in range(20):
        x, labels = batch(seed=seed)
        loss = reference.loss(x, labels)
        np.testing.assert_allclose(module(x, labels), loss.item(), rtol=1e-5)
        sgd.zero_grad()
        loss.backward()
        for name in WEIGHTS[:3]:
            np.testing.assert_allclose(
                state.parameters[name].grad, reference.w[name].grad, rtol=1e-4, atol=1e-6
            )
        optimizer.step()
        sgd.step()
        module.lazy_reset_grad()
    module.eval()
    np.testing.assert_allclose(module(x, labels), reference.loss(x, labels).item(), rtol=1e-5)
    np.testing.assert_array_equal(state.parameters["fc2.bias"].data, arrays_of(mlp())["fc2.bias"])


def test_gradients_sum_until_they_are_reset(module, state):
    first, second = batch(seed=1), batch(seed=2)

    def gradient():
        return state.parameters["fc2.weight"].grad

    assert not gradient().any()
    module(*first)
    one = gradient()
    module(*second)
    both = gradient()
    module.lazy_reset_grad()
    np.testing.assert_array_equal(gradient(), both)
    module(*second)
    np.testing.assert_allclose(gradient() + one, both, rtol=1e-5, atol=1e-7)
    assert state.parameters["fc2.bias"].grad is None


def test_arrays_or_ort_values(module):
    x, labels = batch()
    values = [ort.OrtValue.ortvalue_from_numpy(a) for a in (x, labels)]
    for mode in (True, False):
        module.train(mode)
        result = module(*values)
        assert isinstance(result, ort.OrtValue)
        np.testing.assert_array_equal(result.numpy(), module(x, labels))
        assert isinstance(module(x, labels), np.ndarray)
    np.testing.assert_array_equal(module(x, values[1]), module(x, labels))


def test_modes_and_names(module):
    assert module.training
    assert module.eval() is module
    assert not module.training
    assert module.train() is module
    assert module.input_names() == ["input", "labels"]
    assert module.output_names() == ["loss"]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((), "got 0 inputs, the model has 2: input, labels"),
        ((np.zeros((2, 6), np.float32), None), "labels"),
        ((np.zeros((2, 5), np.float32), np.zeros(2, np.int64)), "input"),
        ((np.zeros((2, 6)), np.zeros(2, np.int64)), "input"),
    ],
)
def test_wrong_inputs_are_runtime_errors(module, inputs, message):
    with pytest.raises(RuntimeError, match=message):
        module(*inputs)


def test_parameters_behave_like_a_dictionary(state):
    parameters = state.parameters
    assert len(parameters) == 4
    assert [name for name, _ in parameters] == sorted(WEIGHTS)
    assert "fc1.weight" in parameters
    assert "fc3.weight" not in parameters
    assert "fc1.bias" in repr(parameters)
    with pytest.raises(KeyError, match="fc3"):
        parameters["fc3.weight"]
    with pytest.raises(KeyError, match="fc3"):
        parameters["fc3.weight"] = np.zeros(1)
    p = parameters["fc1.bias"]
    assert repr(p) == "Parameter(name=fc1.bias, requires_grad=True)"
    parameters["fc1.bias"] = np.arange(4, dtype=np.float32)
    np.testing.assert_array_equal(p.data, [0, 1, 2, 3])
    for wrong in (np.zeros(3, np.float32), np.zeros(4)):
        with pytest.raises(RuntimeError, match="mismatch"):
            p.data = wrong
    with pytest.raises(TypeError, match="Invalid argument"):
        CheckpointState("checkpoint")


def test_properties_behave_like_a_dictionary(state, tmp_path):
    properties = state.properties
    properties["b"] = 3
    properties["a"] = 0.1
    properties["c"] = "text"
    properties["d"] = True
    assert list(properties) == [("a", float(np.float32(0.1))), ("b", 3), ("c", "text"), ("d", 1)]
    assert repr(properties) == "Properties(a, b, c, d)"
    with pytest.raises(TypeError, match="list"):
        properties["e"] = [1]
    with pytest.raises(KeyError, match="e"):
        properties["e"]
    CheckpointState.save_checkpoint(state, tmp_path / "saved")
    assert list(CheckpointState.load_checkpoint(tmp_path / "saved").properties) == list(properties)


def test_a_resumed_run_continues_exactly(tmp_path):
    artifacts.generate_artifacts(
        mlp(),
        requires_grad=WEIGHTS,
        artifact_directory=tmp_path,
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.AdamW,
    )

    def start(checkpoint):
        state = CheckpointState.load_checkpoint(tmp_path / checkpoint)
        module = Module(tmp_path / "training_model.onnx", state)
        return state, module, Optimizer(tmp_path / "optimizer_model.onnx", module)

    def train(module, optimizer, seeds):
        for seed in seeds:
            module.lazy_reset_grad()
            module(*batch(seed=seed))
            optimizer.step()

    whole, module, optimizer = start("checkpoint")
    train(module, optimizer, range(6))
    first, module, optimizer = start("checkpoint")
    train(module, optimizer, range(3))
    CheckpointState.save_checkpoint(first, tmp_path / "saved", include_optimizer_state=True)
    resumed, module, optimizer = start("saved")
    train(module, optimizer, range(3, 6))
    for name, parameter in whole.parameters:
        np.testing.assert_array_equal(parameter.data, resumed.parameters[name].data)


def test_contiguous_parameters(module, state):
    assert module.get_parameters_size() == 6 * 4 + 4 + 4 * 3
    assert module.get_parameters_size(trainable_only=False) == 6 * 4 + 4 + 4 * 3 + 3
    flat = module.get_contiguous_parameters().numpy()
    expected = np.concatenate([state.parameters[n].data.reshape(-1) for n in WEIGHTS])
    np.testing.assert_array_equal(flat, expected)
    part = module.get_contiguous_parameters(trainable_only=True)
    module.copy_buffer_to_parameters(ort.OrtValue.ortvalue_from_numpy(part.numpy() * 2))
    np.testing.assert_array_equal(
        state.parameters["fc1.weight"].data.reshape(-1), part.numpy()[:24] * 2
    )
    module.copy_buffer_to_parameters(flat, trainable_only=False)
    np.testing.assert_array_equal(module.get_contiguous_parameters().numpy(), flat)
    for wrong in (flat[:-1], flat.astype(np.float64)):
        with pytest.raises(RuntimeError, match="elements of"):
            module.copy_buffer_to_parameters(wrong, trainable_only=False)


def test_export_has_the_trained_weights_and_no_labels(folder, module, state, tmp_path):
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    module(*batch())
    optimizer.step()
    module.export_model_for_inferencing(tmp_path / "model.onnx", ["output", "hidden"])
    model = onnx.load(tmp_path / "model.onnx")
    onnx.checker.check_model(model, full_check=True)
    assert [x.name for x in model.graph.input] == ["input"]
    assert model.opset_import[0].version == mlp().opset_import[0].version
    assert not model.metadata_props
    np.testing.assert_array_equal(
        arrays_of(model)["fc1.weight"], state.parameters["fc1.weight"].data
    )
    x, _ = batch()
    output, hidden = ort.InferenceSession(model.SerializeToString()).run(None, {"input": x})
    w = {n: p.data for n, p in state.parameters}
    np.testing.assert_allclose(
        output, hidden @ w["fc2.weight"].T + w["fc2.bias"], rtol=1e-4, atol=1e-6
    )
    for names, message in (([], "non empty"), (["nothing"], "nothing could not be found")):
        with pytest.raises(RuntimeError, match=message):
            module.export_model_for_inferencing(tmp_path / "other.onnx", names)


def test_a_nominal_checkpoint_wants_its_parameters(folder, module):
    nominal = CheckpointState.load_checkpoint(folder / "nominal_checkpoint")
    other = Module(folder / "training_model.onnx", nominal, folder / "eval_model.onnx")
    optimizer = Optimizer(folder / "optimizer_model.onnx", other)
    assert len(nominal.parameters) == 4
    flat = module.get_contiguous_parameters()
    first = "Please load the model parameters first"
    refused = [
        (lambda: nominal.parameters["fc1.bias"], "Please load the parameter states first"),
        (lambda: nominal.parameters.__setitem__("fc1.bias", 0), "load all the parameter states"),
        (lambda: other(*batch()), first),
        (lambda: other.get_contiguous_parameters(), first),
        (lambda: other.export_model_for_inferencing("x.onnx", ["output"]), first),
        (optimizer.step, first),
        (lambda: other.copy_buffer_to_parameters(flat), "load all the parameter states"),
    ]
    for call, message in refused:
        with pytest.raises(RuntimeError, match=message):
            call()
    assert other.get_parameters_size() == module.get_parameters_size()
    other.copy_buffer_to_parameters(flat, trainable_only=False)
    np.testing.assert_array_equal(other(*batch()), module(*batch()))
    optimizer.step()


def test_dropout_draws_from_seed_and_step(tmp_path):
    def build(op, x, weight):
        y, _ = op.Dropout(x, 0.5, True, _outputs=2)
        return {"output": op.Gemm(y, weight)}

    artifacts.generate_artifacts(
        model_of({"input": ["batch", 6]}, {"weight": [6, 3]}, build),
        requires_grad=["weight"],
        loss=artifacts.LossType.CrossEntropyLoss,
        artifact_directory=tmp_path,
    )
    train = onnx.load(tmp_path / "training_model.onnx").graph
    assert train.input[-1].name == "rng"

    def losses(seed):
        state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
        state.seed = seed
        module = Module(tmp_path / "training_model.onnx", state, tmp_path / "eval_model.onnx")
        drawn = [module(*batch()).item() for _ in range(3)]
        module.eval()
        return drawn, module(*batch()).item()

    assert losses(1) == losses(1)
    assert len(set(losses(1)[0])) == 3
    assert losses(1)[0] != losses(2)[0]
    assert losses(1)[1] == losses(2)[1]


def test_what_is_not_ours_is_refused_with_a_reason(folder, state, tmp_path):
    onnx.save(mlp(), tmp_path / "plain.onnx")
    with pytest.raises(RuntimeError, match="generate_artifacts"):
        Module(tmp_path / "plain.onnx", state)
    (tmp_path / "broken").write_bytes(b"something else")
    with pytest.raises(RuntimeError, match="broken"):
        CheckpointState.load_checkpoint(tmp_path / "broken")
    with pytest.raises(RuntimeError, match="missing"):
        CheckpointState.load_checkpoint(tmp_path / "missing")
    with pytest.raises(RuntimeError, match="tpu"):
        Module(folder / "training_model.onnx", state, device="tpu")
    artifacts.generate_artifacts(
        mlp(),
        requires_grad=WEIGHTS,
        loss=artifacts.LossType.CrossEntropyLoss,
        artifact_directory=tmp_path,
    )
    module = Module(
        tmp_path / "training_model.onnx", CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    )
    with pytest.raises(RuntimeError, match="describes no optimizer model"):
        Optimizer(tmp_path / "training_model.onnx", module)


def test_a_checkpoint_that_lacks_parameters_is_refused(folder, tmp_path):
    artifacts.generate_artifacts(
        mlp(),
        requires_grad=["fc1.bias"],
        loss=artifacts.LossType.CrossEntropyLoss,
        artifact_directory=tmp_path,
    )
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    with pytest.raises(RuntimeError, match=r"has no fc1\.weight, fc2\.bias, fc2\.weight"):
        Module(folder / "training_model.onnx", state)


def test_session_options_are_taken(folder, state):
    options = ort.SessionOptions()
    options.optimized_model_filepath = ""
    options.intra_op_num_threads = 1
    module = Module(folder / "training_model.onnx", state, session_options=options)
    assert np.isfinite(module(*batch()))
