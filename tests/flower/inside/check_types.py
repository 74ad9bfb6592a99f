"""Types of ``onnxtrain.flower``, where Flower's own are known."""

from __future__ import annotations

import subprocess
import sys

from tests.flower.environment import ROOT


def test_types() -> None:
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable]
    command += ["--project", "tests/flower/pyright.json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "0 errors" in done.stdout
