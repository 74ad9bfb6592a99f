"""Workers of a distributed run, on torch.distributed: one trainer per process.

:class:`Workers` is this process and its peers. A trainer with workers runs its part of every batch.
Between the gradient model and the update, the gradients of all workers are summed in place, bucket
by bucket. Everything else that workers share is small: losses and metrics of a batch, the checks at
the start, and results of what only the first worker does (files, validation, printing).

The life of a step:

1. ``Trainer.compute`` runs the gradient model on the rows of this worker. Meanwhile workers sum
   their numbers of rows, unless these have been equal for some steps.
2. Gradients are scaled by the share of rows. After the last micro-batch, workers sum gradients.
   At the same time they sum rows, loss, metrics and requests to stop: waiting twice would take
   twice as long. If rows are not equal as expected, the gradients are computed and summed again.
3. ``Trainer.commit`` runs the same update on every worker.
"""

from __future__ import annotations

import atexit
import datetime
import gc
import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

from onnxtrain.errors import MissingExtraError, OnnxTrainError
from onnxtrain.runtime import session as runtime

R = TypeVar("R")
BUCKET_BYTES = 25 << 20
"""Bytes of gradients per all-reduce, as in DistributedDataParallel."""
JOIN_SECONDS = 120.0
"""How long workers wait for each other at the start."""
CONNECT_SECONDS = 8.0
"""How long they connect once all are there: only a worker that dies then takes longer."""
WAIT_SECONDS = 1800.0
"""How long a worker waits for the others later."""
_PEER_SECONDS = 2.0
CHECK_STEPS = 1000
"""Steps between two comparisons of the parameters of all workers."""


def import_torch() -> Any:
    """Return torch with torch.distributed.

    Raises:
        MissingExtraError: with the command that installs it.
    """
    try:
        import torch
        import torch.distributed
    except ImportError as error:
        raise MissingExtraError(
            'distributed training needs torch\nhint: pip install "onnxtrain[torch,cpu]" (or [gpu])'
        ) from error
    return torch


def join(distributed: str | bool | None, device: str) -> Workers | None:
    """Return the workers of this run; ``None`` if it has one process.

    Args:
        distributed: ``"auto"`` joins the process group that the program has initialized, or else
            that of torchrun, if there is one; ``True`` requires one.
        device: device of the trainer.
    """
    if distributed not in ("auto", True, False, None):
        raise OnnxTrainError(
            f"unknown distributed: {distributed!r} (expected one of 'auto', True, False)"
        )
    if not distributed:
        return None
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if distributed == "auto" and not launched and not _is_initialized():
        return None
    torch = import_torch()
    if not torch.distributed.is_initialized():
        if not launched:
            raise OnnxTrainError(
                "distributed=True, but there is no process group\n"
                "hint: torchrun --nproc-per-node 2 script.py starts two workers"
            )
        _initialize(torch, device)
    return Workers(torch, device)


def restarts() -> int:
    """Return how often torchrun has restarted the workers."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


def _is_initialized() -> bool:
    """Return whether the program has made a process group, without importing torch."""
    import sys

    module: Any = sys.modules.get("torch.distributed")
    return module is not None and module.is_available() and module.is_initialized()


def _initialize(torch: Any, device: str) -> None:
    """Create the process group of torchrun's environment."""
    dist = torch.distributed
    seconds = datetime.timedelta(seconds=JOIN_SECONDS)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), os.environ.get("MASTER_PORT", "29500")
    address = f"{host}:{port}"
    # torchrun keeps its store when it starts the workers again.
    of_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = dist.TCPStore(
            host,
            int(port),
            is_master=rank == 0 and not of_torchrun,
            timeout=seconds,
            wait_for_workers=False,
        )
    except (RuntimeError, ValueError) as error:
        raise OnnxTrainError(
            f"worker {rank} of {size} waited {JOIN_SECONDS:g} s for the store at {address}: "
            f"{_first_line(error)}\n"
            "hint: MASTER_ADDR and MASTER_PORT must be those of worker 0, and reachable"
        ) from error
    try:
        _form(
            torch, dist.PrefixStore(f"onnxtrain/{restarts()}", store), rank, size, address, device
        )
    except RuntimeError as error:
        if isinstance(error, OnnxTrainError):
            raise
        raise OnnxTrainError(
            f"worker {rank} of {size} lost worker 0 or another one before the group at {address} "
            f"had formed: {_first_line(error)}\nhint: the error of the lost worker says why"
        ) from error


