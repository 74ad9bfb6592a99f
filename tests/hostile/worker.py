"""A process that takes seeds, one a line, and says what became of each mutant, one a line."""

from __future__ import annotations

import json
import resource
import sys
import time
import traceback
import warnings
from collections.abc import Callable

import onnxruntime

import onnxtrain
from onnxtrain.errors import OnnxTrainError, VerificationError
from tests.hostile.mutate import mutant

SECONDS = 1.0
MEGABYTES = 500
_ADDRESS_SPACE = 8 << 30
_WRONG = ("differs from the original", "the lowered model does not")

DOORS: dict[str, Callable[[bytes], object]] = {
    "load": onnxtrain.load,
    "explain": onnxtrain.explain,
    "vjp": lambda data: onnxtrain.vjp(data, ["x"]),
    "build": lambda data: onnxtrain.build(data, loss="mse", optimizer="sgd"),
    "lower": lambda data: onnxtrain.lower(data, opset=14),
}


def outcome(seed: int) -> tuple[str, str]:
    """Return one word on a mutant, and a line on what went wrong, if it did."""
    name, data = mutant(seed)
    accepted = False  # and found equal to the original on onnxruntime
    for door, function in DOORS.items():
        start, before = time.process_time(), _megabytes()
        try:
            function(data)
            accepted = door == "lower"
        except VerificationError as error:
            if any(words in str(error) for words in _WRONG) and _runtime_loads(data):
                return "different", f"{name}: {door}: {error}"
        except OnnxTrainError:
            if door == "load":
                break
        except Exception as error:
            ours = [
                t for t in traceback.extract_tb(error.__traceback__) if "onnxtrain" in t.filename
            ]
            where = f"{ours[-1].filename}:{ours[-1].lineno}" if ours else "?"
            return "raw", f"{name}: {door}: {error!r:.200} at {where}"
        if time.process_time() - start > SECONDS:
            return "slow", f"{name}: {door}: {time.process_time() - start:.1f} s"
        if _megabytes() - before > MEGABYTES:
            return "large", f"{name}: {door}: {_megabytes() - before:.0f} MB"
    return ("accepted" if accepted else "refused"), ""


def _runtime_loads(data: bytes) -> bool:
    try:
        onnxruntime.InferenceSession(data)
    except Exception:  # it raises a class for each of its codes
        return False
    return True


def _megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Answer each line of the standard input by one of the standard output."""
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE, _ADDRESS_SPACE))
    warnings.simplefilter("ignore")
    onnxruntime.set_default_logger_severity(4)
    for line in sys.stdin:
        print(json.dumps(outcome(int(line))), flush=True)


if __name__ == "__main__":
    main()
