"""The harness's handle of an engine process."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from pathlib import Path
from typing import Any, Self

from benchmarks.peers import CACHE, ROOT, Peer


class Refused(Exception):  # noqa: N818  it is an answer, not a failure of the harness
    """An engine cannot do what it was asked; the message is its own."""


class Client:
    """A running engine; use it as a context manager."""

    def __init__(self, peer: Peer, threads: int, label: str) -> None:
        if not peer.python().exists():
            raise Refused("no environment: make bench-setup")
        (CACHE / "logs").mkdir(parents=True, exist_ok=True)
        environment = {
            **{k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "PYTHONHOME")},
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": str(threads),
            # Compiled code is for a number of threads.
            "TORCHINDUCTOR_CACHE_DIR": str(CACHE / f"inductor-{threads}"),
        }
        self.log: Path = CACHE / "logs" / f"{label}-{peer.name}.log"
        with self.log.open("w") as errors:
            self.process = subprocess.Popen(
                [
                    str(peer.python()),
                    "-m",
                    f"benchmarks.workers.{peer.module}",
                    *peer.arguments,
                ],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                bufsize=0,
                start_new_session=True,
            )
        self.rest = b""

    def ask(self, command: str, timeout: float, **facts: Any) -> dict[str, Any]:
        """Send a request and wait for its answer.

        Raises:
            Refused: with the engine's message, or because it died or took too long.
        """
        assert self.process.stdin is not None
        try:
            self.process.stdin.write((json.dumps({"command": command, **facts}) + "\n").encode())
        except OSError:
            raise Refused(self._end()) from None
        answer = json.loads(self._line(time.monotonic() + timeout, timeout))
        if not answer.pop("ok"):
            raise Refused(answer["error"])
        return answer

    def _line(self, deadline: float, timeout: float) -> bytes:
        assert self.process.stdout is not None
        while b"\n" not in self.rest:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.process.stdout], [], [], left)[0]:
                self.close()
                raise Refused(f"took more than {timeout:.0f} s")
            piece = self.process.stdout.read(1 << 16)
            if not piece:
                raise Refused(self._end())
            self.rest += piece
        line, _, self.rest = self.rest.partition(b"\n")
        return line

    def _end(self) -> str:
        code = self.process.wait(10)
        lines = [x for x in self.log.read_text(errors="replace").splitlines() if x.strip()]
        return f"process ended with {code}: {lines[-1].strip() if lines else 'no message'}"

    def close(self) -> None:
        """End the process and those it started: torch.compile has compilers."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
