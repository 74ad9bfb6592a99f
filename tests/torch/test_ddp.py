"""Two processes train as one with the joint batch, and survive the death of one."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "ddp.py"


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += [
        "--master-port",
        "0",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "localhost:0",
    ]
    command += [str(SCRIPT), *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    return subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )


def test_two_processes_equal_one_and_go_on_after_a_death(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two, kept = tmp_path / "one.json", tmp_path / "two.json", tmp_path / "last.pt"
    monkeypatch.setattr(sys, "argv", ["ddp.py", "--epochs", "3", "--losses", str(one)])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    broken = run("--epochs", 3, "--checkpoint", kept, "--die", "2:1", "--losses", two)
    assert broken.returncode != 0
    assert "SIGKILL" in broken.stderr + broken.stdout or "Signal 9" in broken.stderr
    assert not two.exists()
    again = run("--epochs", 3, "--checkpoint", kept, "--losses", two)
    assert again.returncode == 0, again.stderr
    assert "resumed after epoch 2" in again.stdout
    wanted, actual = json.loads(one.read_text()), json.loads(two.read_text())
    assert len(wanted) == 15
    assert actual == pytest.approx(wanted, rel=1e-5, abs=1e-5)
    assert wanted[-1] < 0.7 * wanted[0]


def test_shares_of_unequal_size_count_by_their_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """240 rows in batches of 239: shares of 120 and 119 rows, then of 1 row and none."""
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    options = ["--epochs", "3", "--batch", "239", "--losses"]
    monkeypatch.setattr(sys, "argv", ["ddp.py", *options, str(one)])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    done = run(*options, two)
    assert done.returncode == 0, done.stderr
    wanted = json.loads(one.read_text())
    assert len(wanted) == 6
    assert json.loads(two.read_text()) == pytest.approx(wanted, rel=1e-5, abs=1e-5)
