"""Files from strangers and damaged ones are refused with a sentence; nothing crashes."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

import onnxtrain
from tests.cpp import nets
from tests.cpp.hostile_files import checkpoints, copied, damaged, lies
from tests.cpp.programs import driver, run


def outcomes(kind: str, folder: Path, good: Path, out: Path, batches: Path) -> dict[str, str]:
    printed = run(driver(kind), "hostile", folder, good, out, batches)
    return dict(line.split("\t", 1) for line in printed.splitlines())


def plain(folder: Path) -> object:
    """What a manifest says, hashes aside."""
    data = json.loads((folder / "manifest.json").read_text())
    data["files"] = {}
    for model in data["models"]:
        model["sha256"] = ""
    return data


def check(tmp_path: Path, kind: str, count: int) -> None:
    folder = nets.artifacts("mlp", tmp_path / "artifacts")
    batch = nets.batches("mlp", tmp_path / "batches")[0]
    trainer = onnxtrain.Trainer(folder, threads=1)
    trainer.step(**batch)
    trainer.save(tmp_path / "good")
    out = tmp_path / "hostile"
    out.mkdir()
    names = {*lies(folder, out), *checkpoints((tmp_path / "good").read_bytes(), out, count)}
    rng = random.Random(7)
    for i in range(count):
        place = copied(folder, out / f"damaged {i}")
        path = place / "manifest.json"
        path.write_bytes(damaged(path.read_bytes(), rng))
    seen = outcomes(kind, folder, tmp_path / "good", out, tmp_path / "batches")
    assert {n: seen[n] for n in names if not seen[n].startswith("refused: ")} == {}
    for i in range(count):
        # Spaces and hashes of models that nobody opened may change.
        if not seen[f"damaged {i}"].startswith("refused: "):
            assert plain(out / f"damaged {i}") == plain(folder)
    assert len(seen) == len(names) + count


def test_refusals(tmp_path: Path) -> None:
    check(tmp_path, "plain", count=100)


@pytest.mark.full
def test_refusals_under_the_sanitizers(tmp_path: Path) -> None:
    check(tmp_path, "sanitized", count=100)
