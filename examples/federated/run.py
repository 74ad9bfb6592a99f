"""Two Python clients, one in Node and one browser tab train together: a net, then adapters.

``make federated-demo`` runs it. First the digits net, all of it; then a larger one that knows
upright digits learns mirrored ones by adapters (LoRA), and only these travel. They leave in
runs/federated/digits and runs/federated/lora: artifacts/, project/ (what ``flwr run`` ran),
rounds/rounds.jsonl, page.png (the tab, with the curve and who took part), logs/, model.onnx.
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
    """Return the digits to train on, and those that nobody trains on."""
    data = load_digits()
    images, labels = (data.data / 16).astype(np.float32), data.target.astype(np.int64)
    x, x_test, y, y_test = train_test_split(images, labels, random_state=0)
    return {"image": x, "labels": y}, {"image": x_test, "labels": y_test}


def prepare_net(folder: Path, *, head_only: bool) -> Columns:
    """Write artifacts of the digits net and everybody's data; return the digits left out."""
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
    """Write artifacts with adapters and everybody's mirrored digits; return those left out."""
    train, held_out = digits()
    model = adapters.pretrained(train, folder / "upright.onnx")
    adapters.artifacts_of(model).save(folder / "artifacts")
    for columns in (train, held_out):
        columns["image"] = adapters.mirrored(columns["image"])
    write_data(folder, train)
    return held_out


def write_data(folder: Path, columns: Mapping[str, np.ndarray]) -> None:
    """Write every client's part, for Python and for JavaScript."""
    (folder / "data").mkdir()
    for part in range(CLIENTS):
        own = {name: array[part::CLIENTS] for name, array in columns.items()}
        np.savez(folder / "data" / f"{part}.npz", **own)
        machines.write_columns(folder / "data" / f"{part}.json", own)


def federate(folder: Path, rounds: int) -> None:
    """Start everybody, run, and stop everybody."""
    home, logs = folder / "home", folder / "logs"
    for made in (home, logs, folder / "rounds"):
        made.mkdir()
    os.environ["FLWR_HOME"] = str(home)
    artifacts, data, project = folder / "artifacts", folder / "data", folder / "project"
    write_project(project, artifacts, data / "0.npz", clients=CLIENTS, rounds=rounds)
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        address = enter(superlink(machines.free_port(), log=logs / "superlink.log"))
        machines.write_connection(home, address)
        folders = {**machines.page_folders(artifacts, data), "/rounds": folder / "rounds"}
        door = enter(machines.door(address, folders, logs / "door.log"))
        for part in (0, 1):
            log = logs / f"python{part}.log"
            enter(machines.supernode(address, home, log, data=str(data / f"{part}.npz")))
        enter(machines.node_client(address, artifacts, data / "2.json", logs / "node.log"))
        os.environ["SCREENSHOT"] = str(folder / "page.png")
        enter(machines.tab(f"{door}/?data=3.json&heartbeat=30", logs / "tab.log"))
        print(f"the page: {door}/?data=3.json (a tab of yours would take part, too)", flush=True)
        write_names(logs, folder / "rounds" / "names.json")
        report = str(folder / "rounds" / "rounds.jsonl")
        machines.flwr_run(project, home, logs / "run.log", 1800, report=report)
        time.sleep(3)  # the page looks every two seconds


def write_names(logs: Path, path: Path, seconds: float = 120) -> None:
    """Wait until everybody has a number, and write for the page who is who."""
    names: dict[str, str] = {}
    end = time.monotonic() + seconds
    while len(names) < len(KINDS) and time.monotonic() < end:
        for log, kind in KINDS.items():
            told = (logs / f"{log}.log").read_text("utf-8", errors="replace")
            number = re.search(r"(?:SuperNode ID: |joined as node )(\d+)", told)
            if number:
                names[number[1]] = kind
        time.sleep(0.5)
    path.write_text(json.dumps(names), encoding="utf-8")


def tell(folder: Path, held_out: Columns) -> float:
    """Print what became of a federation; return the accuracy on digits that nobody trained on."""
    names = json.loads((folder / "rounds" / "names.json").read_text("utf-8"))
    for line in (folder / "rounds" / "rounds.jsonl").read_text("utf-8").splitlines():
        told = json.loads(line)
        if told["kind"] == "evaluate":
            who = ", ".join(sorted(names.get(n, n) for n in told["nodes"]))
            print(f"round {told['round']}: loss {told['metrics']['loss']:.4f} ({who})")
    trainer = onnxtrain.Trainer(folder / "artifacts")
    before = trainer.evaluate(held_out).metrics["accuracy"]
    trainer.load(folder / "project" / "global.safetensors")
    accuracy = trainer.evaluate(held_out).metrics["accuracy"]
    trainer.export(folder / "model.onnx")
    sent = sum(trainer.view(w.name).nbytes for w in trainer.manifest.parameters)
    weights = ir.load(folder / "model.onnx").graph.initializers.values()
    whole = sum(w.const_value.nbytes for w in weights if w.const_value is not None)
    print(
        f"{sent:,} bytes of weights travel, {sent / whole:.2%} of the model's {whole:,}; "
        f"{accuracy:.1%} of held-out digits right, {before:.1%} before; see {folder}",
        flush=True,
    )
    return accuracy


def main() -> None:
    """Train, and tell what became of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--head-only", action="store_true", help="freeze all but the last layer")
    parser.add_argument("--only", choices=["digits", "lora"], help="one of the two")
    asked = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    shutil.rmtree(OUT, ignore_errors=True)
    for name in ("digits", "lora"):
        if asked.only not in (None, name):
            continue
        print(f"== {name}", flush=True)
        folder = OUT / name
        folder.mkdir(parents=True)
        if name == "lora":
            held_out = prepare_adapters(folder)
        else:
            held_out = prepare_net(folder, head_only=asked.head_only)
        federate(folder, asked.rounds)
        tell(folder, held_out)


if __name__ == "__main__":
    main()
