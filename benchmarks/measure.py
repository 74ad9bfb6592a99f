"""One cell of the table: every engine on one workload, optimizer and number of threads."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import verdicts
from benchmarks.client import Client, Refused
from benchmarks.peers import CACHE, OURS, REFERENCE, Peer
from benchmarks.prepare import key, prepared
from benchmarks.workloads import Workload

SLICE = 0.3  # seconds that an engine runs in one round, if its steps are shorter
FEWEST, MOST = 3, 9  # rounds
PAUSE = 0.03  # seconds in which the threads of the engine before go to sleep
START = 300.0  # seconds within which an engine has to be ready


@dataclasses.dataclass
class Timing:
    """What was found out about one engine in one cell."""

    status: str = "timed"
    """``timed``, ``refused``, ``wrong`` or ``skipped``."""
    reason: str = ""
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    wall: list[float] = dataclasses.field(default_factory=list)
    cpu: list[float] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Cell:
    """A row of a table: the engines by name."""

    workload: str
    optimizer: str
    threads: int
    engines: dict[str, Timing]

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Cell:
        """Read what :meth:`to_json` gave."""
        engines = {n: Timing(**t) for n, t in data["engines"].items()}
        return cls(data["workload"], data["optimizer"], data["threads"], engines)


class Builder:
    """Makes the files that engines start from, once for all numbers of threads."""

    def __init__(self) -> None:
        self.costs: dict[tuple[str, str, str], dict[str, Any]] = {}

    def build(self, peer: Peer, workload: Workload, optimizer: str) -> tuple[Path, dict[str, Any]]:
        """Return the folder and what building cost."""
        made = CACHE / "built" / peer.name / f"{workload.name}-{optimizer}"
        at = (peer.name, workload.name, optimizer)
        mark = made / "built.json"
        if at not in self.costs and peer is not OURS and mark.exists():
            kept = json.loads(mark.read_text())
            if kept["key"] == key(workload):
                self.costs[at] = kept["cost"]
        if at not in self.costs:
            folder = prepared(workload)
            with Client(peer, os.cpu_count() or 1, f"build-{workload.name}") as client:
                cost = client.ask(
                    "build", START, folder=str(folder), made=str(made), optimizer=optimizer
                )
            mark.write_text(json.dumps({"key": key(workload), "cost": cost}))
            self.costs[at] = cost
        return made, self.costs[at]


def start(
    peer: Peer, workload: Workload, optimizer: str, threads: int, builder: Builder, limit: float
) -> tuple[Client | None, Timing]:
    """Return a process that is ready to run steps, or why there is none."""
    client = None
    try:
        made, cost = CACHE, {}
        if peer.builds:
            made, cost = builder.build(peer, workload, optimizer)
        client = Client(peer, threads, f"{workload.name}-{optimizer}-{threads}")
        facts = client.ask(
            "prepare",
            limit,
            folder=str(prepared(workload)),
            made=str(made),
            optimizer=optimizer,
            threads=threads,
            lr=workload.rate(optimizer),
            facts={"workload": workload.name, "classes": workload.classes},
        )
    except Refused as error:
        if client is not None:
            client.close()
        return None, Timing("refused", str(error))
    return client, Timing(facts={**cost, **facts})


def judge(engines: dict[str, Timing]) -> None:
    """Mark engines whose first losses are not those of torch; they are not timed.

    Nor is any, if torch's own losses hardly move: then equal losses say nothing.
    """
    reference = engines.get(REFERENCE.name)
    if reference is None or reference.status != "timed":
        return
    losses = reference.facts["losses"]
    still = None if verdicts.moves(losses) else "the reference loss hardly moves: another rate"
    for timing in engines.values():
        if timing.status == "timed":
            why = still or verdicts.disagreement(losses, timing.facts["losses"])
            if why is not None:
                timing.status, timing.reason = "wrong", why


def measure(
    workload: Workload,
    optimizer: str,
    threads: int,
    peers: list[Peer],
    builder: Builder,
    *,
    seconds: float,
    limits: dict[str, float],
    order: random.Random,
) -> Cell:
    """Return all engines' times, taken in turns.

    Args:
        workload: what to train.
        optimizer: ``sgd`` or ``adamw``.
        threads: of every engine.
        peers: the engines.
        builder: makes and keeps their files.
        seconds: about how long to take times.
        limits: seconds to get ready, by engine; 0 leaves the engine out.
        order: of the engines in each round.
    """
    engines: dict[str, Timing] = {}
    wanted = []
    for peer in peers:
        if limits.get(peer.name, START) > 0:
            wanted.append(peer)
        else:
            engines[peer.name] = Timing("skipped", "no time left for compiling")
    # Getting ready may overlap; taking times never does.
    with ThreadPoolExecutor(2) as pool:
        tasks = {
            p.name: pool.submit(
                start, p, workload, optimizer, threads, builder, limits.get(p.name, START)
            )
            for p in wanted
        }
        ready = {name: task.result() for name, task in tasks.items()}
    engines.update({name: timing for name, (_, timing) in ready.items()})
    clients = {name: client for name, (client, _) in ready.items() if client is not None}
    try:
        judge(engines)
        running = {n: c for n, c in clients.items() if engines[n].status == "timed"}
        _rounds(running, engines, seconds, order)
    finally:
        for client in clients.values():
            client.close()
    return Cell(workload.name, optimizer, threads, {p.name: engines[p.name] for p in peers})


def _rounds(
    running: dict[str, Client], engines: dict[str, Timing], seconds: float, order: random.Random
) -> None:
    steps = {n: max(1, round(SLICE / engines[n].facts["step_s"])) for n in running}
    # A round has one step more for each engine, which is not timed.
    cost = sum((steps[n] + 1) * engines[n].facts["step_s"] + PAUSE for n in running)
    names = list(running)
    for _ in range(max(FEWEST, min(MOST, int(seconds / max(cost, 1e-9))))):
        order.shuffle(names)
        for name in names:
            time.sleep(PAUSE)
            sample = running[name].ask("run", START, steps=steps[name])
            engines[name].wall.append(sample["wall"])
            engines[name].cpu.append(sample["cpu"])
            engines[name].facts["peak_mb"] = sample["peak_mb"]
