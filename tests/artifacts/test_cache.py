"""The cache of builds: what it finds, what it does not cache, and its limits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onnxtrain
from onnxtrain import examples
from onnxtrain.artifacts import cache
from onnxtrain.autodiff.rule_registry import USER_RULES, Rule
from onnxtrain.optim import SGD


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ONNXTRAIN_CACHE", str(tmp_path / "builds"))
    return tmp_path / "builds"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "digits.onnx"
    examples.digits_model(path)
    return path


def build(model: Any, **options: Any) -> onnxtrain.Artifacts:
    return onnxtrain.build(model, **{"loss": "cross_entropy", "optimizer": "adamw", **options})


def entries(folder: Path) -> int:
    return len(list(folder.glob("*"))) if folder.exists() else 0


def content(artifacts: onnxtrain.Artifacts) -> tuple[Any, ...]:
    arrays = {**artifacts.values, **artifacts.state}
    return (
        {n: m.SerializeToString(deterministic=True) for n, m in artifacts.models.items()},
        list(artifacts.models),
        [(n, a.dtype, a.shape, a.tobytes()) for n, a in arrays.items()],
        artifacts.manifest.to_dict(),
    )


@pytest.mark.parametrize("target", ["cpu", "web"])
def test_the_second_build_is_read_and_equal(
    file: Path, folder: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build(file, target=target)
    assert entries(folder) == 1
    monkeypatch.setattr("onnxtrain.artifacts.build._load_source", None)  # nothing is built
    second = build(file, target=target)
    assert content(second) == content(first)
    rng = np.random.default_rng(0)
    batch = {"image": rng.random((4, 64), np.float32), "labels": rng.integers(0, 10, 4)}
    steps = [onnxtrain.Trainer(a, device="cpu").step(*batch.values()) for a in (first, second)]
    assert steps[0].loss == steps[1].loss


def test_what_changes_a_build_changes_its_file(
    file: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(file)
    build(file.read_bytes())  # the same model
    assert entries(folder) == 1
    build(file, optimizer="sgd")
    build(file, optimizer=SGD(momentum=0.5))
    build(file, target="wasm")
    build(file, train="last:1")
    assert entries(folder) == 5
    build(examples.digits_model(seed=1))
    assert entries(folder) == 6
    monkeypatch.setattr(cache, "_versions", lambda: ("onnxtrain of tomorrow",))
    build(file)
    assert entries(folder) == 7


@pytest.mark.parametrize("what", ["model in memory", "function", "rule of the user"])
def test_what_a_hash_cannot_describe_is_not_cached(
    file: Path, folder: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if what == "model in memory":
        build(onnxtrain.graph.io.load(file))
    elif what == "function":
        build(file, loss=lambda op, y: op.ReduceMean(op.Mul(y, y), keepdims=0))
    else:
        monkeypatch.setitem(USER_RULES, "Relu", Rule("Relu", lambda op, dy, x: dy))
        build(file)
    assert not entries(folder)


def test_zero_turns_it_off(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONNXTRAIN_CACHE", "0")
    assert cache.path_of(file, {"target": "cpu"}) is None


@pytest.mark.parametrize("damage", ["truncated", "changed", "empty"])
def test_a_damaged_file_is_built_again(file: Path, folder: Path, damage: str) -> None:
    first = build(file)
    (entry,) = folder.glob("*")
    data = bytearray(entry.read_bytes())
    data[-1] ^= 1
    entry.write_bytes({"truncated": data[: len(data) // 2], "changed": data, "empty": b""}[damage])
    assert content(build(file)) == content(first)
    assert content(build(file)) == content(first)


def test_the_oldest_files_leave_first(
    file: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(file)
    (first,) = folder.glob("*")
    monkeypatch.setattr(cache, "MAX_TOTAL_BYTES", int(2.2 * first.stat().st_size))
    build(file, optimizer="adam")
    build(file)  # used again
    build(file, optimizer="nadam")
    assert first.exists()
    assert entries(folder) == 2
    monkeypatch.setattr(cache, "MAX_FILE_BYTES", 1000)
    build(file, optimizer="sgd")
    assert entries(folder) == 2


def test_a_folder_that_cannot_be_written_is_not_an_error(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("ONNXTRAIN_CACHE", str(blocked / "builds"))
    assert build(file).manifest.parameters
