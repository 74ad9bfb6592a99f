"""Write a project for ``flwr run``: a ClientApp and a ServerApp over artifacts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from onnxtrain.artifacts import Artifacts
from onnxtrain.errors import SaveError
from onnxtrain.graph.io.writer import write_text

PACKAGE = "federated"

_PYPROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = {name}
version = "1.0.0"
description = "A federation that trains ONNX artifacts."
license = "Apache-2.0"
# A SuperLink installs these; onnxtrain[cpu,flower] is already installed next to Flower.
dependencies = []

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "local"

[tool.flwr.app.components]
serverapp = "{package}.server:app"
clientapp = "{package}.client:app"

# `flwr run . --run-config "rounds=20 lr=0.05"` changes these for a run.
[tool.flwr.app.config]
rounds = {rounds}
clients = {clients}
epochs = 1
batch-size = 32
lr = {lr}
shuffle = true
seed = 0
optimizer-state = "reset"
artifacts = {artifacts}
data = {data}
out = {out}
report = {report}
"""

_SETTINGS_FILE = '''\
"""Locate the artifacts and the data of this client."""

import numpy as np


def artifacts(context):
    """Return the artifacts directory of this node, or else the one in the run configuration."""
    return context.node_config.get("artifacts", context.run_config["artifacts"])


def data(context):
    """Return the training arrays by the names of the model's inputs and targets.

    A SuperNode reads its own file (--node-config 'data="mine.npz"'). Clients of a simulation, and
    SuperNodes with partition-id and num-partitions, share one file and take every n-th row.
    """
    path = context.node_config.get("data", context.run_config["data"])
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    part = int(context.node_config.get("partition-id", 0))
    parts = int(context.node_config.get("num-partitions", 1))
    return {name: array[part::parts] for name, array in arrays.items()}
'''

_CLIENT = '''\
"""The ClientApp."""

from onnxtrain.flower import client_app
from {package}.settings import artifacts, data

app = client_app(artifacts, data)
'''

_SERVER = '''\
"""The ServerApp."""

from flwr.serverapp.strategy import FedAvg
from onnxtrain.flower import server_app
from {package}.settings import artifacts


def strategy(context):
    """Return the Flower strategy that aggregates replies into new global weights."""
    clients = int(context.run_config["clients"])
    return FedAvg(
        min_train_nodes=clients, min_evaluate_nodes=clients, min_available_nodes=clients
    )


app = server_app(artifacts, strategy)
'''

_README = """\
# {title}

    flwr run . local --stream    # a simulation; `local` is in Flower's own config.toml

On separate machines, start a SuperLink with its web server, then clients, then a run:

    onnxtrain federate serve
    flower-supernode --insecure --superlink 127.0.0.1:8000 --node-config 'data="mine.npz"'
    flwr run . lab --stream      # `lab` is a SuperLink in Flower's config.toml

`{package}/settings.py` locates artifacts and data, `{package}/server.py` defines the strategy.
"""


def write_project(
    directory: Path,
    artifacts: Path,
    data: Path | None = None,
    *,
    clients: int = 2,
    rounds: int = 10,
) -> list[Path]:
    """Write a project; return its files.

    Args:
        directory: the project directory, created if missing; existing files are not overwritten.
        artifacts: the artifacts directory, which server and Python clients read.
        data: an .npz file for clients without their own.
        clients: number of clients a round waits for.
        rounds: number of rounds.

    Raises:
        SaveError: if one of the files exists.
    """
    loaded = Artifacts.load(artifacts)
    folder = directory.resolve()
    name = re.sub(r"[^a-z0-9]+", "-", folder.name.lower()).strip("-") or "federation"
    values: dict[str, Any] = {
        "title": name,
        "package": PACKAGE,
        "rounds": rounds,
        "clients": clients,
        "lr": float(loaded.manifest.optimizer["lr"]),
        # JSON strings are valid TOML strings.
        "name": json.dumps(name),
        "artifacts": json.dumps(str(artifacts.resolve())),
        "data": json.dumps(str(data.resolve()) if data else "train.npz"),
        "out": json.dumps(str(folder / "global.safetensors")),
        "report": json.dumps(str(folder / "rounds.jsonl")),
    }
    texts = {
        "pyproject.toml": _PYPROJECT.format(**values),
        "README.md": _README.format(**values),
        f"{PACKAGE}/__init__.py": f'"""{name}."""\n',
        f"{PACKAGE}/settings.py": _SETTINGS_FILE,
        f"{PACKAGE}/client.py": _CLIENT.format(**values),
        f"{PACKAGE}/server.py": _SERVER.format(**values),
    }
    paths = {folder / path: text for path, text in texts.items()}
    existing = [str(path) for path in paths if path.exists()]
    if existing:
        raise SaveError(f"{existing[0]} already exists\nhint: choose another directory")
    for path, text in paths.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    return list(paths)
