"""The programs in docs/ run, and do what the trainer does."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import onnxtrain
from tests.artifacts.models import classifier, data, example, finished, graph, weight

DOCS = Path(__file__).parents[2] / "docs"


def programs(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


@pytest.mark.parametrize("dropout", [False, True])
def test_the_loop_from_the_manifest_alone(tmp_path: Path, dropout: bool) -> None:
    (program,) = programs("any-language.md")
    assert "onnxtrain" not in program
    space: dict = {}
    exec(compile(program, "any-language.md", "exec"), space)
    artifacts = with_dropout() if dropout else example()
    artifacts.save(tmp_path)
    features = 6 if dropout else 40
    batches = []
    for seed in range(5):
        x, labels = data(8, features=features, seed=seed)
        batches.append({"x": x, "labels": labels})
    losses, tensors = space["train"](tmp_path, batches, seed=9)
    trainer = onnxtrain.Trainer(artifacts, seed=9)
    assert losses == [trainer.step(**b).loss for b in batches]
    for name, value in trainer.parameters.items():
        np.testing.assert_array_equal(tensors[name], value)


def with_dropout() -> onnxtrain.Artifacts:
    import onnx_ir as ir

    op = graph()
    x = op.input("x", ir.DataType.FLOAT, ["batch", 6])
    h = op.Dropout(x, op.const(0.3, ir.DataType.FLOAT))
    w = weight(op, "w", np.random.default_rng(0).standard_normal((6, 3)).astype(np.float32))
    return onnxtrain.build(finished(op, y=op.MatMul(h, w)), loss="cross_entropy", optimizer="adam")


def test_quickstart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of its Python, in order, with names bound to small things."""
    monkeypatch.chdir(tmp_path)
    model = classifier()
    for node in model.graph.node:
        node.input[:] = ["image" if n == "x" else n for n in node.input]
    model.graph.input[0].name = "image"
    del model.graph.output[1]
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    image, labels = data(96)
    np.savez("train.npz", image=image, labels=labels)
    first, loop, more, transfer = programs("quickstart.md")
    space: dict = {"batches": [(image[:8], labels[:8])]}
    space |= {"test_image": image, "test_labels": labels}
    exec(first.replace("epochs=10", "epochs=10, progress=False"), space)
    losses = [r["loss"] for r in space["history"].epochs]
    assert losses[-1] < losses[0]
    assert (tmp_path / "trained.onnx").exists()
    exec(loop.replace('"fc.bias"', '"fc2.bias"'), space)
    assert space["result"].metrics.keys() == {"accuracy"}
    two = two_headed()
    single, loss, function, weighted, grouped = more.split("onnxtrain.build(")[1:]
    for text, given in ((single, model), (function, model), (weighted, two), (grouped, model)):
        exec("actual = onnxtrain.build(" + text, {**space, "model": given})
    exec("actual = onnxtrain.build(" + loss, {**space, "model": with_loss()})
    onnxtrain.graph.io.save(model, tmp_path / "resnet.onnx")
    backbone = {"fc1.weight": np.ones((6, 8), np.float32), "fc1.bias": np.ones(8, np.float32)}
    save_file(backbone, "backbone.safetensors")
    text = transfer.replace('"logits"', '"scores"').replace("fc.*", "fc2.*")
    exec(text, space)
    assert (space["trainer"].predict(image=image)["scores"]).shape == (96, 7)
    assert list(space["trainer"].parameters) == ["fc2.weight", "fc2.bias"]
    stored = {t.name: t.raw_data for t in space["artifacts"].models["infer"].graph.initializer}
    assert stored["fc1.bias"] == np.ones(8, np.float32).tobytes()


def two_headed() -> object:
    import onnx_ir as ir

    op = graph()
    x = op.input("x", ir.DataType.FLOAT, ["batch", 6])
    heads = {
        n: op.MatMul(x, weight(op, f"{n}.w", np.ones((6, k), np.float32)))
        for n, k in (("box", 4), ("scores", 3))
    }
    return finished(op, **heads)


def with_loss() -> object:
    import onnx_ir as ir

    op = graph()
    x = op.input("x", ir.DataType.FLOAT, ["batch", 6])
    w = weight(op, "w", np.ones((6, 1), np.float32))
    return finished(op, loss=op.ReduceMean(op.MatMul(x, w), keepdims=0))
