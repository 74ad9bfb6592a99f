"""Artifacts as one ONNX file with training info, and training info of other programs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch

import onnxtrain
from onnxtrain import Artifacts, Trainer, losses, optim
from onnxtrain.errors import CheckpointError, LoadError, PrepareError, SaveError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.optim import OPTIMIZERS
from tests.zoo.export import export
from tests.zoo.models import ZOO

from .models import classifier, data, with_norm

STEPS = 20
Feeds = dict[str, np.ndarray]
LOSS = losses.LossTerm("cross_entropy", output="scores")


class Executor:
    """Trains a file by the rules of the standard alone: append the algorithm, run it, assign."""

    def __init__(self, path: Path) -> None:
        model = onnx.load(path)
        info = model.training_info[0]
        self.bindings = {b.key: b.value for b in info.update_binding}
        combined = onnx.ModelProto()
        combined.CopyFrom(model)
        del combined.training_info[:], combined.metadata_props[:]
        for part in ("node", "initializer", "input", "output", "value_info"):
            getattr(combined.graph, part).extend(getattr(info.algorithm, part))
        onnx.checker.check_model(combined, full_check=True)
        for tensor in combined.graph.initializer:  # variables become inputs with defaults
            if tensor.name in self.bindings and tensor.name not in names(combined.graph.input):
                value = ir.to_proto(ir.from_proto(tensor)).dims
                new = combined.graph.input.add(name=tensor.name)
                new.type.tensor_type.elem_type = tensor.data_type
                new.type.tensor_type.shape.SetInParent()
                for size in value:
                    new.type.tensor_type.shape.dim.add(dim_value=size)
        tensors = {t.name: t for t in combined.graph.initializer}
        self.variables = {n: ir.from_proto(tensors[n]).numpy() for n in self.bindings}
        self.session = ort.InferenceSession(combined.SerializeToString())

    def step(self, feeds: Feeds, loss: str = "loss") -> float:
        wanted = [loss, *self.bindings.values()]
        results = self.session.run(wanted, {**feeds, **self.variables})
        result, *new = (np.asarray(r) for r in results)
        self.variables = dict(zip(self.bindings, new, strict=True))
        return float(result)


def names(values: Any) -> list[str]:
    return [v.name for v in values]


def round_trip(artifacts: Artifacts, path: Path) -> Artifacts:
    """Write, check and read a file; the graphs come back byte for byte."""
    artifacts.to_training_info(path)
    onnx.checker.check_model(onnx.load(path), full_check=True)
    back = Artifacts.from_training_info(path)
    for key in ("step", "eval"):
        assert _plain(back.models[key]) == _plain(artifacts.models[key]), key
    assert back.manifest.state == artifacts.manifest.state
    for name, array in (artifacts.values | artifacts.state).items():
        np.testing.assert_array_equal((back.values | back.state)[name], array)
    return back


def _plain(model: onnx.ModelProto) -> onnx.GraphProto:
    """The graph without the metadata of the exporter, tensors as raw bytes."""
    graph = onnx.GraphProto()
    graph.CopyFrom(model.graph)
    del graph.metadata_props[:]
    for x in graph.input:
        del x.metadata_props[:]
    for tensor in graph.initializer:
        array = ir.from_proto(tensor).numpy()
        tensor.CopyFrom(ir.to_proto(ir.tensor(array, ir.DataType(tensor.data_type), tensor.name)))
    return graph


def train(artifacts: Artifacts, batch: Feeds, steps: int = STEPS) -> list[float]:
    trainer = Trainer(artifacts, layout="fused", threads=1)
    return [trainer.step(**batch).loss for _ in range(steps)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_round_trip_of_every_optimizer(name: str, tmp_path: Path) -> None:
    artifacts = onnxtrain.build(classifier(), loss=[LOSS], optimizer=f"{name}:lr=0.05")
    back = round_trip(artifacts, tmp_path / "model.onnx")
    x, labels = data(8)
    batch = {"x": x, "labels": labels}
    expected = train(artifacts, batch)
    assert train(back, batch) == expected
    executor = Executor(tmp_path / "model.onnx")
    np.testing.assert_allclose([executor.step(batch) for _ in range(STEPS)], expected, rtol=1e-5)


def test_everything_that_a_step_reads(tmp_path: Path) -> None:
    """Frozen weights, groups, clipping, an average, metrics, outputs and running statistics."""
    artifacts = onnxtrain.build(
        with_norm(),
        loss="cross_entropy",
        optimizer=optim.AdamW(lr=0.1, groups=(optim.ParamGroup("norm.*", weight_decay=0.0),)),
        clip=1.0,
        ema=0.9,
        freeze="norm.bias",
        metrics=["accuracy", "grad_norm"],
        outputs=["y"],
    )
    back = round_trip(artifacts, tmp_path / "model.onnx")
    x = np.random.default_rng(0).standard_normal((8, 4, 5)).astype(np.float32)
    batch = {"x": x, "labels": np.arange(8) % 3}
    trainers = [Trainer(a, layout="fused") for a in (artifacts, back)]
    for _ in range(5):
        ours, theirs = (t.step(**batch) for t in trainers)
        assert (ours.loss, ours.metrics) == (theirs.loss, theirs.metrics)
        np.testing.assert_array_equal(ours.outputs["y"], theirs.outputs["y"])
    first, second = (t.evaluate(batch, batch_size=8) for t in trainers)
    assert first == second
    mean, other = (t.view("norm.running_mean") for t in trainers)
    np.testing.assert_array_equal(mean, other)


def test_trained_artifacts_continue(tmp_path: Path) -> None:
    artifacts = onnxtrain.build(classifier(), loss=[LOSS], optimizer="adamw:lr=0.05")
    x, labels = data(8)
    batch = {"x": x, "labels": labels}
    artifacts.save(tmp_path / "art")
    trainer = Trainer(tmp_path / "art", layout="fused")
    for _ in range(3):
        trainer.step(**batch)
    trainer.lr = 0.01
    trainer.save(tmp_path / "art" / "checkpoint")
    Artifacts.load(tmp_path / "art").to_training_info(tmp_path / "model.onnx")
    executor = Executor(tmp_path / "model.onnx")
    other = Trainer(Artifacts.from_training_info(tmp_path / "model.onnx"))
    assert (other.global_step, other.lr) == (3, 0.01)
    for _ in range(3):
        expected = trainer.step(**batch).loss
        assert other.step(**batch).loss == expected
        np.testing.assert_allclose(executor.step(batch), expected, rtol=1e-5)
    session = ort.InferenceSession(tmp_path / "model.onnx")
    assert names(session.get_outputs()) == ["scores", "hidden"]


def test_dropout_draws_the_same_masks(tmp_path: Path) -> None:
    text = """<ir_version: 10, opset_import: ["" : 21]>
    net (float[n,6] x) => (float[n,3] y) <float ratio = {0.5}, bool on = {1}> {
      h = Dropout (x, ratio, on)
      y = MatMul (h, w)
    }"""
    model = onnx.parser.parse_model(text)
    w = np.random.default_rng(1).standard_normal((6, 3)).astype(np.float32)
    model.graph.initializer.append(ir.to_proto(ir.tensor(w, name="w")))
    artifacts = onnxtrain.build(model, loss="cross_entropy", optimizer="sgd:lr=0.1")
    back = round_trip(artifacts, tmp_path / "model.onnx")
    x, labels = data(8)
    batch = {"x": x, "labels": labels}
    expected = train(artifacts, batch)
    assert len(set(expected)) == STEPS
    assert train(back, batch) == expected
    executor = Executor(tmp_path / "model.onnx")
    np.testing.assert_allclose([executor.step(batch) for _ in range(STEPS)], expected, rtol=1e-5)


def test_weights_in_16_bits_are_written_with_their_masters(tmp_path: Path) -> None:
    artifacts = onnxtrain.build(
        classifier(dtype=np.float16), loss=[LOSS], optimizer="adamw:lr=0.05"
    )
    back = round_trip(artifacts, tmp_path / "model.onnx")
    x, labels = data(8)
    batch = {"x": x.astype(np.float16), "labels": labels}
    assert train(back, batch) == train(artifacts, batch)
    executor = Executor(tmp_path / "model.onnx")
    executor.step(batch)
    master = executor.variables["training/fc1.weight"]
    assert master.dtype == np.float32
    np.testing.assert_array_equal(
        executor.variables["fc1.weight"], master.astype(np.float16), strict=True
    )


def test_inference_model_of_another_opset_is_raised(tmp_path: Path) -> None:
    model = classifier()
    model.opset_import[0].version = 13
    artifacts = onnxtrain.build(model, loss=[LOSS], optimizer="sgd:lr=0.1")
    round_trip(artifacts, tmp_path / "model.onnx")
    assert [o.version for o in onnx.load(tmp_path / "model.onnx").opset_import] == [21]


def test_accumulated_gradients_are_refused(tmp_path: Path) -> None:
    artifacts = onnxtrain.build(classifier(), loss=[LOSS], optimizer="sgd:lr=0.1", accumulate=2)
    with pytest.raises(SaveError, match="accumulate gradients over 2 batches"):
        artifacts.to_training_info(tmp_path / "model.onnx")


@pytest.mark.parametrize("damage", ["entry", "initializer", "node"])
def test_metadata_that_does_not_fit_is_refused(damage: str, tmp_path: Path) -> None:
    artifacts = onnxtrain.build(classifier(), loss=[LOSS], optimizer="sgd:lr=0.1")
    artifacts.to_training_info(tmp_path / "model.onnx")
    model = onnx.load(tmp_path / "model.onnx")
    if damage == "entry":
        metadata = json.loads(model.metadata_props[0].value)
        del metadata["entries"][0]["opsets"]
        model.metadata_props[0].value = json.dumps(metadata)
    elif damage == "initializer":
        del model.training_info[0].algorithm.initializer[:]
    else:
        del model.training_info[0].algorithm.node[3]
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(CheckpointError, match="does not fit the training info"):
        Artifacts.from_training_info(tmp_path / "model.onnx")


@pytest.mark.parametrize("place", ["algorithm", "initialization", "graph"])
def test_weights_in_other_files_are_refused(place: str, tmp_path: Path) -> None:
    """A location may name any file of this machine."""
    (tmp_path / "secret").write_bytes(bytes(24))
    model = foreign()
    info = model.training_info[0]
    graph = model.graph if place == "graph" else getattr(info, place)
    tensor = graph.initializer.add(name="leak", data_type=1, dims=[3, 2], data_location=1)
    tensor.external_data.add(key="location", value=str(tmp_path / "secret"))
    (tmp_path / "foreign.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(LoadError, match="'leak' is in another file"):
        Artifacts.from_training_info(tmp_path / "foreign.onnx")


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    model = foreign()
    model.training_info[0].algorithm.initializer[-1].dims[:] = [1 << 40]
    with pytest.raises(LoadError, match="sb"):
        imported(model, tmp_path)


# Training info as the standard describes it, with its own operators.

TRAINING = "ai.onnx.preview.training."
HEADER = '<ir_version: 8, opset_import: ["": 18, "ai.onnx.preview.training": 1]>'
NET = """net (float[n,3] x) => (float[n,2] y) <float[3,2] w, float[2] b> {
  h = MatMul (x, w)
  y = Add (h, b)
}"""
ALGORITHM = """step (float[n,2] target) => (float loss, float[3,2] w2, float[2] b2, float[3,2] v2,
  float[2] vb2, float[3,2] s2, float[2] sb2, int64 t2)