def _form(torch: Any, store: Any, rank: int, size: int, address: str, device: str) -> None:
    """Wait for all workers, then create the group."""
    dist = torch.distributed
    if _is_cuda(device):
        torch.cuda.set_device(_local_device(device))
    # The keys name who is missing, which the group itself does not.
    keys = [f"worker/{r}" for r in range(size)]
    store.set(keys[rank], "here")
    deadline = time.monotonic() + JOIN_SECONDS
    while missing := [r for r in range(size) if not store.check([keys[r]])]:
        if time.monotonic() > deadline:
            raise OnnxTrainError(
                f"worker {rank} of {size} waited {JOIN_SECONDS:g} s at {address} for "
                f"{_listing(missing)}\nhint: start the missing workers with the same WORLD_SIZE"
            )
        time.sleep(0.05)
    backend = "cpu:gloo,cuda:nccl" if _is_cuda(device) else "gloo"
    seconds = datetime.timedelta(seconds=CONNECT_SECONDS)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=seconds)
    # Later, workers wait for worker 0 while it validates or writes files.
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=WAIT_SECONDS))
    atexit.register(_leave, dist)


def _leave(dist: Any) -> None:
    """Destroy the process group before the interpreter ends, whose threads would abort it."""
    if dist.is_initialized():
        gc.collect()
        dist.destroy_process_group()


def _is_cuda(device: str) -> bool:
    return device.partition(":")[0] == "cuda"


def _local_device(device: str) -> str:
    """Return ``cuda:LOCAL_RANK`` for ``cuda``."""
    return f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if device == "cuda" else device


