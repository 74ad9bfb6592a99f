"""The project that ``flwr run`` takes: a ClientApp and a ServerApp over artifacts."""

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
# onnxtrain[cpu,flower] is where Flower is; a SuperLink installs what else is listed here.
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
"""Where this client's artifacts and data are."""

import numpy as np


def artifacts(context):
    """Return the directory of artifacts: the client's own, or the one that the run names."""
    return context.node_config.get("artifacts", context.run_config["artifacts"])


def data(context):
    """Return the arrays to train on, by the names of the model's inputs and targets.

    A SuperNode has a file of its own (--node-config 'data="mine.npz"'). Clients of a simulation,
    and SuperNodes with partition-id and num-partitions, share one by rows.
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
from {package}.places import artifacts, data

app = client_app(artifacts, data)
'''

_SERVER = '''\
"""The ServerApp."""

from flwr.serverapp.strategy import FedAvg
from onnxtrain.flower import server_app
from {package}.places import artifacts


def strategy(context):
    """Return how replies become the new global weights: any strategy of Flower."""
    clients = int(context.run_config["clients"])
    return FedAvg(
        min_train_nodes=clients, min_evaluate_nodes=clients, min_available_nodes=clients
    )


app = server_app(artifacts, strategy)
'''

_README = """\
# {title}

    flwr run . local --stream    # a simulation; `local` is in Flower's own config.toml

With machines of their own, start a SuperLink and its door for pages, then clients, then a run:

    onnxtrain federate serve
    flower-supernode --insecure --superlink 127.0.0.1:8000 --node-config 'data="mine.npz"'
    flwr run . lab --stream      # where `lab` is a SuperLink in Flower's config.toml

`{package}/places.py` says where artifacts and data are, `{package}/server.py` has the strategy.
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
        directory: made if it is not there; files in it are not overwritten.
        artifacts: the directory that is trained; server and Python clients open it.
        data: an .npz file for clients that have none of their own.
        clients: how many have to be there for a round.
        rounds: how many.

    Raises:
        SaveError: there is such a file already.
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
        # JSON's strings are also TOML's.
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
        f"{PACKAGE}/places.py": _SETTINGS_FILE,
        f"{PACKAGE}/client.py": _CLIENT.format(**values),
        f"{PACKAGE}/server.py": _SERVER.format(**values),
    }
    paths = {folder / place: text for place, text in texts.items()}
    taken = [str(path) for path in paths if path.exists()]
    if taken:
        raise SaveError(f"{taken[0]} is there already\nhint: name a new directory")
    for path, text in paths.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    return list(paths)
