"""generate_artifacts: files, names, orders, parameters and errors."""

from __future__ import annotations

import inspect
import json
from importlib import resources

import jsonschema
import numpy as np
import onnx
import onnxruntime as ort
import pytest

from onnxtrain.artifacts.directory import split_tensors
from onnxtrain.checkpoint import load_checkpoint
from onnxtrain.compat.ort import artifacts, onnxblock
from onnxtrain.compat.ort.api import CheckpointState, Module, Optimizer
from onnxtrain.errors import OnnxTrainError
from onnxtrain.manifest import Manifest
from tests.compat.models import WEIGHTS, arrays_of, batch, mlp, model_of, two_outputs

LossType, OptimType = artifacts.LossType, artifacts.OptimType
FILES = ["checkpoint", "eval_model.onnx", "optimizer_model.onnx", "training_model.onnx"]


def generate(folder, model=None, **options):
    """Generate with the usual settings, unless others are given."""
    settings = {
        "requires_grad": WEIGHTS[:3],
        "frozen_params": WEIGHTS[3:],
        "loss": LossType.CrossEntropyLoss,
        "optimizer": OptimType.AdamW,
        "artifact_directory": folder,
    }
    artifacts.generate_artifacts(model or mlp(), **{**settings, **options})


def names(values):
    return [v.name for v in values]


def test_signature_has_all_twelve_parameters():
    assert list(inspect.signature(artifacts.generate_artifacts).parameters) == [
        "model",
        "requires_grad",
        "frozen_params",
        "loss",
        "optimizer",
        "artifact_directory",
        "prefix",
        "ort_format",
        "custom_op_library",
        "additional_output_names",
        "nominal_checkpoint",
        "loss_input_names",
    ]
    assert [(m.name, m.value) for m in LossType] == [
        ("MSELoss", 1),
        ("CrossEntropyLoss", 2),
        ("BCEWithLogitsLoss", 3),
        ("L1Loss", 4),
    ]
    assert [(m.name, m.value) for m in OptimType] == [("AdamW", 1), ("SGD", 2)]


