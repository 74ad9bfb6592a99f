"""A federation of stock programs on this machine's loopback, for tests."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from examples.federated import machines

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
from federated.settings import artifacts


class Recorded(FedAvg):
    def aggregate_train(self, server_round, replies):
        replies = list(replies)
        for place, reply in enumerate(replies):
            if reply.has_content():
                arrays = {n: a.numpy() for n, a in reply.content["arrays"].items()}
                examples = reply.content["metrics"]["num-examples"]
                name = f"{server_round}-{place:03}-{reply.metadata.src_node_id}.npz"
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
        """Write a project for this number of clients."""
        where = self.folder / "project"
        write_project(where, self.artifacts, self.data / "1.npz", clients=clients)
        (where / "federated" / "server.py").write_text(RECORDING, encoding="utf-8")
        return where

    def python(self, part: int, log: str = "") -> Any:
        """Start a SuperNode."""
        data, log_file = str(self.data / f"{part}.npz"), self.logs / (log or f"python{part}")
        client = machines.supernode(self.address, self.home, log_file, data=data)
        return self.stack.enter_context(client)

    def script(self, file: Path, *arguments: str, log: str) -> Any:
        """Start a program of Node that takes the SuperLink's address."""
        command = ["node", file, self.address, *arguments]
        return self.stack.enter_context(machines.process(command, self.logs / log))

    def node(self, part: int, *options: str) -> Any:
        """Start a client in Node."""
        data = self.data / f"{part}.json"
        client = machines.node_client(
            self.address, self.artifacts, data, self.logs / f"node{part}", *options
        )
        return self.stack.enter_context(client)

    def tab(self, part: int) -> str:
        """Open a tab, behind its own proxy; return the address of the proxy."""
        folders = machines.page_folders(self.artifacts, self.data)
        proxy = self.stack.enter_context(machines.proxy(self.address, folders, self.logs / "proxy"))
        page = f"{proxy}/?data={part}.json&heartbeat=30"
        self.stack.enter_context(machines.tab(page, self.logs / f"tab{part}"))
        return proxy

    def run(self, project: Path, **config: object) -> dict[str, np.ndarray]:
        """Run, and return the global weights."""
        machines.flwr_run(project, self.home, self.logs / "run", 900, **config)
        return load_checkpoint(project / "global.safetensors")[0]

    def replies(self, server_round: int) -> list[dict[str, np.ndarray]]:
        """Return what came back in a round, in the order in which it was averaged."""
        return list(self.replies_of(server_round).values())

    def replies_of(self, server_round: int) -> dict[str, dict[str, np.ndarray]]:
        """Return the same by the numbers of nodes."""
        return recorded(self.folder / "replies", server_round)

    def number(self, log: str, seconds: float = 90) -> str:
        """Return the number that the node with this log got, once it has one."""
        path, end = self.logs / log, time.monotonic() + seconds
        while time.monotonic() < end:
            text = path.read_text(errors="replace") if path.exists() else ""
            ids = re.findall(r"(?:SuperNode ID: |joined as node )(\d+)", text)
            if ids:
                return ids[-1]
            time.sleep(0.2)
        raise AssertionError(self.all_logs())

    def report(self, project: Path) -> list[dict[str, Any]]:
        """Return what the server wrote about its rounds."""
        lines = (project / "rounds.jsonl").read_text("utf-8").splitlines()
        return [json.loads(line) for line in lines]

    def all_logs(self) -> str:
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


def recorded(folder: Path, server_round: int) -> dict[str, dict[str, np.ndarray]]:
    """Return the replies of a round that the ServerApp wrote down, by the numbers of nodes."""
    files = sorted(folder.glob(f"{server_round}-*.npz"))
    return {file.stem.split("-")[2]: dict(np.load(file)) for file in files}


def mean(replies: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Return the weighted mean, in float64."""
    total = sum(float(r["examples"]) for r in replies)
    names = [n for n in replies[0] if n != "examples"]
    return {
        n: sum(r[n].astype(np.float64) * float(r["examples"]) for r in replies) / total
        for n in names
    }


def apart(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    """Return the largest relative distance of two sets of weights."""
    return max(float(np.linalg.norm(a[n] - b[n]) / np.linalg.norm(b[n])) for n in b)


needs_browser = pytest.mark.skipif(
    not (os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")),
    reason="no browser",
)
