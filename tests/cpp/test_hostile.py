"""Files from strangers and damaged ones are refused with a sentence; nothing crashes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

import onnxtrain
from tests.cpp import nets
from tests.cpp.hostile_files import LIES, SEPARATE_LIES, checkpoints, copied, damaged, lies, texts
from tests.cpp.programs import driver, run

DAMAGES = 100


def outcomes(kind: str, tmp_path: Path, *, separate: bool = False) -> dict[str, str]:
    places = [tmp_path / name for name in ("artifacts", "good", "hostile", "batches")]
    printed = run(driver(kind), "hostile", *places, env={"SEPARATE": str(int(separate))})
    return dict(line.split("\t", 1) for line in printed.splitlines())


def plain(folder: Path) -> object:
    """What a manifest says, hashes aside."""
    data = json.loads((folder / "manifest.json").read_text())
    data["files"] = {}
    for model in data["models"]:
        model["sha256"] = ""
    return data


def prepare(tmp_path: Path) -> tuple[Path, Path]:
    """Artifacts, and a folder for what strangers make of them."""
    folder = nets.artifacts("mlp", tmp_path / "artifacts")
    batch = nets.batches("mlp", tmp_path / "batches")[0]
    trainer = onnxtrain.Trainer(folder, threads=1)
    trainer.step(**batch)
    trainer.save(tmp_path / "good")
    (tmp_path / "hostile").mkdir()
    return folder, tmp_path / "hostile"


def accepted(seen: dict[str, str]) -> dict[str, str]:
    return {name: text for name, text in seen.items() if not text.startswith("rejected: ")}


def check_lies(tmp_path: Path, kind: str) -> None:
    folder, out = prepare(tmp_path)
    names = {*lies(folder, out, LIES), *texts(folder, out)}
    seen = outcomes(kind, tmp_path)
    assert seen.keys() == names
    assert accepted(seen) == {}


def check_separate_lies(tmp_path: Path, kind: str) -> None:
    folder, out = prepare(tmp_path)
    names = {*lies(folder, out, SEPARATE_LIES)}
    seen = outcomes(kind, tmp_path, separate=True)
    assert seen.keys() == names
    assert accepted(seen) == {}


def check_checkpoints(tmp_path: Path, kind: str) -> None:
    _, out = prepare(tmp_path)
    names = {*checkpoints((tmp_path / "good").read_bytes(), out, DAMAGES)}
    seen = outcomes(kind, tmp_path)
    assert seen.keys() == names
    assert accepted(seen) == {}


def check_damaged_manifests(tmp_path: Path, kind: str) -> None:
    folder, out = prepare(tmp_path)
    rng = random.Random(7)
    for i in range(DAMAGES):
        path = copied(folder, out / f"damaged {i}") / "manifest.json"
        path.write_bytes(damaged(path.read_bytes(), rng))
    seen = outcomes(kind, tmp_path)
    assert len(seen) == DAMAGES
    # Spaces and hashes of models that nobody opened may change.
    for name in accepted(seen):
        assert plain(out / name) == plain(folder)
    assert len(accepted(seen)) < DAMAGES / 4


CHECKS = [check_lies, check_separate_lies, check_checkpoints, check_damaged_manifests]


@pytest.mark.parametrize("check", CHECKS)
def test_refusals(tmp_path: Path, check: Callable[[Path, str], None]) -> None:
    check(tmp_path, "plain")


@pytest.mark.full
@pytest.mark.parametrize("check", CHECKS)
def test_refusals_under_the_sanitizers(tmp_path: Path, check: Callable[[Path, str], None]) -> None:
    check(tmp_path, "sanitized")