class Workers:
    """This process and its peers.

    Args:
        torch: the module.
        device: device of the trainer.
    """

    def __init__(self, torch: Any, device: str) -> None:
        self._torch, self._dist = torch, torch.distributed
        self.rank: int = self._dist.get_rank()
        """Number of this worker, from 0."""
        self.size: int = self._dist.get_world_size()
        """Number of workers."""
        self.device = _local_device(device)
        """Device of this worker."""
        self.stop = False
        """Whether this worker asks all to stop after the next batch."""
        self.all_stop = False
        """Whether a worker has asked so before the last batch."""
        self.sent = 0
        """Bytes of gradients and losses that this worker has given to all-reduces."""
        self.seconds = 0.0
        """Time in these all-reduces."""
        # Small values are on the CPU, whatever the backend of the gradients.
        backend = str(self._dist.get_backend())
        self._control = None if "gloo" in backend else self._dist.new_group(backend="gloo")
        self._checks = 0

    @property
    def main(self) -> bool:
        """Whether this worker prints and writes files."""
        return self.rank == 0

    @property
    def threads(self) -> int:
        """The share of the cores of this worker."""
        from_environment = os.environ.get("LOCAL_WORLD_SIZE", self.size)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        return max(1, cores // int(from_environment))

    def part(self, rows: int) -> slice:
        """Return the rows of a batch that this worker computes; the first workers get one more."""
        each, more = divmod(rows, self.size)
        start = self.rank * each + min(self.rank, more)
        return slice(start, start + each + (self.rank < more))

    def add(self, values: Sequence[float]) -> list[float]:
        """Return the sums of some numbers over all workers."""
        return self.start_add(values)()

    def start_add(self, values: Sequence[float]) -> Callable[[], list[float]]:
        """Start to sum some numbers over all workers; return what waits for the sums."""
        tensor = self._torch.tensor(values, dtype=self._torch.float64)
        wait = self._start([tensor], self._control)

        def sums() -> list[float]:
            wait()
            return tensor.tolist()

        return sums

    def start_add_in_place(self, vectors: Iterable[Any]) -> Callable[[], None]:
        """Start to sum vectors over all workers in place; return what waits for the sums.

        Args:
            vectors: numpy arrays of the host, or OrtValues of a device, which are not copied.
        """
        tensors = [self.tensor(v) for v in vectors]
        buckets = [b for t in tensors for b in t.split(max(1, BUCKET_BYTES // t.element_size()))]
        return self._start(buckets, None)

    def _start(self, tensors: Sequence[Any], group: Any) -> Callable[[], None]:
        """Start the all-reduces of some tensors; return what waits for them."""
        start = time.perf_counter()
        with self._peers():
            pending = [self._dist.all_reduce(t, group=group, async_op=True) for t in tensors]
        self.sent += sum(t.numel() * t.element_size() for t in tensors)
        self.seconds += time.perf_counter() - start

        def wait() -> None:
            start = time.perf_counter()
            with self._peers():
                for work in pending:
                    work.wait()
            if any(t.is_cuda for t in tensors):
                self._synchronize()
            self.seconds += time.perf_counter() - start

        return wait

    def weigh(self, vectors: Iterable[tuple[Any, Any]], factor: float) -> None:
        """Multiply what a batch has added to gradients.

        Args:
            vectors: the gradients, each with those before the batch, or ``None``.
            factor: 0 for a worker without rows.
        """
        for vector, before in vectors:
            new, old = self.tensor(vector), None if before is None else self.tensor(before)
            if old is None and factor:
                new.mul_(factor)
            elif old is None:
                new.zero_()
            elif factor:
                new.sub_(old).mul_(factor).add_(old)
            else:
                new.copy_(old)
        self._synchronize()

    def norm(self, vectors: Iterable[Any]) -> float:
        """Return the norm of all vectors together."""
        squares = [self.tensor(v).double().square().sum().item() for v in vectors]
        return float(sum(squares)) ** 0.5

    def copy_from(self, rank: int, vectors: Iterable[Any]) -> None:
        """Overwrite vectors with those of a worker."""
        if self.size == 1:
            return
        with self._peers():
            for vector in vectors:
                self._dist.broadcast(self.tensor(vector), rank)
        self._synchronize()

    def tensor(self, vector: Any) -> Any:
        """Return a torch tensor that shares the memory of an array or an OrtValue."""
        if not isinstance(vector, np.ndarray):
            return self._torch.from_dlpack(vector)
        if vector.dtype.kind == "V" or vector.dtype.name == "bfloat16":
            return self._torch.from_numpy(vector.view(np.int16)).view(self._torch.bfloat16)
        return self._torch.from_numpy(vector)

    def _synchronize(self) -> None:
        if _is_cuda(self.device):  # onnxruntime has a stream of its own
            self._torch.cuda.current_stream(self.device).synchronize()

    def gather(self, value: Any) -> list[Any]:
        """Return a value of every worker, in the order of their ranks."""
        values: list[Any] = [None] * self.size
        with self._peers():
            self._dist.all_gather_object(values, value, group=self._control)
        return values

    def collect(self, value: R) -> list[R]:
        """Return the values of all workers on worker 0, and nothing elsewhere."""
        values: list[Any] | None = [None] * self.size if self.main else None
        with self._peers():
            self._dist.gather_object(value, values, 0, group=self._control)
        return values or []

    def wait(self) -> None:
        """Wait until all workers are here."""
        self.add([0.0])

    def on_main(self, function: Callable[[], R]) -> R:
        """Return what a function returns on worker 0; the others do not call it.

        Raises:
            OnnxTrainError: the error of worker 0, on all workers.
        """
        outcome: list[Any] = [None, None]
        if self.main:
            try:
                outcome[0] = function()
            except OnnxTrainError as error:
                outcome[1] = str(error)
                with self._peers():
                    self._dist.broadcast_object_list(outcome, 0, group=self._control)
                raise
        with self._peers():
            self._dist.broadcast_object_list(outcome, 0, group=self._control)
        if outcome[1] is not None:
            raise OnnxTrainError(f"worker 0: {outcome[1]}")
        return outcome[0]

    def check_equal(self, facts: Mapping[str, Any]) -> None:
        """Raise an error on all workers if a fact of one differs from that of worker 0."""
        texts = {name: str(value) for name, value in facts.items()}
        first, *others = self.gather(texts)
        problems = []
        for rank, theirs in enumerate(others, 1):
            for name, value in theirs.items():
                if value != first[name]:
                    a, b = (
                        v if len(v) < 60 else f"sha256 {_digest(v)}" for v in (value, first[name])
                    )
                    problems.append(f"{name}: {a} on worker {rank}, {b} on worker 0")
        if problems:
            raise OnnxTrainError(
                "the workers of this run differ:\n  " + "\n  ".join(problems[:5]) + "\n"
                "hint: start all workers with the same files, options and packages"
            )

    def check_parameters(self, read: Callable[[str], np.ndarray], names: Sequence[str]) -> None:
        """Raise an error if the parameters of a worker differ from those of worker 0."""
        digest = hashlib.blake2b(digest_size=16)
        for name in names:
            digest.update(np.ascontiguousarray(read(name)).tobytes())
        digests = self.gather(digest.hexdigest())
        wrong = [r for r, d in enumerate(digests) if d != digests[0]]
        if wrong:
            raise OnnxTrainError(
                f"parameters of {_listing(wrong)} differ from those of worker 0\n"
                "hint: the last checkpoint is good if it was checked; was trainer.parameters set "
                "on one worker only?"
            )

    @contextmanager
    def _peers(self) -> Iterator[None]:
        """Turn the error of a collective into one that names the workers that are gone."""
        try:
            yield
        except RuntimeError as error:
            raise OnnxTrainError(
                f"worker {self.rank} of {self.size} lost {self._lost()}: {_first_line(error)}\n"
                "hint: the error of the lost worker says why; fit(..., resume=True) continues from "
                "the last checkpoint, torchrun --max-restarts does so automatically"
            ) from error

    def _lost(self) -> str:
        """Return who does not answer any more."""
        try:
            store = self._dist.distributed_c10d._get_default_store()
            keys = [f"alive/{r}" for r in range(self.size)]
            store.set(keys[self.rank], "yes")
            deadline = time.monotonic() + _PEER_SECONDS
            lost = [r for r in range(self.size) if r != self.rank]
            while lost and time.monotonic() < deadline:
                lost = [r for r in lost if not store.check([keys[r]])]
                time.sleep(0.05)
        except RuntimeError:  # the store is a part of worker 0, without torchrun
            return "worker 0"
        return _listing(lost) if lost else "the connection to another worker"


def versions() -> dict[str, str]:
    """Return the versions of packages that workers must share."""
    return {"onnxruntime": runtime.import_onnxruntime().__version__, "numpy": np.__version__}


def _listing(ranks: Sequence[int]) -> str:
    return f"worker{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
