"""Federated learning with two Python clients, a Node client and a browser tab.

``make federated-demo`` runs it. First the clients train a digits classifier from scratch. Then they
fine-tune a larger classifier of upright digits to mirrored ones with LoRA, sending adapters only.
Outputs in runs/federated/digits and runs/federated/lora: artifacts/, project/ (for ``flwr run``),
rounds/rounds.jsonl, page.png (a screenshot of the tab), logs/, model.onnx.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx_ir as ir
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.digits import digit_net
from examples.federated import adapters, machines

import onnxtrain
from onnxtrain.federation import write_project
from onnxtrain.federation.serve import superlink

OUT = Path("runs/federated").resolve()
CLIENTS = 4
KINDS = {"python0": "Python", "python1": "Python", "node": "Node", "tab": "a browser tab"}

Columns = dict[str, np.ndarray]


def digits() -> tuple[Columns, Columns]:
    """Return the training and the test digits."""
    data = load_digits()
    images, labels = (data.data / 16).astype(np.float32), data.target.astype(np.int64)
    x, x_test, y, y_test = train_test_split(images, labels, random_state=0)
    return {"image": x, "labels": y}, {"image": x_test, "labels": y_test}


def prepare_net(folder: Path, *, head_only: bool) -> Columns:
    """Write the artifacts of the classifier and the data of all clients; return the test set."""
    onnxtrain.build(
        digit_net(),
        loss="cross_entropy",
        optimizer="sgd:lr=0.2,momentum=0.9",
        metrics=["accuracy"],
        freeze="fc1.*" if head_only else None,
        target="wasm",
    ).save(folder / "artifacts")
    train, held_out = digits()
    write_data(folder, train)
    return held_out


def prepare_adapters(folder: Path) -> Columns:
    """Write artifacts with adapters and mirrored digits for all clients; return the test set."""
    train, held_out = digits()
    model = adapters.pretrained(train, folder / "upright.onnx")
    adapters.artifacts_of(model).save(folder / "artifacts")
    for columns in (train, held_out):
        columns["image"] = adapters.mirrored(columns["image"])
    write_data(folder, train)
    return held_out


def write_data(folder: Path, columns: Mapping[str, np.ndarray]) -> None:
    """Write the data partition of every client, for Python and for JavaScript."""
    (folder / "data").mkdir()
    for part in range(CLIENTS):
        own = {name: array[part::CLIENTS] for name, array in columns.items()}
        np.savez(folder / "data" / f"{part}.npz", **own)
        machines.write_columns(folder / "data" / f"{part}.json", own)


def federate(folder: Path, rounds: int) -> None:
    """Start all clients, run the federation, and stop them."""
    home, logs = folder / "home", folder / "logs"
    for directory in (home, logs, folder / "rounds"):
        directory.mkdir()
    os.environ["FLWR_HOME"] = str(home)
    artifacts, data, project = folder / "artifacts", folder / "data", folder / "project"
    write_project(project, artifacts, data / "0.npz", clients=CLIENTS, rounds=rounds)
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        address = enter(superlink(machines.free_port(), log=logs / "superlink.log"))
        machines.write_connection(home, address)
        folders = {**machines.page_folders(artifacts, data), "/rounds": folder / "rounds"}
        url = enter(machines.proxy(address, folders, logs / "proxy.log"))
        for part in (0, 1):
            log = logs / f"python{part}.log"
            enter(machines.supernode(address, home, log, data=str(data / f"{part}.npz")))
        enter(machines.node_client(address, artifacts, data / "2.json", logs / "node.log"))
        os.environ["SCREENSHOT"] = str(folder / "page.png")
        enter(machines.tab(f"{url}/?data=3.json&heartbeat=30", logs / "tab.log"))
        print(f"page: {url}/?data=3.json (open it in a browser to participate)", flush=True)
        write_names(logs, folder / "rounds" / "names.json")
        report = str(folder / "rounds" / "rounds.jsonl")
        machines.flwr_run(project, home, logs / "run.log", 1800, report=report)
        time.sleep(3)  # the page polls every two seconds


def write_names(logs: Path, path: Path, seconds: float = 120) -> None:
    """Wait until all clients have a node id, and write the names of the nodes for the page."""
    names: dict[str, str] = {}
    end = time.monotonic() + seconds
    while len(names) < len(KINDS) and time.monotonic() < end:
        for log, kind in KINDS.items():
            text = (logs / f"{log}.log").read_text("utf-8", errors="replace")
            number = re.search(r"(?:SuperNode ID: |joined as node )(\d+)", text)
            if number:
                names[number[1]] = kind
        time.sleep(0.5)
    path.write_text(json.dumps(names), encoding="utf-8")


def report(folder: Path, held_out: Columns) -> float:
    """Print the results of a federation; return the test accuracy."""
    names = json.loads((folder / "rounds" / "names.json").read_text("utf-8"))
    for line in (folder / "rounds" / "rounds.jsonl").read_text("utf-8").splitlines():
        entry = json.loads(line)
        if entry["kind"] == "evaluate":
            who = ", ".join(sorted(names.get(n, n) for n in entry["nodes"]))
            print(f"round {entry['round']}: loss {entry['metrics']['loss']:.4f} ({who})")
    trainer = onnxtrain.Trainer(folder / "artifacts")
    before = trainer.evaluate(held_out).metrics["accuracy"]
    trainer.load(folder / "project" / "global.safetensors")
    accuracy = trainer.evaluate(held_out).metrics["accuracy"]
    trainer.export(folder / "model.onnx")
    sent = sum(trainer.view(w.name).nbytes for w in trainer.manifest.parameters)
    weights = ir.load(folder / "model.onnx").graph.initializers.values()
    whole = sum(w.const_value.nbytes for w in weights if w.const_value is not None)
    print(
        f"{sent:,} bytes of weights sent, {sent / whole:.2%} of the model's {whole:,}; "
        f"test accuracy {accuracy:.1%}, {before:.1%} before; results in {folder}",
        flush=True,
    )
    return accuracy


def main() -> None:
    """Run both federations."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--head-only", action="store_true", help="freeze all but the last layer")
    parser.add_argument("--only", choices=["digits", "lora"], help="run one of the two federations")
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    shutil.rmtree(OUT, ignore_errors=True)
    for name in ("digits", "lora"):
        if options.only not in (None, name):
            continue
        print(f"== {name}", flush=True)
        folder = OUT / name
        folder.mkdir(parents=True)
        if name == "lora":
            held_out = prepare_adapters(folder)
        else:
            held_out = prepare_net(folder, head_only=options.head_only)
        federate(folder, options.rounds)
        report(folder, held_out)


if __name__ == "__main__":
    main()
