"""Worker process: read cases from stdin, print the outcome of each, one per line."""

from __future__ import annotations

import importlib
import json
import resource
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import onnxruntime

from onnxtrain.errors import OnnxTrainError
from tests.hostile.run import COMPARE, KINDS, WrongError
from tests.hostile.traps import Traps
from tests.soon import is_soon

SECONDS = 1.0  # of CPU time, independent of the machine's load
MEGABYTES = 500
_ADDRESS_SPACE = 8 << 30


def outcome(case: str, traps: Traps) -> tuple[str, str]:
    """Run a case; return its outcome and a description of the failure, if any."""
    kind, _, seed = case.partition(":")
    name, steps = importlib.import_module(KINDS[kind].module).steps_of_case(int(seed), traps)
    accepted, last = True, ""
    for step, function in steps:
        start, before = time.process_time(), _megabytes()
        error = _error(function)
        where = f"{name}: {step}"
        if isinstance(error, WrongError):
            return "different", f"{where}: {error}"
        if error is not None and not isinstance(error, OnnxTrainError):
            return "raw", f"{where}: {error!r:.200} at {_place(error)}"
        if traps.touched():
            return "outside", where
        elapsed = time.process_time() - start
        again = partial(_error, function)
        if step != COMPARE and elapsed > SECONDS and not is_soon(again, SECONDS):
            return "slow", f"{where}: {elapsed:.1f} s"
        if _megabytes() - before > MEGABYTES:
            return "large", f"{where}: {_megabytes() - before:.0f} MB"
        accepted, last = error is None, step
        if error is not None and step == "load":
            break
    return ("accepted" if accepted else "refused"), last


def _error(function: Callable[[], object]) -> BaseException | None:
    try:
        function()
    except (Exception, MemoryError) as error:
        return error
    return None


def _place(error: BaseException) -> str:
    ours = [t for t in traceback.extract_tb(error.__traceback__) if "onnxtrain" in t.filename]
    return f"{ours[-1].filename}:{ours[-1].lineno}" if ours else "?"


def _megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Run the cases of stdin, one per line."""
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE, _ADDRESS_SPACE))
    warnings.simplefilter("ignore")
    onnxruntime.set_default_logger_severity(4)
    with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
        traps = Traps(Path(folder))
        traps.touched()
        for line in sys.stdin:
            print(json.dumps(outcome(line.strip(), traps)), flush=True)


if __name__ == "__main__":
    main()
