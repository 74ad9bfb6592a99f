"""Run the tests in ``inside/`` in an environment with Flower installed."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.flower.environment import ROOT, SIMULATION, python, variables

INSIDE = sorted(Path(__file__).with_name("inside").glob("check_*.py"))


def counts(path: Path) -> tuple[int, int]:
    """Return the number of tests in a file, and how many of them are marked full."""
    text = path.read_text(encoding="utf-8")
    return len(re.findall(r"^def test_", text, re.M)), text.count("@pytest.mark.full\n")


FAST = [path for path in INSIDE if counts(path)[0] > counts(path)[1]]
LONG = [path for path in INSIDE if counts(path)[1]]


def run_inside(path: Path, *options: str, extras: str = "") -> None:
    interpreter = python(extras)
    command = [interpreter, "-m", "pytest", "-q", "-x", "-n0", "-p", "no:randomly", *options]
    command += ["-o", "python_files=check_*.py", "-o", "filterwarnings=default", str(path)]
    result = subprocess.run(
        command, cwd=ROOT, env=variables(interpreter), capture_output=True, text=True, timeout=1800
    )
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-4000:]


@pytest.mark.parametrize("path", FAST, ids=lambda path: path.stem.removeprefix("check_"))
def test_inside(path: Path) -> None:
    run_inside(path, "-m", "not full")


@pytest.mark.full
@pytest.mark.parametrize("path", LONG, ids=lambda path: path.stem.removeprefix("check_"))
def test_inside_full(path: Path) -> None:
    simulated = 'importorskip("ray"' in path.read_text(encoding="utf-8")
    run_inside(path, "-m", "full", extras=SIMULATION if simulated else "")
