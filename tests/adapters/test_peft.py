"""Compare adapters with PEFT itself, in an environment that has it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.adapters.peft_environment import PEFT
from tests.wild.places import FILES, ROOT

TOLERANCE = 1e-4


def interpreter() -> str:
    return os.environ.get("ONNXTRAIN_PEFT_PYTHON", str(PEFT.python))


def rows_of(program: str, *names: str) -> list[dict[str, Any]]:
    """Run a program in the environment with peft; return its output."""
    return lines_of("-m", f"tests.adapters.{program}", str(FILES), *names)


def lines_of(*arguments: str) -> list[dict[str, Any]]:
    """Run Python in the environment with peft; return the JSON lines it prints."""
    if not Path(interpreter()).exists():
        pytest.skip("no environment with peft: python -m tests.adapters.peft_environment")
    done = subprocess.run(
        [interpreter(), *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "HF_HUB_OFFLINE": "1"},
    )
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert rows, done.stderr[-2000:]
    return rows


def test_long_runs_match_torch_within_its_own_divergence() -> None:
    name = "llama-int4"
    if not (FILES / "genai" / name / "model.onnx").exists():
        pytest.skip("no files of the builder: make wild")
    code = "import sys; from tests.adapters.peft_nets import curves; curves(*sys.argv[1:])"
    calm, wild = lines_of("-c", code, str(FILES), name)
    assert calm["largest difference"] < TOLERANCE
    assert wild["of torch"] < wild["steps"], "torch follows itself: ours must follow it too"
    assert wild["first step beyond 1e-4"] > 0.6 * wild["of torch"]


def agrees(row: dict[str, Any]) -> None:
    differences = {k: v for k, v in row.items() if isinstance(v, float)}
    assert {"logits", "gradients", "loaded"} <= differences.keys(), row
    assert max(differences.values()) < TOLERANCE, row


@pytest.mark.parametrize("name", ["llama-int4", "qwen3-fp32"])
def test_peft_agrees(name: str) -> None:
    if not (FILES / "genai" / name / "model.onnx").exists():
        pytest.skip("no files of the builder: make wild")
    rows = rows_of("peft_check", name)
    assert len(rows) == 3
    for row in rows:
        agrees(row)


EXPORTED = (
    *("mobius/llama", "mobius/qwen3", "mobius/phi3", "mobius/gpt2", "mobius/starcoder2"),
    *("optimum/qwen2", "optimum/bert"),
)


def test_mobius_and_optimum_files_round_trip_to_peft() -> None:
    if not all((FILES / f"{name}.onnx").exists() for name in EXPORTED):
        pytest.skip("no files of mobius and optimum: make wild")
    rows = rows_of("peft_exporters", *EXPORTED)
    assert [row["file"] for row in rows] == list(EXPORTED)
    for row in rows:
        agrees(row)