<float R = {0.125}, int64 T = {0}, int64 one = {1}, float[3,2] v, float[2] vb, float[3,2] s,
 float[2] sb> {
  e = Sub (y, target)
  q = Mul (e, e)
  loss = ReduceMean <keepdims = 0> (q)
  dw, db = Gradient <xs = ["w", "b"], zs = ["x", "target"], y = "loss"> (w, b, x, target)
  t2 = Add (T, one)
  w2, b2, v2, vb2, s2, sb2 = Adam <alpha = 0.9, beta = 0.999, epsilon = 1e-8>
    (R, t2, w, b, dw, db, v, vb, s, sb)
}"""
BINDINGS = ["w", "w2", "b", "b2", "v", "v2", "vb", "vb2", "s", "s2", "sb", "sb2", "T", "t2"]


WEIGHTS = {"w": (3, 2), "b": (2,)}
STATE = {"v": (3, 2), "vb": (2,), "s": (3, 2), "sb": (2,)}


def parsed(text: str) -> onnx.ModelProto:
    for op in ("Gradient", "Adam"):
        text = text.replace(f" = {op}", f" = {TRAINING}{op}")
    return onnx.parser.parse_model(HEADER + text)


def tensors(shapes: dict[str, tuple[int, ...]], *, zeros: bool) -> list[onnx.TensorProto]:
    rng = np.random.default_rng(0)
    scale = 0.0 if zeros else 1.0
    arrays = {n: (scale * rng.standard_normal(d)).astype(np.float32) for n, d in shapes.items()}
    return [ir.to_proto(ir.tensor(a, name=n)) for n, a in arrays.items()]


def foreign(algorithm: str = ALGORITHM, bindings: list[str] = BINDINGS) -> onnx.ModelProto:
    """A model that another program gave training info."""
    model, step = parsed(NET), parsed(algorithm)
    info = model.training_info.add()
    info.algorithm.CopyFrom(step.graph)
    for key, value in zip(bindings[::2], bindings[1::2], strict=True):
        info.update_binding.add(key=key, value=value)
    for graph, shapes in ((model.graph, WEIGHTS), (info.algorithm, STATE)):
        declared = [v for v in graph.value_info if v.name in shapes]
        for value in declared:
            graph.value_info.remove(value)
        graph.initializer.extend(tensors(shapes, zeros=graph is not model.graph))
    return model


def imported(model: onnx.ModelProto, path: Path, **options: Any) -> Artifacts:
    onnx.save(model, path / "foreign.onnx")
    return Artifacts.from_training_info(path / "foreign.onnx", **options)


def batch_of(n: int) -> Feeds:
    rng = np.random.default_rng(1)
    return {
        "x": rng.standard_normal((n, 3)).astype(np.float32),
        "target": rng.standard_normal((n, 2)).astype(np.float32),
    }


def torch_losses(rate: float, steps: int = STEPS, adam: bool = True) -> list[float]:
    w, b = (torch.tensor(ir.from_proto(t).numpy()) for t in tensors(WEIGHTS, zeros=False))
    parameters = [w.requires_grad_(), b.requires_grad_()]
    make = torch.optim.Adam if adam else torch.optim.SGD
    optimizer = make(parameters, lr=rate)
    x, target = (torch.tensor(a) for a in batch_of(5).values())
    results = []
    for _ in range(steps):
        loss = ((x @ w + b - target) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        results.append(loss.item())
    return results


def test_foreign_training_info_trains(tmp_path: Path) -> None:
    artifacts = imported(foreign(), tmp_path)
    manifest = artifacts.manifest
    assert [p.name for p in manifest.parameters] == ["w", "b"]
    assert [s.name for s in manifest.state] == ["T", *STATE]
    assert manifest.optimizer["lr"] == 0.125
    artifacts.save(tmp_path / "art")
    trainer = Trainer(tmp_path / "art")
    batch = batch_of(5)
    got = [trainer.step(**batch).loss for _ in range(STEPS)]
    np.testing.assert_allclose(got, torch_losses(0.125), rtol=1e-4)
    assert trainer.view("T") == STEPS
    assert trainer.evaluate(batch, batch_size=5).loss < got[-1]
    trainer.export(tmp_path / "trained.onnx")
    session = ort.InferenceSession(tmp_path / "trained.onnx")
    (y,) = session.run(None, {"x": batch["x"]})
    np.testing.assert_allclose(np.asarray(y), trainer.predict(batch["x"])["y"], rtol=1e-5)


def test_explain_says_that_the_file_has_training_info() -> None:
    repairs = onnxtrain.explain(foreign()).repairs
    assert "training_info left out: Artifacts.from_training_info reads it" in repairs


def test_rate_of_a_foreign_file_can_change(tmp_path: Path) -> None:
    trainer = Trainer(imported(foreign(), tmp_path))
    trainer.lr = 0.01
    batch = batch_of(5)
    got = [trainer.step(**batch).loss for _ in range(STEPS)]
    np.testing.assert_allclose(got, torch_losses(0.01), rtol=1e-4)


def test_algorithm_without_training_operators(tmp_path: Path) -> None:
    """Gradients by hand, no optimizer node, the loss found by its shape."""
    text = """step (float[n,2] target) => (float loss, float[3,2] w2, float[2] b2)
    <float r = {0.0625}, float two = {2.0}> {
      e = Sub (y, target)
      q = Mul (e, e)
      loss = ReduceMean <keepdims = 0> (q)
      size = Size (e)
      count = Cast <to = 1> (size)
      dy = Div (e, count)
      dy2 = Mul (dy, two)
      xt = Transpose <perm = [1, 0]> (x)
      dw = MatMul (xt, dy2)
      axis = Constant <value_ints = [0]> ()
      db = ReduceSum <keepdims = 0> (dy2, axis)
      sw = Mul (r, dw)
      sb_ = Mul (r, db)
      w2 = Sub (w, sw)
      b2 = Sub (b, sb_)
    }"""
    trainer = Trainer(imported(foreign(text, ["w", "w2", "b", "b2"]), tmp_path))
    batch = batch_of(5)
    got = [trainer.step(**batch).loss for _ in range(STEPS)]
    np.testing.assert_allclose(got, torch_losses(0.0625, adam=False), rtol=1e-4)


@pytest.mark.parametrize("loss", [True, False])
def test_file_made_with_the_helper_of_onnx(loss: bool, tmp_path: Path) -> None:
    """As in onnx's own test of its helper: ``B <- X (A B)``; inputs have defaults."""
    from onnx import helper  # noqa: TID251 - this is the other program

    rng = np.random.default_rng(0)
    a, b, x = rng.random((3, 2, 2)).astype(np.float32)
    made = {n: ir.to_proto(ir.tensor(v, name=n)) for n, v in (("A", a), ("B", b), ("X", x))}

    def info(name: str, shape: tuple[int, ...] = (2, 2)) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)

    inference = helper.make_graph(
        [helper.make_node("MatMul", ["A", "B"], ["C"])],
        "inference",
        [info("A"), info("B")],
        [info("C")],
        [made["A"], made["B"]],
    )
    algorithm = helper.make_graph(
        [
            helper.make_node("MatMul", ["X", "C"], ["Y"]),
            *([helper.make_node("ReduceSum", ["Y"], ["loss"], keepdims=0)] if loss else []),
        ],
        "training",
        [info("X")],
        [info("Y"), *([info("loss", ())] if loss else [])],
        [made["X"]],
    )
    model = helper.make_model(inference)
    model.training_info.append(helper.make_training_info(algorithm, [("B", "Y")], None, None))
    artifacts = imported(model, tmp_path)
    note = "the training info has no loss: it is reported as 0"
    assert (note in artifacts.manifest.options["repairs"]) is not loss
    trainer = Trainer(artifacts)
    for _ in range(3):
        b = x @ (a @ b)
        np.testing.assert_allclose(trainer.step().loss, b.sum() if loss else 0, rtol=1e-5)
    np.testing.assert_allclose(trainer.view("B"), b, rtol=1e-5)


