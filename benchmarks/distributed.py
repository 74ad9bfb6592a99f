"""One and two workers beside DistributedDataParallel: python -m benchmarks.distributed.

One thread per worker, gloo, AdamW, the nets of ``benchmarks.workloads``. In every round each
variant takes its turn in the same processes; the table has medians over rounds. ``bytes`` is what a
worker gives to all-reduces per step, ``wait`` the part of the step that it spends in them. The
second table is a model on paper for larger groups, from sizes of nets and assumed speeds.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import onnxtrain
from benchmarks.workloads import WORKLOADS
from onnxtrain.torch import from_torch
from onnxtrain.training import distributed

NETS = ["mlp", "cnn", "vit"]
ROUNDS, SECONDS = 7, 1.0
"""Rounds of the interleaved run, and how long a variant runs in each of them at least."""

GPU_FLOPS, GPU_LINK, NODE_LINK, GPUS_PER_NODE = 4e14, 4.5e11, 5e10, 8
"""Assumed: sustained bf16 FLOP/s of a GPU, bytes/s of its links in a node and of its share of the
network between nodes (400 Gbit/s), and GPUs per node."""
PAPER = {  # parameters that train, bytes of a gradient element, FLOPs of a step of one GPU
    "ResNet-50, 128 images": (25.6e6, 4, 3 * 2 * 4.1e9 * 128),
    "BERT-base, 64 x 128 tokens": (110e6, 4, 6 * 110e6 * 64 * 128),
    "LoRA rank 16 of 1B, 8 x 1024 tokens": (11e6, 4, 4 * 1e9 * 8 * 1024),
    "1B in full, 8 x 1024 tokens": (1e9, 4, 6 * 1e9 * 8 * 1024),
}


def save_artifacts(name: str, folder: Path) -> Path:
    """Export and build a net of the benchmarks."""
    chosen = WORKLOADS[name]
    x, _ = chosen.batch()
    model = from_torch(chosen.module(), torch.from_numpy(x))
    built = onnxtrain.build(model, loss="cross_entropy", optimizer="adamw:lr=0.0001")
    built.save(folder / name)
    return folder / name


def variants(name: str, folder: Path) -> dict[str, Callable[[], Any]]:
    """Return a training step of each variant on this worker's batch."""
    batch = WORKLOADS[name].batch()
    worker = onnxtrain.Trainer(folder, threads=1, distributed="auto")
    assert worker.workers is not None
    steps: dict[str, Callable[[], Any]] = {"ours": lambda: worker.step(*batch)}
    if worker.workers.size == 1:
        alone = onnxtrain.Trainer(folder, threads=1)
        steps["alone"] = lambda: alone.step(*batch)
    ddp = torch.nn.parallel.DistributedDataParallel(WORKLOADS[name].module())
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-4)
    x, labels = (torch.from_numpy(a) for a in batch)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(ddp(x), labels).backward()
        optimizer.step()

    steps["ddp"] = step
    steps["workers"] = lambda: worker.workers
    return steps


def measure(name: str, folder: Path) -> dict[str, Any]:
    """Return seconds per step of each variant, and what ours communicates."""
    steps = variants(name, folder)
    group = steps.pop("workers")()
    counts = {}
    for variant, step in steps.items():
        for _ in range(2):
            step()
        start = time.perf_counter()
        step()
        each = time.perf_counter() - start
        counts[variant] = max(1, round(group.add([SECONDS / each])[0] / group.size))
    times: dict[str, list[float]] = {variant: [] for variant in steps}
    group.sent, group.seconds, total = 0, 0.0, 0
    for _ in range(ROUNDS):
        for variant, step in steps.items():
            group.wait()
            before = group.seconds
            start = time.perf_counter()
            for _ in range(counts[variant]):
                step()
            times[variant].append((time.perf_counter() - start) / counts[variant])
            total += counts[variant] if variant == "ours" else 0
            group.seconds = group.seconds if variant == "ours" else before
    seconds = {variant: statistics.median(t) for variant, t in times.items()}
    ratios = [a / b for a, b in zip(times["ddp"], times["ours"], strict=True)]
    result = {"seconds": seconds, "of_ddp": statistics.median(ratios)}
    result |= {"bytes": group.sent // total, "wait": group.seconds / total / seconds["ours"]}
    if "alone" in times:
        extra = [a / b for a, b in zip(times["ours"], times["alone"], strict=True)]
        result["overhead"] = statistics.median(extra) - 1
    return result


def serve(rank: int, size: int, port: int, name: str, folder: str, out: Any) -> None:
    """Measure as one of several workers."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    result = measure(name, Path(folder))
    if rank == 0:
        out.send(result)
    distributed._leave(torch.distributed)


def run(name: str, folder: Path, size: int) -> dict[str, Any]:
    """Return the results of a net with some workers."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = [(rank, size, port, name, str(folder), theirs) for rank in range(size)]
    processes = [context.Process(target=serve, args=a) for a in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return mine.recv()


def paper(gpus: int, parameters: float, item: int, flops: float) -> float:
    """Return the time of the all-reduce relative to that of the computation.

    A ring moves ``2 (n - 1) / n`` times the bytes over the slowest link.
    """
    link = GPU_LINK if gpus <= GPUS_PER_NODE else NODE_LINK
    return 2 * (gpus - 1) / gpus * parameters * item / link / (flops / GPU_FLOPS)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("nets", nargs="*", default=NETS)
    parser.add_argument("--folder", type=Path, default=Path(".cache/bench/distributed"))
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--paper", action="store_true", help="only the model on paper")
    options = parser.parse_args()
    results: dict[str, dict[str, Any]] = {}
    print("| net | workers | ms per step | of DDP's throughput | KiB per step | in all-reduce |")
    print("|---|---|---|---|---|---|")
    for name in () if options.paper else options.nets:
        folder = save_artifacts(name, options.folder)
        for size in (1, 2):
            found = results[f"{name} {size}"] = run(name, folder, size)
            extra = f" ({100 * found['overhead']:+.1f} % to alone)" if "overhead" in found else ""
            print(
                f"| {name} | {size} | {1e3 * found['seconds']['ours']:.2f}{extra} "
                f"| {found['of_ddp']:.2f} | {found['bytes'] / 1024:.0f} "
                f"| {100 * found['wait']:.0f} % |",
                flush=True,
            )
    print("\n| all-reduce / computation | " + " | ".join(PAPER) + " |")
    print("|---" * (len(PAPER) + 1) + "|")
    for gpus in (8, 64, 1024):
        cells = [f"{paper(gpus, *sizes):.2f}" for sizes in PAPER.values()]
        print(f"| {gpus} GPUs | " + " | ".join(cells) + " |")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
