"""Two Python clients, one in Node and one browser tab train the digits net together.

``make federated-demo`` runs it. Leaves in runs/federated: artifacts/, project/ (what ``flwr run``
ran), rounds/rounds.jsonl, page.png (the tab, with the curve and who took part), logs/, model.onnx.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import time
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.digits import digit_net
from examples.federated import machines

import onnxtrain
from onnxtrain.federation import write_project
from onnxtrain.federation.serve import superlink

OUT = Path("runs/federated").resolve()
CLIENTS = 4


def prepare(*, head_only: bool) -> dict[str, np.ndarray]:
    """Write artifacts and everybody's data; return the digits that nobody trains on."""
    data = load_digits()
    images, labels = (data.data / 16).astype(np.float32), data.target.astype(np.int64)
    x, x_test, y, y_test = train_test_split(images, labels, random_state=0)
    onnxtrain.build(
        digit_net(),
        loss="cross_entropy",
        optimizer="sgd:lr=0.2,momentum=0.9",
        metrics=["accuracy"],
        freeze="fc1.*" if head_only else None,
        target="wasm",
    ).save(OUT / "artifacts")
    (OUT / "data").mkdir()
    for part in range(CLIENTS):
        columns = {"image": x[part::CLIENTS], "labels": y[part::CLIENTS]}
        np.savez(OUT / "data" / f"{part}.npz", **columns)
        machines.write_columns(OUT / "data" / f"{part}.json", columns)
    return {"image": x_test, "labels": y_test}


def federate(rounds: int) -> None:
    """Start everybody, run, and stop everybody."""
    home, logs = OUT / "home", OUT / "logs"
    for folder in (home, logs, OUT / "rounds"):
        folder.mkdir()
    os.environ["FLWR_HOME"] = str(home)
    os.environ["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    artifacts, data, project = OUT / "artifacts", OUT / "data", OUT / "project"
    write_project(project, artifacts, data / "0.npz", clients=CLIENTS, rounds=rounds)
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        address = enter(superlink(machines.free_port(), log=logs / "superlink.log"))
        machines.write_connection(home, address)
        folders = {**machines.page_folders(artifacts, data), "/rounds": OUT / "rounds"}
        door = enter(machines.door(address, folders, logs / "door.log"))
        for part in (0, 1):
            log = logs / f"python{part}.log"
            enter(machines.supernode(address, home, log, data=str(data / f"{part}.npz")))
        enter(machines.node_client(address, artifacts, data / "2.json", logs / "node.log"))
        os.environ["SCREENSHOT"] = str(OUT / "page.png")
        enter(machines.tab(f"{door}/?data=3.json&heartbeat=30", logs / "tab.log"))
        print(f"the page: {door}/?data=3.json (a tab of yours would take part, too)", flush=True)
        report = str(OUT / "rounds" / "rounds.jsonl")
        machines.flwr_run(project, home, logs / "run.log", 1200, report=report)
        time.sleep(3)  # the page looks every two seconds


def main() -> float:
    """Train, tell what became of it, and return the accuracy on held-out digits."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--head-only", action="store_true", help="freeze all but the last layer")
    asked = parser.parse_args()
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    held_out = prepare(head_only=asked.head_only)
    federate(asked.rounds)
    for line in (OUT / "rounds" / "rounds.jsonl").read_text("utf-8").splitlines():
        told = json.loads(line)
        if told["kind"] == "evaluate":
            numbers = told["metrics"]
            nodes = len(told["nodes"])
            print(f"round {told['round']}: {nodes} nodes, loss {numbers['loss']:.4f}")
    trainer = onnxtrain.Trainer(OUT / "artifacts")
    trainer.load(OUT / "project" / "global.safetensors")
    accuracy = trainer.evaluate(held_out).metrics["accuracy"]
    trainer.export(OUT / "model.onnx")
    sent = sum(p.nbytes for p in (trainer.view(w.name) for w in trainer.manifest.parameters))
    print(f"{sent:,} bytes of weights travel; {accuracy:.1%} of held-out digits right; see {OUT}")
    return accuracy


if __name__ == "__main__":
    main()