def test_several_scalars_that_could_be_the_loss_are_named(tmp_path: Path) -> None:
    text = """step (float[n,2] target) => (float loss, float other, float[2] b2)
    <float two = {2.0}> {
      e = Sub (y, target)
      q = Mul (e, e)
      loss = ReduceMean <keepdims = 0> (q)
      other = Mul (loss, two)
      b2 = Identity (b)
    }"""
    model = foreign(text, ["b", "b2"])
    with pytest.raises(PrepareError, match=r"scalar outputs: loss, other\nhint: loss='loss'"):
        imported(model, tmp_path)
    batch = batch_of(5)
    first, second = (
        Trainer(imported(model, tmp_path, loss=n)).step(**batch).loss for n in ("loss", "other")
    )
    np.testing.assert_allclose(second, 2 * first, rtol=1e-6)


def test_initialization_graph(tmp_path: Path) -> None:
    model = foreign()
    start = parsed("""i () => (float[2] b0, int64 t0) <float[2] b0 = {3.0, -4.0}> {
      t0 = Constant <value_int = 0> ()
    }""")
    model.training_info[0].initialization.CopyFrom(start.graph)
    for key, value in (("b", "b0"), ("T", "t0")):
        model.training_info[0].initialization_binding.add(key=key, value=value)
    model.training_info[0].algorithm.initializer[1].int64_data[:] = [7]
    kept, reset = (imported(model, tmp_path, initialize=flag) for flag in (False, True))
    assert kept.state["T"] == 7
    assert reset.state["T"] == 0
    np.testing.assert_array_equal(reset.values["b"], [3, -4])
    np.testing.assert_array_equal(reset.values["w"], kept.values["w"])


