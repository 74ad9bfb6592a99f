"""Bytes and time of a round, beside an app in the style of Flower's PyTorch quickstart.

    make bench-federated        # about ten minutes on two quiet cores

The same nets, digits, batches and plain SGD (AdamW for adapters); two clients each, over a stock
SuperLink on loopback. Every client speaks through a relay that counts what passes, headers
included. The small net is 64-64-10; the large one, 64-640-640-10, PyTorch trains as a whole, and
onnxtrain by adapters.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import select
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
from examples.digits import digit_net
from examples.federated import adapters, machines
from sklearn.datasets import load_digits

import onnxtrain
from onnxtrain.federation import write_project
from onnxtrain.federation.serve import superlink

CLIENTS = 2
BATCH, LR = 32, 0.2

TORCH_CLIENT = '''
"""A ClientApp as Flower's quickstart for PyTorch has it, over the same data."""

import numpy as np
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

torch.set_num_threads(1)
app = ClientApp()


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        sizes = [64, *HIDDEN, 10]
        self.layers = torch.nn.ModuleList(map(torch.nn.Linear, sizes[:-1], sizes[1:]))

    def forward(self, x):
        *hidden, last = self.layers
        for layer in hidden:
            x = torch.nn.functional.dropout(torch.relu(layer(x)), DROPOUT, self.training)
        return last(x)


def load(context):
    with np.load(context.node_config["data"]) as file:
        data = torch.utils.data.TensorDataset(*map(torch.tensor, (file["image"], file["labels"])))
    return torch.utils.data.DataLoader(data, batch_size=32, shuffle=True)


@app.train()
def train(message, context):
    model, rows = Net(), load(context)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    descent = torch.optim.SGD(model.parameters(), lr=0.2)
    model.train()
    total = 0.0
    for x, y in rows:
        descent.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        descent.step()
        total += loss.item()
    metrics = MetricRecord({"loss": total / len(rows), "num-examples": len(rows.dataset)})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content, reply_to=message)


@app.evaluate()
def evaluate(message, context):
    model, rows = Net(), load(context)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    model.eval()
    with torch.no_grad():
        losses = [torch.nn.functional.cross_entropy(model(x), y).item() for x, y in rows]
    metrics = MetricRecord({"loss": float(np.mean(losses)), "num-examples": len(rows.dataset)})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)
'''
TORCH_SERVER = '''
"""The ServerApp of that quickstart."""

from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

from federated.client import Net

app = ServerApp()


@app.main()
def main(grid, context):
    FedAvg().start(
        grid=grid,
        initial_arrays=ArrayRecord(Net().state_dict()),
        num_rounds=int(context.run_config["rounds"]),
    )
