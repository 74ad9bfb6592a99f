"""Time this project beside other engines, and write docs/benchmarks.md.

    python -m benchmarks                                  # everything; make bench
    python -m benchmarks --quick                          # three nets; make bench-quick
    python -m benchmarks --workloads mlp cnn --threads 1 --peers onnxtrain torch
    python -m benchmarks --report runs/bench/results.json # write the page from an earlier run

The page is written only from an otherwise idle machine (``benchmarks/quiet.py``), and its run is
stored in ``benchmarks/results/cpu.json``.

``python -m benchmarks.peers`` (make bench-setup) creates the environments.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import machine, page, plan, quiet
from benchmarks.measure import START, Builder, Cell, measure
from benchmarks.peers import OURS, PEERS, ROOT, missing
from benchmarks.prepare import prepared
from benchmarks.report import line
from benchmarks.workloads import WORKLOADS

QUICK = ["mlp", "cnn", "lm2k"]
OUT = ROOT / "runs" / "bench"


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="three nets, no torch.compile")
    parser.add_argument("--workloads", nargs="+", help=f"of {', '.join(WORKLOADS)}")
    parser.add_argument("--optimizers", nargs="+", help="sgd, adamw")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--peers", nargs="+", help=f"of {', '.join(PEERS)}")
    parser.add_argument("--budget", type=float, help="seconds for everything")
    parser.add_argument("--compile-budget", type=float, default=600.0, help="seconds to compile")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: one thread")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the engines")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of results.json")
    parser.add_argument("--write", action="store_true", help="rewrite docs/benchmarks.md")
    parser.add_argument("--report", type=Path, help="results.json of an earlier run")
    return parser.parse_args(given)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure; return everything as plain data."""
    names = plan.chosen(
        options.workloads or (QUICK if options.quick else None), plan.all_workloads(), "workload"
    )
    optimizers = plan.chosen(options.optimizers, list(plan.OPTIMIZERS), "optimizer")
    quick = [p for p in PEERS if p != plan.COMPILE] if options.quick else None
    peers = plan.chosen(options.peers or quick, list(PEERS), "peer")
    if OURS.name not in peers:
        raise SystemExit(f"{OURS.name} has to be among the peers")
    absent = [n for n in missing() if any(PEERS[p].venv == n for p in peers)]
    if absent:
        raise SystemExit(f"environments missing: {', '.join(absent)}; make bench-setup")
    tasks = plan.tasks(names, optimizers, options.threads, peers)
    budget = options.budget or (140.0 if options.quick else 1700.0)
    facts = machine.facts()
    facts["others"] = quiet.begin(strict=options.write)
    facts["command"] = "python -m benchmarks " + shlex.join(sys.argv[1:])
    began = time.monotonic()
    for name in names:
        prepared(WORKLOADS[name])
    clock = plan.Clock(budget, options.compile_budget, len(tasks))
    builder, order = Builder(), random.Random(options.seed)
    cells: list[Cell] = []
    for task in tasks:
        start, share = time.monotonic(), clock.share()
        limits = {plan.COMPILE: START if clock.compiling > 0 else 0.0}
        cell = measure(
            WORKLOADS[task.workload],
            task.optimizer,
            task.threads,
            plan.engines(task),
            builder,
            seconds=share,
            limits=limits,
            order=order,
        )
        cells.append(cell)
        compiled = cell.engines.get(plan.COMPILE)
        took = 0.0
        if compiled is not None and compiled.status != "skipped":
            took = compiled.facts.get("first_steps_s", limits[plan.COMPILE])
        facts["others"].append(quiet.others())
        clock.done(time.monotonic() - start, share, took)
        print(line(cell, options.clock), flush=True)
        _save(options.out, facts, cells, options.clock)
    facts["seconds"] = round(time.monotonic() - began)
    facts["load_after"] = [round(x, 2) for x in os.getloadavg()]
    return _save(options.out, facts, cells, options.clock)


def _save(folder: Path, facts: dict[str, Any], cells: list[Cell], clock: str) -> dict[str, Any]:
    """Write what there is so far: a run that is stopped keeps its cells."""
    results = {"machine": facts, "clock": clock, "cells": [c.to_json() for c in cells]}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(results, indent=1))
    return results


def main() -> None:
    options = arguments()
    if options.report:
        results = json.loads(options.report.read_text())
    else:
        results = run(options)
        if not options.quick:
            page.profile_missed(results)
            (options.out / "results.json").write_text(json.dumps(results, indent=1))
    text = page.generated(results)
    print(text)
    if options.write or options.report:
        quiet.refuse_busy(results["machine"])
        page.write(text)
        page.keep(results, "cpu")


if __name__ == "__main__":
    main()
