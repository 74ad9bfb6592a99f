"""Worker processes that several tests share: starting one takes seconds, a process group none."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import socket
import traceback
from multiprocessing.connection import Connection
from typing import Any

PATIENCE = 60.0
"""Seconds for a task."""


class Pool:
    """Processes that run functions of this folder as the workers of a process group."""

    def __init__(self, size: int) -> None:
        # Processes are forked from one that has imported everything and computed nothing.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed", "tests.distributed.nets"])
        self._ends: list[Connection] = []
        self.processes: list[Any] = []
        for _ in range(size):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._ends.append(mine)
            self.processes.append(process)

    def run(self, workers: int, function: str, *arguments: Any) -> list[Any]:
        """Return the result of each worker, or the exception that it raised."""
        self.start(workers, function, *arguments)
        return [self.result(rank) for rank in range(workers)]

    def start(self, workers: int, function: str, *arguments: Any) -> None:
        """Let workers run a function."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        for rank, end in enumerate(self._ends[:workers]):
            end.send((function, arguments, rank, workers, port))

    def result(self, rank: int, patience: float = PATIENCE) -> Any:
        """Return the result of a worker, or its exception: ``EOFError`` if it was killed."""
        if not self._ends[rank].poll(patience):
            raise TimeoutError(f"worker {rank} takes more than {patience} s")
        try:
            return self._ends[rank].recv()
        except (EOFError, ConnectionResetError):
            return EOFError(f"worker {rank} is gone")

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.terminate()


def _serve(end: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    while True:
        function, arguments, rank, workers, port = end.recv()
        os.environ |= {
            **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(workers)},
            **{"LOCAL_WORLD_SIZE": str(workers), "MASTER_ADDR": "127.0.0.1"},
            "MASTER_PORT": str(port),
        }
        try:
            module, _, name = function.rpartition(".")
            result = getattr(importlib.import_module(module), name)(*arguments)
        except Exception as error:
            error.add_note(traceback.format_exc())
            result = error
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        end.send(result)
