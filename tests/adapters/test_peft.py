"""What PEFT itself says of our adapters, where it is installed."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.adapters.peft_environment import PEFT
from tests.wild.produce import FILES, ROOT

TOLERANCE = 1e-4


def interpreter() -> str:
    return os.environ.get("ONNXTRAIN_PEFT_PYTHON", str(PEFT.python))


def rows_of(name: str, count: int, *arguments: str) -> list[dict[str, Any]]:
    """Return the lines of JSON that a program writes where peft is installed."""
    if not Path(interpreter()).exists():
        pytest.skip("no environment with peft: python -m tests.adapters.peft_environment")
    if not (FILES / "genai" / name / "model.onnx").exists():
        pytest.skip("no files of the builder: make wild")
    done = subprocess.run(
        [interpreter(), *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "HF_HUB_OFFLINE": "1"},
    )
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(rows) == count, done.stderr[-2000:]
    return rows


def test_a_long_run_follows_torch_as_far_as_torch_follows_itself() -> None:
    name = "llama-int4"
    code = "import sys; from tests.adapters.peft_nets import curves; curves(*sys.argv[1:])"
    calm, wild = rows_of(name, 2, "-c", code, str(FILES), name)
    assert calm["largest difference"] < TOLERANCE
    assert wild["of torch"] < wild["steps"], "torch follows itself: ours must follow it too"
    assert wild["first step beyond 1e-4"] > 0.6 * wild["of torch"]


@pytest.mark.parametrize("name", ["llama-int4", "qwen3-fp32"])
def test_peft_agrees(name: str) -> None:
    for row in rows_of(name, 3, "-m", "tests.adapters.peft_check", str(FILES), name):
        differences = {k: v for k, v in row.items() if isinstance(v, float)}
        assert {"logits", "gradients", "loaded"} <= differences.keys(), row
        assert max(differences.values()) < TOLERANCE, row
