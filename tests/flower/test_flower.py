"""What needs Flower, in the environment that has it: the files of ``inside/``."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.flower.environment import ROOT, python, variables

INSIDE = sorted(Path(__file__).with_name("inside").glob("check_*.py"))


def run_inside(path: Path, *options: str) -> None:
    interpreter = python()
    command = [interpreter, "-m", "pytest", "-q", "-x", "-n0", "-p", "no:randomly", *options]
    command += ["-o", "python_files=check_*.py", "-o", "filterwarnings=default", str(path)]
    done = subprocess.run(
        command, cwd=ROOT, env=variables(interpreter), capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]


@pytest.mark.parametrize("path", INSIDE, ids=lambda path: path.stem.removeprefix("check_"))
def test_inside(path: Path) -> None:
    run_inside(path, "-m", "not full")


@pytest.mark.full
@pytest.mark.parametrize("path", INSIDE, ids=lambda path: path.stem.removeprefix("check_"))
def test_the_long_ones(path: Path) -> None:
    if "mark.full" not in path.read_text(encoding="utf-8"):
        pytest.skip("it has no long tests")
    run_inside(path, "-m", "full")