'''


class Relay:
    """Passes bytes on to a server, and counts them."""

    def __init__(self, address: str) -> None:
        host, port = address.removeprefix("http://").split(":")
        self.up = self.down = 0
        self._target = (host, int(port))
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self._server.accept()
            threading.Thread(target=self._pass, args=(client,), daemon=True).start()

    def _pass(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError), socket.create_connection(self._target) as server:
            while True:
                for ready in select.select([client, server], [], [])[0]:
                    data = ready.recv(65536)
                    if not data:
                        return
                    if ready is client:
                        self.up += len(data)
                        server.sendall(data)
                    else:
                        self.down += len(data)
                        client.sendall(data)


def write_data(folder: Path) -> None:
    digits = load_digits()
    images, labels = (digits.data / 16).astype(np.float32), digits.target.astype(np.int64)
    for part in range(CLIENTS):
        columns = {"image": images[part::CLIENTS], "labels": labels[part::CLIENTS]}
        np.savez(folder / f"{part}.npz", **columns)
        machines.write_columns(folder / f"{part}.json", columns)


def write_ours(folder: Path, artifacts: Path, freeze: str | None = None) -> None:
    onnxtrain.build(
        digit_net(),
        loss="cross_entropy",
        optimizer=f"sgd:lr={LR}",
        freeze=freeze,
        target="wasm",
    ).save(artifacts)
    write_project(folder, artifacts, clients=CLIENTS)


def write_head(folder: Path, artifacts: Path) -> None:
    write_ours(folder, artifacts, "fc1.*")


def write_adapters(folder: Path, artifacts: Path) -> None:
    model = artifacts.with_name("large.onnx")
    onnx.save(adapters.wide_net(), model)
    adapters.artifacts_of(model).save(artifacts)
    write_project(folder, artifacts, clients=CLIENTS)


def write_torch(folder: Path, artifacts: Path, hidden: str = "[64]", dropout: float = 0.2) -> None:
    write_ours(folder, artifacts)
    client = TORCH_CLIENT.replace("HIDDEN", hidden).replace("DROPOUT", str(dropout))
    (folder / "federated" / "client.py").write_text(client, encoding="utf-8")
    (folder / "federated" / "server.py").write_text(TORCH_SERVER, encoding="utf-8")


def write_large_torch(folder: Path, artifacts: Path) -> None:
    write_torch(folder, artifacts, f"[{adapters.HIDDEN}, {adapters.HIDDEN}]", 0.0)


@contextlib.contextmanager
def federation(folder: Path) -> Iterator[str]:
    home = folder / "home"
    home.mkdir()
    os.environ["FLWR_HOME"] = str(home)
    with superlink(machines.free_port(), log=folder / "superlink.log") as address:
        machines.write_connection(home, address)
        yield address


def measure(write: Callable[[Path, Path], None], rounds: int, *, node: bool = False) -> dict:
    """Return seconds of a round, and bytes of a round and client in both directions."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        write_data(folder)
        write(folder / "project", folder / "artifacts")
        address = stack.enter_context(federation(folder))
        relays = [Relay(address) for _ in range(CLIENTS)]
        for part, relay in enumerate(relays):
            log = folder / f"{part}.log"
            if node:
                data = folder / f"{part}.json"
                client = machines.node_client(relay.address, folder / "artifacts", data, log)
            else:
                data = str(folder / f"{part}.npz")
                client = machines.supernode(relay.address, folder / "home", log, data=data)
            stack.enter_context(client)
        machines.flwr_run(
            folder / "project", folder / "home", folder / "run.log", 900, rounds=rounds
        )
        finished = re.search(r"finished in ([\d.]+)s", (folder / "run.log").read_text("utf-8"))
        assert finished is not None
        per = CLIENTS * rounds
        return {
            "seconds": float(finished[1]) / rounds,
            "up": sum(r.up for r in relays) / per,
            "down": sum(r.down for r in relays) / per,
        }


CASES: dict[str, tuple[Callable[[Path, Path], None], bool]] = {
    "PyTorch quickstart": (write_torch, False),
    "onnxtrain, Python clients": (write_ours, False),
    "onnxtrain, Node clients": (write_ours, True),
    "onnxtrain, Python clients, last layer only": (write_head, False),
    "PyTorch quickstart, large net": (write_large_torch, False),
    "onnxtrain, Python clients, adapters of the large net": (write_adapters, False),
    "onnxtrain, Node clients, adapters of the large net": (write_adapters, True),
}
"""Name: what writes the project, and whether clients run in Node."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--repeat", type=int, default=1, help="number of runs; the median is reported"
    )
    parser.add_argument("--out", type=Path, help="JSON file to write the results to")
    asked = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
    runs: dict[str, list[dict]] = {name: [] for name in CASES}
    for turn in range(asked.repeat):  # by turns: what else the machine does hits all alike
        for name, (write, node) in CASES.items():
            runs[name].append(measure(write, asked.rounds, node=node))
            print(f"{turn + 1}/{asked.repeat} {name}", file=sys.stderr, flush=True)
    results = {
        name: {key: float(np.median([run[key] for run in repeats])) for key in repeats[0]}
        for name, repeats in runs.items()
    }
    print("| | s per round | KB sent per client and round | KB received |\n|---|---|---|---|")
    for name, result in results.items():
        cells = f"{result['seconds']:.1f} | {result['up'] / 1e3:.1f} | {result['down'] / 1e3:.1f}"
        print(f"| {name} | {cells} |")
    if asked.out:
        asked.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
