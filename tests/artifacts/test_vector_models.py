"""Models of a step over vectors: when a build has them, their parameters, saving and loading."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from onnxtrain import losses, optim
from onnxtrain.artifacts import Artifacts, Clip
from onnxtrain.artifacts.build import build
from onnxtrain.errors import CheckpointError
from onnxtrain.manifest import Manifest, ModelSpec
from onnxtrain.optim import transforms as T
from onnxtrain.training import Trainer
from tests.artifacts.models import classifier, data

NEW = {"gradients", "scalars", "update"}
GROUPS = optim.AdamW(
    lr=0.01, groups=[optim.ParamGroup("*bias", weight_decay=0.0), optim.ParamGroup("fc1*")]
)


def made(**options: Any) -> Artifacts:
    scores = [losses.LossTerm("cross_entropy", output="scores")]
    return build(classifier(), **{"loss": scores, "optimizer": GROUPS, **options})


def of_role(artifacts: Artifacts, role: str) -> list[ModelSpec]:
    return [m for m in artifacts.manifest.models if m.role == role]


def steps(trainer: Trainer, count: int = 3) -> list[float]:
    return [trainer.step(*data(8, seed=i)).loss for i in range(count)]


def test_an_update_serves_parameters_with_equal_settings(tmp_path: Path) -> None:
    artifacts = made(ema=0.9, clip=Clip(value=0.5))
    decayed, plain = of_role(artifacts, "update")
    assert decayed.members == ("fc1.weight", "fc2.weight")
    assert plain.members == ("fc1.bias", "fc2.bias")
    for spec in (decayed, plain):
        vectors = ["parameter", "gradient", "exp_avg", "exp_avg_sq", "ema"]
        scalars = [t.name for t in spec.inputs_of("scalar")]
        assert [t.name for t in spec.inputs] == vectors + scalars
        assert all(t.shape == (("n",) if t.name in vectors else ()) for t in spec.inputs)
        assert {t.feeds for t in spec.outputs} == set(spec.in_place) == set(vectors) - {"gradient"}
    (scalars,) = of_role(artifacts, "scalars")
    assert [t.role for t in scalars.inputs] == ["lr", "step"]
    read = {t.name for spec in (decayed, plain) for t in spec.inputs_of("scalar")}
    assert {t.name for t in scalars.outputs} == read
    artifacts.save(tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    text = resources.files("onnxtrain").joinpath("manifest.schema.json").read_text()
    jsonschema.validate(manifest, json.loads(text), jsonschema.Draft202012Validator)


def test_gradients_come_in_the_order_of_parameters() -> None:
    artifacts = made()
    (spec,) = of_role(artifacts, "gradients")
    assert [t.name for t in spec.outputs_of("gradient")] == [
        f"{p.name}_grad" for p in artifacts.manifest.parameters
    ]
    assert not spec.inputs_of("accumulator", "reset", "lr", "grad_scale")


def test_inputs_read_after_their_update_are_not_overwritten() -> None:
    (spec,) = of_role(made(optimizer="lion"), "update")
    assert spec.in_place == ("parameter",)  # the sign reads the momentum that the average replaces


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scaled(optim.SGD):
    """A subclass of an elementwise optimizer that is not elementwise."""

    def chain(self, weight_decay: float) -> tuple[T.Transform, ...]:
        """Scale the update to the norm of the parameter."""
        return T.chain(T.scale_by_trust_ratio())


@pytest.mark.parametrize(
    "options",
    [
        {"target": "wasm"},
        {"target": "webgpu"},
        {"target": "web"},
        {"target": "portable"},
        {"target": "cuda", "optimizer": optim.SGD(lr=0.1)},
        {"clip": 1.0},
        {"accumulate": 2},
        {"precision": "fp16-mixed"},
        {"optimizer": "lamb"},
        {"optimizer": Scaled()},
    ],
    ids=str,
)
def test_builds_without_vector_models(options: dict[str, Any]) -> None:
    assert not NEW & {m.role for m in made(**options).manifest.models}


@pytest.mark.parametrize(
    "options",
    [{}, {"target": "cuda"}, {"steps_per_call": 2}, {"opset": 15}, {"precision": "bf16-mixed"}],
    ids=str,
)
def test_a_loaded_directory_trains_like_the_build(options: dict[str, Any], tmp_path: Path) -> None:
    artifacts = made(**options)
    assert {m.role for m in artifacts.manifest.models} >= NEW
    artifacts.save(tmp_path / "first", prefix="net_")
    Artifacts.load(tmp_path / "first", "net_").save(tmp_path / "second")
    ours, loaded = Trainer(artifacts), Trainer(tmp_path / "second")
    assert loaded.layout == "vector"
    assert steps(ours) == steps(loaded)
    for name, array in ours.state_dict().items():
        np.testing.assert_array_equal(array, loaded.state_dict()[name], err_msg=name)
    assert loaded.artifacts.values["fc1.weight"] is loaded.view("fc1.weight")


@pytest.mark.parametrize("layout", ["auto", "separate"])
def test_older_directories_train_as_before(layout: str, tmp_path: Path) -> None:
    """They have neither vector models nor `in_place` entries."""
    artifacts = made()
    models = tuple(
        dataclasses.replace(m, in_place=()) for m in artifacts.manifest.models if m.role not in NEW
    )
    manifest = dataclasses.replace(artifacts.manifest, models=models)
    dataclasses.replace(artifacts, manifest=manifest).save(tmp_path)
    text = (tmp_path / "manifest.json").read_text()
    assert "in_place" not in text and "members" not in text  # noqa: PT018
    older = Trainer(tmp_path, layout=layout)
    assert older.layout == ("fused" if layout == "auto" else "separate")
    newer = Trainer(artifacts)
    assert newer.layout == "vector"
    assert steps(older) == steps(newer)
    for name, array in older.state_dict().items():
        np.testing.assert_array_equal(array, newer.state_dict()[name], err_msg=name)


def test_unknown_members_are_refused() -> None:
    manifest = made().manifest
    for broken in ({"members": ("fc9",)}, {"in_place": ("fc9",)}):
        models = [dataclasses.replace(m, **broken) for m in manifest.models if m.role == "update"]
        text = dataclasses.replace(manifest, models=tuple(models)).to_json()
        with pytest.raises(CheckpointError, match="unknown tensor 'fc9'"):
            Manifest.from_json(text)


def test_builds_are_byte_identical(tmp_path: Path) -> None:
    """Including builds in a process with another hash seed."""
    script = (
        "import sys; from tests.artifacts.test_vector_models import made; made().save(sys.argv[1])"
    )
    root = Path(__file__).parents[2]
    path = os.pathsep.join((str(root), str(root / "src")))
    environment = {**os.environ, "PYTHONHASHSEED": "4711", "PYTHONPATH": path}
    subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "other")], check=True, env=environment
    )
    made().save(tmp_path / "own")
    for file in (tmp_path / "own").iterdir():
        assert file.read_bytes() == (tmp_path / "other" / file.name).read_bytes(), file.name
