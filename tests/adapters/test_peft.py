"""What PEFT itself says of our adapters, where it is installed."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.adapters.peft_environment import PEFT
from tests.wild.produce import FILES, ROOT

TOLERANCE = 1e-4


def interpreter() -> str:
    return os.environ.get("ONNXTRAIN_PEFT_PYTHON", str(PEFT.python))


@pytest.mark.parametrize("name", ["llama-int4", "qwen3-fp32"])
def test_peft_agrees(name: str) -> None:
    if not Path(interpreter()).exists():
        pytest.skip("no environment with peft: python -m tests.adapters.peft_environment")
    if not (FILES / "genai" / name / "model.onnx").exists():
        pytest.skip("no files of the builder: make wild")
    done = subprocess.run(
        [interpreter(), "-m", "tests.adapters.peft_check", str(FILES), name],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"},
    )
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(rows) == 3, done.stderr[-2000:]
    for row in rows:
        differences = {k: v for k, v in row.items() if isinstance(v, float)}
        assert {"logits", "gradients", "loaded"} <= differences.keys(), row
        assert max(differences.values()) < TOLERANCE, row