def test_inputs_and_outputs_come_in_the_old_order(tmp_path):
    generate(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == FILES
    train = onnx.load(tmp_path / "training_model.onnx").graph
    buffers = [f"{n}_grad.accumulation.buffer" for n in WEIGHTS[:3]]
    assert names(train.input) == ["input", "labels", *WEIGHTS, *buffers, "lazy_reset_grad"]
    assert names(train.output) == ["loss", *(f"{n}_grad.accumulation.out" for n in WEIGHTS[:3])]
    evaluation = onnx.load(tmp_path / "eval_model.onnx").graph
    assert names(evaluation.input) == ["input", "labels", *WEIGHTS]
    assert names(evaluation.output) == ["loss"]
    update = onnx.load(tmp_path / "optimizer_model.onnx").graph
    assert names(update.input)[:6] == ["learning_rate", "step", "grad_scale", *WEIGHTS[:3]]
    assert "fc1.weight.exp_avg.out" in names(update.output)


def test_models_have_the_opset_of_the_base_model_and_only_standard_operators(tmp_path):
    generate(tmp_path, mlp(opset=14))
    for file in FILES[1:]:
        model = onnx.load(tmp_path / file)
        assert {o.domain: o.version for o in model.opset_import}[""] == 14
        assert {n.domain for n in model.graph.node} <= {"", "ai.onnx"}
        onnx.checker.check_model(model, full_check=True)
        ort.InferenceSession(model.SerializeToString())


@pytest.mark.parametrize("optimizer", [None, OptimType.SGD, onnxblock.optim.AdamW()])
def test_each_file_carries_the_manifest(tmp_path, optimizer):
    generate(tmp_path, optimizer=optimizer)
    text = resources.files("onnxtrain").joinpath("manifest.schema.json").read_text()
    manifests = [load_checkpoint(tmp_path / "checkpoint")[1]["manifest"]]
    for path in tmp_path.glob("*.onnx"):
        properties = {p.key: p.value for p in onnx.load(path).metadata_props}
        manifests.append(json.loads(properties["onnxtrain"]))
    for manifest in manifests:
        jsonschema.validate(manifest, json.loads(text), jsonschema.Draft202012Validator)
        assert manifest == manifests[0]
    assert [m["role"] for m in manifests[0]["models"]][:2] == ["train", "eval"]
    # Every value that a model reads is in the checkpoint, as other readers expect it.
    split_tensors(
        Manifest.from_json(json.dumps(manifests[0])),
        load_checkpoint(tmp_path / "checkpoint")[0],
        "x",
    )


def test_the_same_call_writes_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        generate(tmp_path / name)
    for file in FILES:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_what_is_not_named_stays_in_the_graphs(tmp_path):
    generate(tmp_path, requires_grad=["fc2.weight"], frozen_params=None)
    train = onnx.load(tmp_path / "training_model.onnx").graph
    assert "fc1.weight" in names(train.initializer)
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    assert [name for name, _ in state.parameters] == ["fc2.weight"]


def test_the_base_model_is_not_changed(tmp_path):
    model = mlp()
    before = model.SerializeToString()
    generate(tmp_path, model)
    assert model.SerializeToString() == before


def test_no_file_has_paths_of_the_exporting_machine(tmp_path):
    model = mlp()
    trace = 'File "/home/me/secret/train.py", line 7, in forward'
    model.graph.node[0].doc_string = model.graph.doc_string = trace
    model.graph.node[1].metadata_props.add(key="pkg.torch.onnx.stack_trace", value=trace)
    generate(tmp_path, model)
    for file in tmp_path.iterdir():
        assert b"secret" not in file.read_bytes(), file.name
    assert model.graph.doc_string == trace


def test_prefix_is_in_front_of_every_file(tmp_path):
    generate(tmp_path, prefix="my_", nominal_checkpoint=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        f"my_{n}" for n in [*FILES, "nominal_checkpoint"]
    )


# onnxruntime's converter leaves files open.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ort_format_is_written_too_and_trains(tmp_path):
    generate(tmp_path, ort_format=True)
    assert (tmp_path / "training_model.required_operators.config").exists()
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.ort", state, tmp_path / "eval_model.ort")
    optimizer = Optimizer(tmp_path / "optimizer_model.ort", module)
    first = module(*batch())
    optimizer.step()
    assert module(*batch()) < first
    with pytest.raises(RuntimeError, match="ONNX format"):
        module.export_model_for_inferencing(tmp_path / "out.onnx", ["output"])


def test_weighted_average_loss_of_the_documentation(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    onnx.save(two_outputs(), "model.onnx")

    class WeightedAverageLoss(onnxblock.Block):
        def __init__(self):
            self._loss1 = onnxblock.loss.MSELoss()
            self._loss2 = onnxblock.loss.MSELoss()
            self._w1 = onnxblock.blocks.Constant(0.4)
            self._w2 = onnxblock.blocks.Constant(0.6)
            self._add = onnxblock.blocks.Add()
            self._mul = onnxblock.blocks.Mul()

        def build(self, loss_input_name1, loss_input_name2):
            return self._add(
                self._mul(self._w1(), self._loss1(loss_input_name1, target_name="target1")),
                self._mul(self._w2(), self._loss2(loss_input_name2, target_name="target2")),
            )

    my_custom_loss = WeightedAverageLoss()
    base_model = onnx.load("model.onnx")
    requires_grad = ["weight1", "bias1", "weight2", "bias2"]
    frozen_params = ["weight3", "bias3"]
    artifacts.generate_artifacts(
        base_model,
        requires_grad=requires_grad,
        frozen_params=frozen_params,
        loss=my_custom_loss,
        optimizer=artifacts.OptimType.AdamW,
    )

    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*FILES, "model.onnx"])
    state = CheckpointState.load_checkpoint("checkpoint")
    module = Module("training_model.onnx", state, "eval_model.onnx")
    assert module.input_names() == ["input", "target1", "target2"]
    optimizer = Optimizer("optimizer_model.onnx", module)
    rng = np.random.default_rng(0)
    x, t1, t2 = (rng.standard_normal((8, n)).astype(np.float32) for n in (4, 3, 2))
    y1, y2 = ort.InferenceSession("model.onnx").run(None, {"input": x})
    expected = 0.4 * np.mean((y1 - t1) ** 2) + 0.6 * np.mean((y2 - t2) ** 2)
    np.testing.assert_allclose(module(x, t1, t2).item(), expected, rtol=1e-5)
    frozen = state.parameters["weight3"].data
    optimizer.step()
    module.eval()
    assert module(x, t1, t2).item() < expected
    np.testing.assert_array_equal(state.parameters["weight3"].data, frozen)


def test_additional_outputs_may_be_inner_values(tmp_path):
    generate(tmp_path, additional_output_names=["output", "hidden"])
    for file in ("training_model.onnx", "eval_model.onnx"):
        assert names(onnx.load(tmp_path / file).graph.output)[:3] == ["loss", "output", "hidden"]
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state, tmp_path / "eval_model.onnx")
    assert module.output_names() == ["loss", "output", "hidden"]
    x, labels = batch()
    _, output, hidden = module(x, labels)
    w = arrays_of(mlp())
    expected = np.maximum(x @ w["fc1.weight"].T + w["fc1.bias"], 0)
    np.testing.assert_allclose(hidden, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        output, expected @ w["fc2.weight"].T + w["fc2.bias"], rtol=1e-4, atol=1e-6
    )


