"""Twenty clients, each killed once at a random moment: the run ends, and nothing is corrupt."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest

import onnxtrain
from tests.flower.inside.federations import rows
from tests.flower.inside.reference import honest
from tests.flower.inside.running import Federation, apart

pytest_plugins = ["tests.flower.inside.running"]

PYTHON, NODE, PARTS, ROUNDS = 13, 7, 4, 5


class Clients:
    """Clients of both kinds by their places; each may be killed, and comes back."""

    def __init__(self, federation: Federation) -> None:
        self.federation = federation
        self.alive = {place: self._start(place) for place in range(PYTHON + NODE)}
        self.killed: list[int] = []

    def _start(self, place: int) -> Any:
        part = 1 + place % PARTS
        if place < PYTHON:  # it comes back as somebody new
            return self.federation.python(part, log=f"python-{place}")
        # It comes back with its number, and with what it had begun.
        return self.federation.node(part, str(self.federation.folder / "stores" / str(place)))

    def kill_all(self, rng: np.random.Generator, stop: threading.Event) -> None:
        """Kill each, one after another, and start it again; end early if the run does."""
        for place in rng.permutation(PYTHON + NODE).tolist():
            if stop.wait(float(rng.uniform(0, 6))):
                return
            os.killpg(self.alive[place].pid, signal.SIGKILL)
            self.alive[place].wait()
            self.killed.append(place)
            time.sleep(float(rng.uniform(0, 2)))
            self.alive[place] = self._start(place)


@pytest.mark.full
def test_twenty_clients_are_killed_once(federation: Federation) -> None:
    project = federation.project(PYTHON + NODE)
    clients = Clients(federation)
    for place in range(PYTHON):
        federation.number(f"python-{place}", seconds=300)
    stop = threading.Event()
    killer = threading.Thread(target=clients.kill_all, args=(np.random.default_rng(0), stop))
    killer.start()
    try:
        final = federation.run(project, rounds=ROUNDS, batch_size=8, shuffle=False)
    finally:
        stop.set()
        killer.join()
    assert sorted(clients.killed) == list(range(PYTHON + NODE)), federation.all_logs()
    lines = [line for line in federation.report(project) if line["kind"] == "train"]
    assert [line["round"] for line in lines] == list(range(1, ROUNDS + 1))
    assert all(line["refused"] == {} for line in lines)
    assert any(line["failed"] for line in lines)
    assert len(lines[-1]["nodes"]) >= (PYTHON + NODE) // 2
    artifacts = onnxtrain.Artifacts.load(federation.artifacts)
    data = [rows(part) for part in range(1, PARTS + 1)]
    replies = [federation.replies(r) for r in range(1, ROUNDS + 1)]
    assert apart(final, honest(artifacts, data, replies, within=1e-5)) < 1e-6
