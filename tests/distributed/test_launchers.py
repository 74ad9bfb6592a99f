"""The files of examples/distributed, with the launchers that are here."""

from __future__ import annotations

import json
import os
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import onnxtrain

EXAMPLES = Path(__file__).parents[2] / "examples" / "distributed"
SCRIPT = EXAMPLES / "train.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("launchers")
    model = onnxtrain.examples.digits_model()
    onnxtrain.build(model, loss="cross_entropy", optimizer="adamw").save(folder / "art")
    np.savez(folder / "train.npz", **onnxtrain.examples.digits_data(160))
    return folder


def losses(run: Path) -> list[float]:
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if row["kind"] == "step"]


def alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    if not (folder / "one").exists():
        arguments = [str(folder / "art"), str(folder / "train.npz"), "--out", str(folder / "one")]
        monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return losses(folder / "one")


def test_the_script_runs_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = alone(folder, monkeypatch)
    assert len(found) == 9
    assert (folder / "one" / "trained.safetensors").exists()


@pytest.mark.full
def test_torchrun_on_one_node(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = folder / "two"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"),
            *("2", SCRIPT, folder / "art", folder / "train.npz", "--out", out, "--shard-state"),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("epoch 1/3") == 1
    np.testing.assert_allclose(losses(out), alone(folder, monkeypatch), rtol=1e-5)


@pytest.mark.full
def test_two_nodes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two agents on two loopback addresses."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    nodes = []
    for node in range(2):
        environment = {**os.environ, "PATH": path, "NODE": str(node), "HOST": "127.0.0.1"}
        environment |= {"PORT": str(port), "LOCAL_ADDR": f"127.0.0.{node + 1}"}
        command = ["sh", EXAMPLES / "two_nodes.sh", folder / "art", folder / "train.npz"]
        nodes.append(subprocess.Popen([*command, "--out", folder / "nodes"], env=environment))
    assert [node.wait(300) for node in nodes] == [0, 0]
    np.testing.assert_allclose(losses(folder / "nodes"), alone(folder, monkeypatch), rtol=1e-5)


@pytest.mark.parametrize("script", ["two_nodes.sh", "slurm.sh"])
def test_shell_scripts_parse(script: str) -> None:
    subprocess.run(["bash", "-n", EXAMPLES / script], check=True)
