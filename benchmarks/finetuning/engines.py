"""The training processes: one step of each in turn, and a named error if one dies."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[2]
_SHOWN = 2000  # last characters of a process's stderr to show
Answer = dict[str, float]


class EngineError(Exception):
    """A process ended without its answer; says which, how, and what it wrote last."""

    def __init__(self, name: str, code: int | None, words: str) -> None:
        stderr = words.strip()[-_SHOWN:] or "it wrote nothing to standard error"
        super().__init__(f"{name} died with exit code {code}\n{stderr}")


class Engine:
    """A process that answers each line with what one step took.

    Args:
        name: for errors.
        command: starts it.
        threads: that libraries may use.
    """

    def __init__(self, name: str, command: list[str], threads: int) -> None:
        self.name = name
        self._errors: IO[str] = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            cwd=ROOT,
            env=environment(threads),
        )

    def step(self) -> Answer:
        """Return the answer to one line; lines that are none are passed over."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write("\n")
            stdin.flush()
        except BrokenPipeError:
            raise self._died() from None
        for line in stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise self._died()

    def close(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def _died(self) -> EngineError:
        code = self._process.wait()
        self._errors.seek(0)
        return EngineError(self.name, code, self._errors.read())


def measured(engines: dict[str, list[str]], threads: int, rounds: int) -> dict[str, list[Answer]]:
    """Run rounds of one step each, the engines in turn.

    Raises:
        EngineError: if one ends before it has answered; the others are ended too.
    """
    running: list[Engine] = []
    samples: dict[str, list[Answer]] = {name: [] for name in engines}
    try:
        running += [Engine(name, command, threads) for name, command in engines.items()]
        for _ in range(rounds):
            for engine in running:
                samples[engine.name].append(engine.step())
    finally:
        for engine in running:
            engine.close()
    return samples


def finished(name: str, command: list[str]) -> None:
    """Run a process to its end.

    Raises:
        EngineError: if it fails.
    """
    run = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False
    )
    if run.returncode:
        raise EngineError(name, run.returncode, run.stderr)


def environment(threads: int | None = None) -> dict[str, str]:
    """Return the variables for a process: this tree first, then what was there."""
    there = os.environ.get("PYTHONPATH")
    paths = [str(ROOT), str(ROOT / "src"), *([there] if there else [])]
    limit = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    return {**os.environ, **limit, "PYTHONPATH": os.pathsep.join(paths)}


__all__ = ["Answer", "Engine", "EngineError", "environment", "finished", "measured"]
