"""The protocol between the harness and an engine: one JSON object per line, both ways.

``build``    writes the files that training starts from, if the engine has such a step
``prepare``  loads weights and data, creates sessions, runs the first steps, returns their losses
``run``      runs some steps; returns their seconds
``stop``     ends the process

Every answer has ``ok``; a refusal has ``error`` with its first line. Libraries cannot print to
standard output.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

CHECKED = 6  # steps whose losses are compared
SETTLED = 1e-7  # learning rate of timed steps: every engine keeps computing with the same numbers


class Engine:
    """What an engine has to say; files of the workload lie in ``folder``."""

    def build(self, folder: Path, made: Path, optimizer: str) -> None:
        """Write what training starts from into ``made``."""

    def load(self, folder: Path, made: Path, optimizer: str, threads: int, **facts: Any) -> None:
        """Make everything that a step needs."""
        raise NotImplementedError

    def step(self, lr: float) -> float:
        """Train one step on the batch; return its loss."""
        raise NotImplementedError

    def versions(self) -> dict[str, str]:
        """Return the versions that matter."""
        raise NotImplementedError


def resident() -> float:
    """Return the memory of this process now, in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / 1e6


def peak() -> float:
    """Return the most memory that this process had so far, in MB.

    Not ``ru_maxrss``: that of a new process starts with what its parent had.
    """
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024 / 1e6


def first_line(error: BaseException) -> str:
    """Return the kind of an error and the first line of its message."""
    lines = [x.strip() for x in str(error).splitlines() if x.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def first_use(runtime: Any) -> None:
    """Make and run a trivial session: what onnxruntime sets up once is not part of training."""
    import onnx
    import onnx.parser

    text = '<ir_version: 8, opset_import: ["": 17]> g (float[1] x) => (float[1] y) {y = Neg(x)}'
    model = onnx.parser.parse_model(text).SerializeToString()
    session = runtime.InferenceSession(model, providers=["CPUExecutionProvider"])
    session.run(None, {"x": np.zeros(1, np.float32)})


class Session:
    """One engine and what was measured of it so far."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.imported = resident()

    def build(self, ask: dict[str, Any]) -> dict[str, Any]:
        """Make the engine's files."""
        made = Path(ask["made"])
        made.mkdir(parents=True, exist_ok=True)
        wall, cpu = time.perf_counter(), time.process_time()
        self.engine.build(Path(ask["folder"]), made, ask["optimizer"])
        return {
            "build_s": time.perf_counter() - wall,
            "build_cpu_s": time.process_time() - cpu,
            "build_peak_mb": peak() - self.imported,
        }

    def prepare(self, ask: dict[str, Any]) -> dict[str, Any]:
        """Load, and run the steps whose losses are compared."""
        wall, cpu = time.perf_counter(), time.process_time()
        self.engine.load(
            Path(ask["folder"]),
            Path(ask["made"]),
            ask["optimizer"],
            ask["threads"],
            **ask.get("facts", {}),
        )
        loaded = time.perf_counter()
        losses = [self.engine.step(ask["lr"]) for _ in range(CHECKED)]
        ready = {
            "session_s": loaded - wall,
            "first_steps_s": time.perf_counter() - loaded,
            "ready_cpu_s": time.process_time() - cpu,
        }
        start = time.perf_counter()
        self.engine.step(SETTLED)
        return {
            **ready,
            "losses": losses,
            "step_s": time.perf_counter() - start,
            "import_mb": self.imported,
            "peak_mb": peak() - self.imported,
            "versions": {"python": sys.version.split()[0], **self.engine.versions()},
        }

    def run(self, ask: dict[str, Any]) -> dict[str, Any]:
        """Run steps; return seconds for each on average."""
        count, step = ask["steps"], self.engine.step
        step(SETTLED)  # caches and clock after the pause
        cpu, wall = time.process_time(), time.perf_counter()
        for _ in range(count):
            step(SETTLED)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        return {"wall": wall / count, "cpu": cpu / count, "peak_mb": peak() - self.imported}


def serve(engine: Engine) -> None:
    """Answer requests until one asks to stop."""
    # Libraries print to descriptor 1: answers go to a copy of it, and it becomes that of errors.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    session = Session(engine)
    for line in sys.stdin:
        ask = json.loads(line)
        if ask["command"] == "stop":
            return
        try:
            answer = {"ok": True, **getattr(session, ask["command"])(ask)}
        except Exception as error:  # whatever an engine raises is its refusal
            answer = {"ok": False, "error": first_line(error)}
        answers.write(json.dumps(answer) + "\n")
