"""Names of inputs and outputs are the caller's; files hold nothing of the author's machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import nn

import onnxtrain
from onnxtrain.errors import SaveError
from onnxtrain.torch import from_torch
from onnxtrain.torch.exporters import ExportError


def two_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))


class Encoder(nn.Module):
    """Takes keywords as encoders of text do, and gives a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(6, 2)

    def forward(self, input_ids: Any = None, positions: Any = None, attention_mask: Any = None):
        x = self.embed(input_ids) * attention_mask[..., None]
        return {"pooled": x.mean(1), "logits": self.head(self.drop(x).mean(1)), "extra": None}


class Pair(NamedTuple):
    low: torch.Tensor
    high: torch.Tensor


class GivesPair(nn.Module):
    def forward(self, x):
        return Pair(x - 1, x + 1)


class GivesItsInput(nn.Module):
    def forward(self, x):
        twice = x * 2
        return {"x": x, "a": twice, "b": twice}


def names(model: ir.Model) -> tuple[list[str | None], list[str | None]]:
    return [x.name for x in model.graph.inputs], [y.name for y in model.graph.outputs]


def test_given_names() -> None:
    model = from_torch(
        two_layers(), torch.randn(5, 4), input_names=["points"], output_names=["logits"]
    )
    assert names(model) == (["points"], ["logits"])
    built = onnxtrain.build(
        model, loss=[onnxtrain.losses.LossTerm("cross_entropy", output="logits")], optimizer="sgd"
    )
    step = onnxtrain.Trainer(built).step(np.ones((2, 4), np.float32), np.array([0, 1]))
    assert step.loss > 0


def test_invalid_names_are_reported() -> None:
    x = torch.randn(5, 4)
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"input_names": ["a"], "names": ["a"]}, "are the same option"),
        ({"output_names": ["a", "b"]}, "got 2 names for 1 outputs"),
        ({"output_names": ["0.weight"]}, "the name of an input or parameter"),
        ({"input_names": ["a", "b"]}, "got 2 names for 1 inputs"),
        ({"dynamic_shapes": {"z": {0: "n"}}}, "unknown input 'z'"),
    )
    for options, message in cases:
        with pytest.raises(ExportError, match=message):
            from_torch(two_layers(), x, **options)
    with pytest.raises(ExportError, match="duplicate name in outputs: 'a'"):
        from_torch(GivesPair(), x, output_names=["a", "a"])
    with pytest.raises(ExportError, match="example_inputs does not match"):
        from_torch(two_layers(), {"no": x})


def test_a_dict_is_keywords_and_its_keys_are_names() -> None:
    torch.manual_seed(0)
    module = Encoder()
    example = {"input_ids": torch.randint(0, 11, (3, 5)), "attention_mask": torch.ones(3, 5)}
    shapes = {n: {0: "batch", 1: "words"} for n in example}
    model = from_torch(module, example, dynamic_shapes=shapes)
    assert module.training
    assert names(model) == (["input_ids", "attention_mask"], ["pooled", "logits"])
    assert {n for n, _ in module.named_parameters()} <= set(model.graph.initializers)
    plain = from_torch(module, example, train=False, dynamic_shapes=shapes)
    module.eval()
    more = {"input_ids": torch.randint(0, 11, (2, 7)), "attention_mask": torch.rand(2, 7)}
    session = onnxruntime.InferenceSession(plain.proto.SerializeToString())
    got: Any = session.run(["logits"], {n: x.numpy() for n, x in more.items()})[0]
    np.testing.assert_allclose(got, module(**more)["logits"].detach(), rtol=1e-5, atol=1e-6)


def test_fields_of_a_named_tuple_and_outputs_that_are_inputs() -> None:
    x = torch.randn(2, 3)
    assert names(from_torch(GivesPair(), x)) == (["x"], ["low", "high"])
    model = from_torch(GivesItsInput(), x)
    assert names(model) == (["x"], ["x.out", "a", "b"])
    got: Any = onnxruntime.InferenceSession(model.proto.SerializeToString()).run(
        None, {"x": x.numpy()}
    )
    for a, b in zip(got, (x, 2 * x, 2 * x), strict=True):
        np.testing.assert_array_equal(a, b.numpy())


def test_saved(tmp_path: Path) -> None:
    model = from_torch(two_layers(), torch.randn(5, 4))
    model.save(tmp_path / "a.onnx")
    onnx.save(model.proto, tmp_path / "b.onnx")
    for name in "ab":
        onnx.checker.check_model(onnx.load(tmp_path / f"{name}.onnx"), full_check=True)
    with pytest.raises(SaveError):
        model.save(tmp_path / "missing" / "c.onnx")


def test_files_are_small_and_tell_nothing_of_the_machine(tmp_path: Path) -> None:
    model = from_torch(two_layers(), torch.randn(5, 4))
    model.save(tmp_path / "model.onnx")
    # As torch leaves it, which is what others may give to build.
    for node in model.graph:
        node.metadata_props["pkg.torch.onnx.stack_trace"] = 'File "/home/me/net.py", line 3'
        node.doc_string = "/home/me/net.py:3"
    built = onnxtrain.build(model, loss="cross_entropy", optimizer="adamw", metrics=["accuracy"])
    built.save(tmp_path / "art")
    onnxtrain.Trainer(tmp_path / "art").export(tmp_path / "trained.onnx")
    for path in (p for p in tmp_path.rglob("*") if p.is_file()):
        data = path.read_bytes()
        assert b".py" not in data, path
        assert b"stack_trace" not in data, path
    assert sum(p.stat().st_size for p in (tmp_path / "art").iterdir()) < 110_000
    scopes = [n.metadata_props.get("pkg.torch.onnx.name_scopes") for n in model.graph]
    assert all(scopes), "recompute goes by them"
