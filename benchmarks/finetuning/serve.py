"""A process that runs one training step per input line and reports its time and memory."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path


def serve(step: Callable[[], float], device_memory: Callable[[], float] | None = None) -> None:
    """Answer each line of standard input with time, loss and the peaks of memory in MB."""
    for _ in sys.stdin:
        begun, used = time.perf_counter(), time.process_time()
        loss = step()
        answer = {
            "seconds": time.perf_counter() - begun,
            "processor": time.process_time() - used,
            "loss": loss,
            "peak": peak(),
            "device": 0.0 if device_memory is None else device_memory(),
        }
        print(json.dumps(answer), flush=True)


def device_memory() -> Callable[[], float]:
    """Return a function that reports the device memory allocated since this call, in MB.

    Other processes on the device are counted as well.
    """
    before = _held()
    return lambda: _held() - before


def _held() -> float:
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return float(output.split()[0])


def peak() -> float:
    """Return the largest resident size of this process so far, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(x.split()[1]) for x in lines if x.startswith("VmHWM")) / 1024