BAD_BINDINGS = {
    "'w' is bound twice": "w w2 w w2",
    "'nobody' is not an initializer": "nobody w2",
    "'e' is not an output": "w e",
}


@pytest.mark.parametrize("message", BAD_BINDINGS)
def test_bad_bindings_are_refused(message: str, tmp_path: Path) -> None:
    with pytest.raises(PrepareError, match=message):
        imported(foreign(bindings=BAD_BINDINGS[message].split()), tmp_path)


def test_several_steps_run_in_order(tmp_path: Path) -> None:
    """The second step reads what the first one wrote, as in a GAN that trains in turns."""

    def part(name: str, shape: str, rate: float) -> str:
        return f"""step (float[n,2] target) => (float loss, float[{shape}] {name}2,
          float[{shape}] {name}v2, int64 {name}t2)
        <float R = {{{rate}}}, int64 {name}T = {{0}}, int64 one = {{1}}, float[{shape}] {name}v> {{
          e = Sub (y, target)
          q = Mul (e, e)
          loss = ReduceMean <keepdims = 0> (q)
          d = Gradient <xs = ["{name}"], zs = ["x", "target"], y = "loss"> ({name}, x, target)
          {name}t2 = Add ({name}T, one)
          {name}2, {name}v2 = {TRAINING}Momentum <alpha = 0.5, beta = 1.0, mode = "standard",
            norm_coefficient = 0.0> (R, {name}t2, {name}, d, {name}v)
        }}"""

    def model(second_rate: float) -> onnx.ModelProto:
        proto = foreign(part("w", "3,2", 0.125), ["w", "w2", "wv", "wv2", "wT", "wt2"])
        info = proto.training_info.add()
        info.algorithm.CopyFrom(parsed(part("b", "2", second_rate)).graph)
        for key in ("b", "bv", "bT"):
            info.update_binding.add(key=key, value=key.replace("T", "t") + "2")
        for i, name in enumerate(("w", "b")):
            graph = proto.training_info[i].algorithm
            shape = {"w": (3, 2), "b": (2,)}[name]
            for value in [v for v in graph.value_info if v.name == f"{name}v"]:
                graph.value_info.remove(value)
            del graph.initializer[3:]
            graph.initializer.extend(tensors({f"{name}v": shape}, zeros=True))
        return proto

    def in_torch(rates: tuple[float, float]) -> list[float]:
        w, b = (torch.tensor(ir.from_proto(t).numpy()) for t in tensors(WEIGHTS, zeros=False))
        pairs = [
            (p, torch.optim.SGD([p.requires_grad_()], lr=rate, momentum=0.5))
            for p, rate in zip((w, b), rates, strict=True)
        ]
        x, target = (torch.tensor(a) for a in batch_of(5).values())
        losses = []
        for _ in range(STEPS):
            for i, (p, optimizer) in enumerate(pairs):
                loss = ((x @ w + b - target) ** 2).mean()
                p.grad = torch.autograd.grad(loss, p)[0]
                optimizer.step()
                losses += [loss.item()] if i == 0 else []
        return losses

    batch = batch_of(5)
    for rate in (0.25, 0.125):
        artifacts = imported(model(rate), tmp_path)
        assert [p.name for p in artifacts.manifest.parameters] == ["w", "b"]
        trainer = Trainer(artifacts)
        got = [trainer.step(**batch).loss for _ in range(STEPS)]
        np.testing.assert_allclose(got, in_torch((0.125, rate)), rtol=1e-4)
    trainer = Trainer(artifacts)  # rates that are equal are one learning rate
    trainer.lr = 0.5
    got = [trainer.step(**batch).loss for _ in range(STEPS)]
    np.testing.assert_allclose(got, in_torch((0.5, 0.5)), rtol=1e-4)


