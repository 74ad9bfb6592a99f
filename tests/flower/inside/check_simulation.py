"""The project as ``onnxtrain federate init`` writes it, in Flower's simulation."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from examples.federated import machines

import onnxtrain
from onnxtrain.checkpoint import load_checkpoint
from onnxtrain.federation import write_project
from onnxtrain.federation.serve import flower_program, superlink
from tests.flower.inside.federations import rows, saved
from tests.flower.inside.reference import honest
from tests.flower.inside.running import RECORDING, apart, recorded

DEADLY = '''
"""The ClientApp; each client dies once, in the middle of a random round, after a random batch."""

import os
import random
from pathlib import Path

from onnxtrain.flower import client_app
from federated import settings

dying = False


def dies_once(message, context, call_next):
    global dying
    draw = random.Random(int(context.node_config["partition-id"]))
    mark = Path(os.environ["KILLED"], str(context.node_config["partition-id"]))
    turn = draw.randint(1, 3) == int(message.content["config"]["server-round"])
    dying = message.metadata.message_type == "train" and turn and not mark.exists()
    if dying:
        mark.touch()
    return call_next(message, context)


def data(context):
    rows = settings.data(context)
    return Dying(rows, random.Random(str(context.node_id)).randint(0, 3)) if dying else rows


class Dying:
    """Batches of eight rows, up to the one before which the client dies."""

    def __init__(self, rows, last):
        self.rows, self.last = rows, last

    def __iter__(self):
        for batch in range(self.last):
            yield {n: a[8 * batch : 8 * batch + 8] for n, a in self.rows.items()}
        raise RuntimeError("killed")


app = client_app(settings.artifacts, data, mods=[dies_once])
'''


def simulate(folder: Path, clients: int, rounds: int, **sources: str) -> Path:
    """Run a project in a simulation; return it."""
    pytest.importorskip("ray", reason="simulations need flwr[simulation]")
    artifacts = saved(folder / "artifacts")
    np.savez(folder / "train.npz", **rows(1, 32 * clients))
    project, home = folder / "study", folder / "home"
    write_project(project, artifacts, folder / "train.npz", clients=clients, rounds=rounds)
    for module, source in sources.items():
        (project / "federated" / f"{module}.py").write_text(source, encoding="utf-8")
    home.mkdir()
    with superlink(machines.free_port(), simulation=True, log=folder / "superlink") as address:
        machines.write_connection(home, address)
        command = [flower_program("flwr"), "run", str(project), "lab", "--stream"]
        command += ["--federation-config", f"num-supernodes={clients}"]
        command += ["--run-config", "batch-size=8 shuffle=false"]
        done = subprocess.run(
            command, env=machines.environment(home), capture_output=True, text=True, timeout=900
        )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert (project / "global.safetensors").exists(), done.stdout[-6000:]
    return project


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave Flower's settings of this machine alone."""
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "home"))
    for name in ("killed", "replies"):
        monkeypatch.setenv(name.upper(), str(tmp_path / name))
        (tmp_path / name).mkdir()


def report(project: Path) -> list[dict]:
    return [json.loads(line) for line in (project / "rounds.jsonl").read_text().splitlines()]


@pytest.mark.full
def test_the_project_runs_in_a_simulation(tmp_path: Path) -> None:
    project = simulate(tmp_path, clients=3, rounds=2)
    rounds = report(project)
    assert [(t["round"], t["kind"]) for t in rounds] == [
        *((1, "train"), (1, "evaluate")),
        *((2, "train"), (2, "evaluate")),
    ]
    assert all(sorted(t["nodes"].values()) == [32, 32, 32] for t in rounds)
    assert rounds[3]["metrics"]["loss"] < rounds[1]["metrics"]["loss"]
    weights, _ = load_checkpoint(project / "global.safetensors")
    assert all(np.isfinite(a).all() for a in weights.values())


@pytest.mark.full
def test_twenty_simulated_clients_die_once(tmp_path: Path) -> None:
    """They share processes and trainers: what one leaves half done must not reach another."""
    project = simulate(tmp_path, clients=20, rounds=5, client=DEADLY, server=RECORDING)
    assert len(list((tmp_path / "killed").iterdir())) == 20
    trained = [t for t in report(project) if t["kind"] == "train"]
    assert [t["round"] for t in trained] == [1, 2, 3, 4, 5]
    assert all(t["refused"] == {} for t in trained)
    assert [len(t["nodes"]) + len(t["failed"]) for t in trained] == [20] * 5
    assert sum(len(t["failed"]) for t in trained) == 20
    artifacts = onnxtrain.Artifacts.load(tmp_path / "artifacts")
    data = [{n: a[part::20] for n, a in rows(1, 32 * 20).items()} for part in range(20)]
    replies = [recorded(tmp_path / "replies", r) for r in range(1, 6)]
    final = honest(artifacts, data, [list(r.values()) for r in replies], within=1e-6)
    weights, _ = load_checkpoint(project / "global.safetensors")
    assert apart({n: weights[n] for n in final}, final) < 1e-6
