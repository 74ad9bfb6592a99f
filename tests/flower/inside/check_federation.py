"""A stock ``flwr run`` with clients in Python, in Node and in a tab, on this machine's loopback."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from examples.federated import machines

import onnxtrain
from onnxtrain.checkpoint import load_checkpoint
from onnxtrain.federation import write_project
from onnxtrain.federation.serve import superlink
from tests.flower.inside.federations import rows, saved

RECORDING = '''
"""The ServerApp; what clients reply is written down."""

import os

import numpy as np
from flwr.serverapp.strategy import FedAvg
from onnxtrain.flower import server_app
from federated.places import artifacts


class Recorded(FedAvg):
    def aggregate_train(self, server_round, replies):
        replies = list(replies)
        for reply in replies:
            if reply.has_content():
                arrays = {n: a.numpy() for n, a in reply.content["arrays"].items()}
                examples = reply.content["metrics"]["num-examples"]
                name = f"{server_round}-{reply.metadata.src_node_id}.npz"
                np.savez(os.path.join(os.environ["REPLIES"], name), examples=examples, **arrays)
        return super().aggregate_train(server_round, replies)


def strategy(context):
    n = int(context.run_config["clients"])
    return Recorded(
        fraction_evaluate=0.0, min_train_nodes=n, min_available_nodes=n, min_evaluate_nodes=0
    )


app = server_app(artifacts, strategy, timeout=120)
'''


class Federation:
    """A SuperLink, a project, and clients on demand."""

    def __init__(self, folder: Path, address: str, stack: contextlib.ExitStack) -> None:
        self.folder, self.address, self.stack = folder, address, stack
        self.home, self.logs = folder / "home", folder / "logs"
        self.artifacts, self.data = folder / "artifacts", folder / "data"

    def project(self, clients: int) -> Path:
        """Write a project for so many clients."""
        where = self.folder / "project"
        write_project(where, self.artifacts, self.data / "1.npz", clients=clients)
        (where / "federated" / "server.py").write_text(RECORDING, encoding="utf-8")
        return where

    def python(self, part: int) -> Any:
        """Start a SuperNode."""
        data = str(self.data / f"{part}.npz")
        client = machines.supernode(self.address, self.home, self.logs / f"python{part}", data=data)
        return self.stack.enter_context(client)

    def node(self, part: int, *options: str) -> Any:
        """Start a client in Node."""
        data = self.data / f"{part}.json"
        client = machines.node_client(
            self.address, self.artifacts, data, self.logs / f"node{part}", *options
        )
        return self.stack.enter_context(client)

    def tab(self, part: int) -> str:
        """Open a tab, through a door of its own; give the door's address."""
        folders = machines.page_folders(self.artifacts, self.data)
        door = self.stack.enter_context(machines.door(self.address, folders, self.logs / "door"))
        page = f"{door}/?data={part}.json&heartbeat=30"
        self.stack.enter_context(machines.tab(page, self.logs / f"tab{part}"))
        return door

    def run(self, project: Path, **config: object) -> dict[str, np.ndarray]:
        """Run, and return the global weights."""
        machines.flwr_run(project, self.home, self.logs / "run", 900, **config)
        return load_checkpoint(project / "global.safetensors")[0]

    def replies(self, server_round: int) -> list[dict[str, np.ndarray]]:
        """Return what came back in a round."""
        files = sorted((self.folder / "replies").glob(f"{server_round}-*.npz"))
        return [dict(np.load(file)) for file in files]

    def told(self) -> str:
        """Return the ends of all logs."""
        logs = sorted(self.logs.iterdir())
        return "\n".join(f"== {p.name}\n{p.read_text(errors='replace')[-1500:]}" for p in logs)


