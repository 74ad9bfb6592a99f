"""Kill workers of torchrun at random points: ``python -m tests.distributed.kills [RUNS] [SEED]``.

Points are drawn from the whole life of a worker: imports, meeting the others, training, the end.
Every run must end on all workers within ten seconds of the kill, torchrun must name the killed
worker, and the workers that it starts again must reach the weights of a run that nobody has killed,
to the bit.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

import numpy as np
import psutil

from . import nets

WORKERS, LIMIT, PATIENCE = 2, 10.0, 180.0
PAUSE = 0.15
"""Seconds between two batches: about as much time in training as in imports."""


def main(runs: int, seed: int) -> int:
    """Return the number of failures."""
    draw, failures, ends = random.Random(seed), 0, list[float]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        nets.artifacts("mlp").save(folder / "art")
        agent, workers = launch(folder, "whole", None)
        start = time.monotonic()
        agent.wait(PATIENCE)
        life = time.monotonic() - start
        print(f"workers live for {life:.1f} s")
        for run in range(runs):
            with (folder / f"log{run}").open("w+") as log:
                agent, workers = launch(folder, f"run{run}", log)
                victim, delay = draw.randrange(WORKERS), draw.uniform(0, life)
                ended, what = kill(workers, victim, delay)
                checkpoints = list((folder / f"run{run}" / "checkpoints").glob("step-*"))
                code = agent.wait(PATIENCE)
                log.seek(0)
                report = log.read()
            named = what == "had ended" or re.search(
                rf"exitcode: -9\) local_rank: {victim}\b", report
            )
            problems = [
                *([f"torchrun ended with {code}: {report[-2000:]}"] if code else []),
                *(["another result"] if not same(folder, f"run{run}") else []),
                *(["not named"] if not named else []),
                *(["late"] if ended > LIMIT else []),
            ]
            failures += bool(problems)
            ends.append(ended)
            print(
                f"run {run}: worker {victim} {what} after {delay:.1f} s, all ended within "
                f"{ended:.2f} s, {'with' if checkpoints else 'without'} a checkpoint: "
                + ("; ".join(problems) or "same bits"),
                flush=True,
            )
    print(f"{runs} runs, {failures} failures, longest end {max(ends):.2f} s")
    return failures


def launch(folder: Path, out: str, log: IO[str] | None) -> tuple[subprocess.Popen[str], list[int]]:
    """Start torchrun; return it, and the process ids of its workers once they are there."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=1"]
    command += [f"--nproc-per-node={WORKERS}", "-m", "tests.distributed.kills", "work"]
    agent = subprocess.Popen(
        [*command, str(folder), str(folder / out)], stdout=log, stderr=log, text=True
    )
    while agent.poll() is None:
        # A child of the agent is a copy of it, before it is a worker.
        ranks = {c.environ().get("RANK"): c.pid for c in children(agent.pid)}
        if all(str(r) in ranks for r in range(WORKERS)):
            return agent, [ranks[str(r)] for r in range(WORKERS)]
        time.sleep(0.01)
    raise RuntimeError("torchrun has started no workers")


def children(pid: int) -> list[psutil.Process]:
    found = []
    for child in psutil.Process(pid).children():
        try:
            child.environ()
        except psutil.Error:
            continue
        found.append(child)
    return found


def kill(workers: list[int], victim: int, delay: float) -> tuple[float, str]:
    """Kill a worker after some seconds; return how long the others lived on, and what happened."""
    time.sleep(delay)
    if not psutil.pid_exists(workers[victim]):
        return 0.0, "had ended"
    try:
        os.kill(workers[victim], signal.SIGKILL)
    except ProcessLookupError:
        return 0.0, "had ended"
    start = time.monotonic()
    while any(map(alive, workers)) and time.monotonic() - start < 4 * LIMIT:
        time.sleep(0.01)
    return time.monotonic() - start, "was killed"


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def same(folder: Path, out: str) -> bool:
    """Return whether a run has the weights of the whole one."""
    try:
        a, b = (np.load(folder / f"{n}.npz") for n in (out, "whole"))
    except OSError:
        return False
    return a.files == b.files and all(np.array_equal(a[n], b[n]) for n in a.files)


def work(folder: str, out: str) -> None:
    """Train as a worker, from the last checkpoint."""
    state = nets.resumable(folder, out, PAUSE)
    if os.environ["RANK"] == "0":
        np.savez(f"{out}.npz", **state)  # pyright: ignore[reportArgumentType]


if __name__ == "__main__":
    if sys.argv[1:2] == ["work"]:
        work(*sys.argv[2:])
    else:
        sys.exit(main(*(int(a) for a in (*sys.argv[1:], "50", "0")[:2])) > 0)