def test_number_of_steps_is_checked(tmp_path: Path) -> None:
    with pytest.raises(PrepareError, match="has no training step"):
        imported(parsed(NET), tmp_path)
    model = foreign()
    model.training_info.append(model.training_info[0])
    with pytest.raises(PrepareError, match="'b' is bound twice"):
        imported(model, tmp_path)


# Round trips of real architectures.

QUICK = ["gcn", "nerf", "gru"]


def _entries() -> Iterator[Any]:
    for name in ZOO:
        yield pytest.param(name, marks=() if name in QUICK else pytest.mark.full)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("name", list(_entries()))
def test_round_trip_of_architectures(name: str, tmp_path: Path) -> None:
    entry = ZOO[name]
    exported = export(entry, entry.modes[-1])
    artifacts = onnxtrain.build(
        exported.model,
        loss=_mean_square,
        optimizer="adamw:lr=0.001",
        train=list(exported.names.values()),
    )
    back = round_trip(artifacts, tmp_path / "model.onnx")
    inputs = [x.detach().numpy() for x in entry.inputs(4)]
    specs = artifacts.manifest.models[0].inputs_of("input")
    batch = dict(zip((s.name for s in specs), inputs, strict=False))
    expected = train(artifacts, batch)
    assert len(set(expected)) > 1
    assert train(back, batch) == expected


def _mean_square(op: OpBuilder, *outputs: ir.Value) -> ir.Value:
    """The sum of the mean squares of all outputs, so that every parameter reaches it."""
    terms = [op.ReduceMean(op.Mul(y, y), keepdims=0) for y in outputs if S.is_float(y)]
    return terms[0] if len(terms) == 1 else op.Sum(*(op.cast(t, terms[0].dtype) for t in terms))