def test_without_a_loss_the_first_output_is_it(tmp_path):
    def build(op, x, weight):
        y = op.Gemm(x, weight)
        return {"mean": op.ReduceMean(y, keepdims=0), "output": y}

    model = model_of({"input": ["batch", 6]}, {"weight": [6, 2]}, build)
    generate(tmp_path, model, loss=None, requires_grad=["weight"], frozen_params=None)
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state)
    assert module.output_names() == ["mean", "output"]
    loss, output = module(batch()[0])
    np.testing.assert_allclose(loss, output.mean(), rtol=1e-5)


def test_loss_input_names_choose_what_the_loss_sees(tmp_path):
    generate(
        tmp_path,
        two_outputs(),
        loss=LossType.L1Loss,
        loss_input_names=["output2"],
        requires_grad=["weight2"],
        frozen_params=None,
    )
    train = onnx.load(tmp_path / "training_model.onnx").graph
    target = next(x for x in train.input if x.name == "target")
    assert target.type.tensor_type.shape.dim[1].dim_value == 2


def test_gradients_of_inputs(tmp_path):
    generate(tmp_path, requires_grad=["input", "fc2.bias"], frozen_params=None)
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state)
    for size in (8, 3):
        assert np.isfinite(module(*batch(size=size)))
    assert [name for name, _ in state.parameters] == ["fc2.bias"]


def test_an_optimizer_of_ones_own_over_sequences(tmp_path):
    class Both(onnxblock.ForwardBlock):
        def __init__(self):
            super().__init__()
            self.inner = onnxblock.optim.AdamW(weight_decay=0.1)

        def build(self, parameters):
            self.inner.base = self.base
            return self.inner.build(parameters)

    losses = []
    for name, optimizer in (("a", Both()), ("b", onnxblock.optim.AdamW(weight_decay=0.1))):
        (tmp_path / name).mkdir()
        generate(tmp_path / name, optimizer=optimizer)
        state = CheckpointState.load_checkpoint(tmp_path / name / "checkpoint")
        module = Module(tmp_path / name / "training_model.onnx", state)
        update = Optimizer(tmp_path / name / "optimizer_model.onnx", module)
        for _ in range(3):
            module.lazy_reset_grad()
            losses.append(module(*batch()).item())
            update.step()
    np.testing.assert_allclose(losses[:3], losses[3:], rtol=1e-6)


@pytest.mark.parametrize("external", [False, True])
def test_a_path_with_external_data_and_a_block_without_init(tmp_path, monkeypatch, external):
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")

    class Custom(onnxblock.Block):
        def __init__(self):
            self.loss = onnxblock.loss.CrossEntropyLoss()

        def build(self, name):
            return self.loss(name)

    path = tmp_path / "model.onnx"
    onnx.save(mlp(), path, save_as_external_data=external, size_threshold=0)
    generate(tmp_path, str(path), loss=Custom())
    assert not list((tmp_path / "cwd").iterdir())
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    np.testing.assert_array_equal(
        state.parameters["fc1.weight"].data, arrays_of(mlp())["fc1.weight"]
    )


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"model": 3}, RuntimeError, "either a string or an ONNX ModelProto"),
        ({"model": "nowhere.onnx"}, RuntimeError, "nowhere"),
        ({"loss": "mse"}, RuntimeError, "Unknown loss provided"),
        ({"optimizer": "sgd"}, TypeError, "Unknown optimizer provided"),
        ({"frozen_params": ["fc1.bias"]}, RuntimeError, "cannot be frozen and require gradient"),
        ({"additional_output_names": "output"}, RuntimeError, "list of strings"),
        (
            {"additional_output_names": ["nothing"]},
            LookupError,
            "nothing is not a graph value info",
        ),
        ({"requires_grad": ["fc3.bias"]}, RuntimeError, "Node arg fc3.bias is not found"),
        ({"requires_grad": None}, IndexError, "no trainable parameter"),
        ({"loss": None}, RuntimeError, "must be a scalar"),
        ({"custom_op_library": "no.so"}, RuntimeError, "no.so does not exist"),
    ],
)
def test_errors_have_the_old_types(tmp_path, options, error, message):
    with pytest.raises(error, match=message) as info:
        generate(tmp_path, **options)
    assert isinstance(info.value, OnnxTrainError)
    assert not list(tmp_path.iterdir())


def test_a_parameter_that_does_not_reach_the_loss(tmp_path):
    with pytest.raises(RuntimeError, match="Cannot compute the partial derivative for weight1"):
        generate(
            tmp_path,
            two_outputs(),
            loss=LossType.MSELoss,
            loss_input_names=["output2"],
            requires_grad=["weight1"],
            frozen_params=None,
        )
