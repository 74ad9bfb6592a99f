"""The project as ``onnxtrain federate init`` writes it, in Flower's simulation."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from examples.federated import machines

from onnxtrain.checkpoint import load_checkpoint
from onnxtrain.federation import write_project
from onnxtrain.federation.serve import flower_program, superlink
from tests.flower.inside.federations import rows, saved


@pytest.mark.full
def test_the_project_runs_in_a_simulation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="simulations need flwr[simulation]")
    artifacts = saved(tmp_path / "artifacts")
    np.savez(tmp_path / "train.npz", **rows(1, 96))
    project = tmp_path / "study"
    write_project(project, artifacts, tmp_path / "train.npz", clients=3, rounds=2)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("FLWR_HOME", str(home))
    with superlink(machines.free_port(), simulation=True, log=tmp_path / "superlink") as address:
        machines.write_connection(home, address)
        command = [flower_program("flwr"), "run", str(project), "lab", "--stream"]
        command += ["--federation-config", "num-supernodes=3"]
        done = subprocess.run(
            command, env=machines.environment(home), capture_output=True, text=True, timeout=600
        )
    lines = (
        (project / "rounds.jsonl").read_text("utf-8").splitlines() if not done.returncode else []
    )
    told = [json.loads(line) for line in lines]
    assert [(t["round"], t["kind"]) for t in told] == [
        *((1, "train"), (1, "evaluate")),
        *((2, "train"), (2, "evaluate")),
    ], done.stdout[-3000:] + done.stderr[-3000:]
    assert all(sorted(t["nodes"].values()) == [32, 32, 32] for t in told)
    assert told[3]["metrics"]["loss"] < told[1]["metrics"]["loss"]
    weights, _ = load_checkpoint(project / "global.safetensors")
    assert all(np.isfinite(a).all() for a in weights.values())