@pytest.fixture
def federation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Federation]:
    for name in ("home", "logs", "data", "replies"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("REPLIES", str(tmp_path / "replies"))
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "0")
    paths = [str(machines.ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    saved(tmp_path / "artifacts", target="wasm")
    for part in range(1, 5):
        np.savez(tmp_path / "data" / f"{part}.npz", **rows(part))
        machines.write_columns(tmp_path / "data" / f"{part}.json", rows(part))
    build_javascript()
    with contextlib.ExitStack() as stack:
        log = tmp_path / "logs" / "superlink"
        address = stack.enter_context(superlink(machines.free_port(), log=log))
        machines.write_connection(tmp_path / "home", address)
        yield Federation(tmp_path, address, stack)


def build_javascript() -> None:
    """Compile the package, if its sources are newer."""
    if not (machines.WEB / "node_modules").is_dir():
        pytest.skip("web/node_modules is not there: npm ci --ignore-scripts in web/")
    package = machines.WEB / "packages" / "onnxtrain"
    built = package / "dist" / "flower" / "index.js"
    newest = max(p.stat().st_mtime for p in (package / "src").rglob("*.ts"))
    if not built.exists() or built.stat().st_mtime < newest:
        command = ["npm", "run", "build", "--workspace", "onnxtrain"]
        subprocess.run(command, cwd=machines.WEB, check=True, capture_output=True)


def mean(replies: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Return the weighted mean, in float64."""
    total = sum(float(r["examples"]) for r in replies)
    names = [n for n in replies[0] if n != "examples"]
    return {
        n: sum(r[n].astype(np.float64) * float(r["examples"]) for r in replies) / total
        for n in names
    }


def retrained(artifacts: Path, rounds: int, parts: list[int]) -> dict[str, np.ndarray]:
    """Return the weights that one process finds with all data."""
    trainer = onnxtrain.Trainer(artifacts)
    weights = {p.name: np.array(trainer.parameters[p.name]) for p in trainer.manifest.parameters}
    for _ in range(rounds):
        replies = []
        for part in parts:
            trainer.load_weights(weights)
            trainer.fit(rows(part), 1, batch_size=8, shuffle=False, progress=False)
            new = {n: np.array(trainer.parameters[n]) for n in weights}
            replies.append({**new, "examples": np.asarray(len(rows(part)["x"]))})
        weights = {n: a.astype(np.float32) for n, a in mean(replies).items()}
    return weights


def apart(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    """Return the largest relative distance of two sets of weights."""
    return max(float(np.linalg.norm(a[n] - b[n]) / np.linalg.norm(b[n])) for n in b)


def three_kinds(federation: Federation, rounds: int) -> None:
    project = federation.project(3)
    federation.python(1)
    federation.node(2)
    federation.tab(3)
    try:
        found = federation.run(project, rounds=rounds, batch_size=8, shuffle=False)
    except RuntimeError as error:
        raise AssertionError(f"{error}\n{federation.told()}") from error
    for server_round in range(1, rounds + 1):
        assert len(federation.replies(server_round)) == 3, federation.told()
    # The order of replies decides the last bits of a mean in float32.
    assert apart(found, mean(federation.replies(rounds))) < 1e-6
    # Other kernels round otherwise, and ten rounds carry that on.
    assert apart(found, retrained(federation.artifacts, rounds, [1, 2, 3])) < 1e-5


needs_browser = pytest.mark.skipif(
    not (os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")),
    reason="no browser",
)


@needs_browser
def test_python_node_and_a_tab_train_together(federation: Federation) -> None:
    three_kinds(federation, rounds=2)


@needs_browser
@pytest.mark.full
def test_ten_rounds(federation: Federation) -> None:
    three_kinds(federation, rounds=10)


def test_the_interface_is_the_one_that_was_read(federation: Federation) -> None:
    from onnxtrain.federation.proxy import CALLS, FLEET

    with urllib.request.urlopen(f"{federation.address}/openapi.json") as answer:
        told = json.load(answer)
    paths = {p for p in told["paths"] if p.startswith(FLEET)}
    assert paths == {FLEET + call for call in CALLS}, (
        f"Flower {told['info']['version']} has other calls"
    )


def test_the_door_lets_only_nodes_through(federation: Federation) -> None:
    folders = {"/": machines.PAGES}
    door = federation.stack.enter_context(
        machines.door(federation.address, folders, federation.logs / "door")
    )

    def status(path: str, method: str = "POST") -> int:
        request = urllib.request.Request(door + path, data=b"" if method == "POST" else None)
        request.method = method
        try:
            with urllib.request.urlopen(request) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code

    assert status("/", "GET") == 200
    assert status("/v1/fleet/pull-messages") in (401, 415)  # the SuperLink's own answers
    assert status("/v1/fleet/../control/start-run") in (404, 405)
    for path in (
        "/v1/control/start-run",
        "/v1/control/list-runs",
        "/v1/runtime/x",
        "/v1/fleet/other",
    ):
        assert status(path) in (404, 405)
    assert status("/openapi.json", "GET") == 404


def test_a_node_that_is_killed_comes_back_with_its_id(federation: Federation) -> None:
    project, store = federation.project(2), str(federation.folder / "store")
    federation.python(1)
    first = federation.node(2, store)
    log = federation.logs / "node2"
    end = time.monotonic() + 60
    while "joined as node" not in (log.read_text() if log.exists() else ""):
        assert time.monotonic() < end, federation.told()
        time.sleep(0.2)
    first.kill()
    first.wait()
    federation.node(2, store)
    found = federation.run(project, rounds=2, batch_size=8, shuffle=False)
    joined = [line for line in log.read_text().splitlines() if line.startswith("joined as node")]
    assert len(joined) == 2
    assert joined[0] == joined[1]
    assert apart(found, mean(federation.replies(2))) < 1e-6


@needs_browser
@pytest.mark.full
def test_a_tab_that_reloads_goes_on(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RELOAD_AFTER", "6")
    project = federation.project(2)
    federation.python(1)
    federation.tab(2)
    found = federation.run(project, rounds=2, batch_size=8, shuffle=False)
    lines = (federation.logs / "tab2").read_text().splitlines()
    joined = [line for line in lines if line.startswith("joined as node")]
    assert "reloaded" in lines, federation.told()
    assert len(joined) == 2, federation.told()
    assert joined[0] == joined[1]
    assert apart(found, mean(federation.replies(2))) < 1e-6


@pytest.mark.full
def test_nineteen_of_twenty_clients_are_killed_once(federation: Federation) -> None:
    """Nineteen in Node, and one in Python that stays; the killed come back with what they kept."""
    rng = np.random.default_rng(0)
    project = federation.project(20)
    federation.python(1)
    stores = {i: str(federation.folder / "stores" / str(i)) for i in range(19)}
    alive = {i: federation.node(1 + i % 4, store) for i, store in stores.items()}

    def kill_all() -> None:
        for i in rng.permutation(19):
            time.sleep(float(rng.uniform(1, 4)))
            alive[i].kill()
            alive[i].wait()
            time.sleep(float(rng.uniform(0, 2)))
            federation.node(1 + int(i) % 4, stores[int(i)])

    killer = threading.Thread(target=kill_all)
    killer.start()
    try:
        found = federation.run(project, rounds=6, batch_size=8, shuffle=False)
    finally:
        killer.join()
    last = federation.replies(6)
    assert all(np.isfinite(a).all() for a in found.values())
    assert apart(found, mean(last)) < 1e-6
    assert len(last) >= 15, federation.told()
