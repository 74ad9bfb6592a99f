"""Workers beside DistributedDataParallel and beside one process, and a model on paper.

    python -m benchmarks.distributed --write     # one and two workers on CPUs: docs/distributed.md
    python -m benchmarks.distributed --export    # files for a machine whose torch cannot export
    python -m benchmarks.distributed --device cuda --json gpu.json     # one GPU

One thread per worker, AdamW, the nets of ``benchmarks.workloads``. In every round each variant
takes its turn in the same processes; figures are medians over rounds. "alone" is a trainer without
``distributed``. One worker does not communicate, so on a GPU, "summed" makes it sum its gradients
over NCCL all the same. The GPU run then trains with two workers that share the GPU, over gloo, and
compares them with one process.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import socket
import statistics
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from torch.nn import functional as F

import onnxtrain
from benchmarks import machine
from benchmarks.workloads import WORKLOADS
from onnxtrain.graph.io import save
from onnxtrain.torch import from_torch
from onnxtrain.training import distributed

NETS = ["mlp", "cnn", "vit"]
FOLDER = Path(".cache/bench/distributed")
PAGE = Path(__file__).parents[1] / "docs" / "distributed.md"
ROUNDS, SECONDS = 9, 0.7
"""Rounds of the interleaved run, and how long a variant runs in each of them."""
PATIENCE = 150.0
"""Seconds for the workers of a run."""
CHECKED = 10
"""Steps of two workers that are compared with those of one process."""

GPU_FLOPS, UTILIZATION = 989e12, 0.4
"""Dense bf16 FLOP/s of an H100 SXM (data sheet), and the share that a good step reaches."""
GPUS_PER_NODE, GPU_LINK = 8, 450e9
"""GPUs of a node, and bytes/s of NVLink 4 in one direction."""
NETWORKS = {"8 x 400 Gbit/s": 400e9, "100 Gbit/s": 12.5e9}
"""Bytes/s of the network of a node: a DGX H100, and a common cloud machine."""
LATENCY = 10e-6
"""Seconds of a message between nodes."""

Step = Callable[[], Any]
Result = dict[str, Any]


def export(name: str, folder: Path) -> Path:
    """Return the file of a net, which is written if it is missing."""
    path = folder / f"{name}.onnx"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        x, _ = WORKLOADS[name].batch()
        save(from_torch(WORKLOADS[name].module(), torch.from_numpy(x)), path)
    return path


def built(path: Path, device: str, *, fixed: bool = False) -> onnxtrain.Artifacts:
    """Return training artifacts of a net; with a fixed batch size, CUDA captures steps."""
    return onnxtrain.build(
        path,
        loss="cross_entropy",
        optimizer="adamw:lr=0.0001,eps=0.0001",
        target="cuda" if device != "cpu" else "cpu",
        dims=WORKLOADS[path.stem].dims() if fixed else None,
    )


def ddp_step(name: str) -> Step:
    """Return a training step of DistributedDataParallel."""
    ddp = torch.nn.parallel.DistributedDataParallel(WORKLOADS[name].module())
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-4)
    x, labels = (torch.from_numpy(a) for a in WORKLOADS[name].batch())

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(ddp(x), labels).backward()
        optimizer.step()

    return step


def timed(steps: Mapping[str, Step], group: distributed.Workers) -> Result:
    """Return seconds per step of each variant, and what the first one communicates."""
    counts = {}
    for variant, step in steps.items():
        for _ in range(3):
            step()
        start = time.perf_counter()
        for _ in range(3):
            step()
        each = (time.perf_counter() - start) / 3
        counts[variant] = max(1, round(group.add([SECONDS / each])[0] / group.size))
    times: dict[str, list[float]] = {variant: [] for variant in steps}
    processor: dict[str, list[float]] = {variant: [] for variant in steps}
    measured, *_ = steps
    sent, waited = 0, 0.0
    for turn in range(ROUNDS):
        for variant, step in list(steps.items())[:: 1 if turn % 2 else -1]:
            group.wait()
            group.sent, group.seconds = 0, 0.0
            start, busy = time.perf_counter(), time.process_time()
            for _ in range(counts[variant]):
                step()
            times[variant].append((time.perf_counter() - start) / counts[variant])
            processor[variant].append((time.process_time() - busy) / counts[variant])
            if variant == measured:
                sent, waited = sent + group.sent, waited + group.seconds
    total = ROUNDS * counts[measured]
    ratios = {
        v: statistics.median(a / b for a, b in zip(times[v], times[measured], strict=True))
        for v in steps
    }
    return {
        "ms": {v: 1e3 * statistics.median(t) for v, t in times.items()},
        "processor_ms": {v: 1e3 * statistics.median(t) for v, t in processor.items()},
        "time_relative_to_ours": ratios,
        "bytes_per_step": sent // total,
        "share_in_all_reduce": waited / sum(times[measured]) / counts[measured],
    }


def on_cpu(names: Sequence[str], folder: Path) -> Result:
    """Return times of this worker beside DistributedDataParallel."""
    results = {}
    for name in names:
        batch = WORKLOADS[name].batch()
        worker = onnxtrain.Trainer(folder / name, threads=1, distributed="auto")
        assert worker.workers is not None
        steps: dict[str, Step] = {"ours": lambda w=worker, b=batch: w.step(*b)}
        if worker.workers.size == 1:
            alone = onnxtrain.Trainer(folder / name, threads=1)
            steps["alone"] = lambda t=alone, b=batch: t.step(*b)
        steps["ddp"] = ddp_step(name)
        results[name] = timed(steps, worker.workers)
    return results


def on_gpu(names: Sequence[str], folder: Path, device: str) -> Result:
    """Return times of one worker over NCCL beside a trainer alone."""
    results: Result = {}
    for name in names:
        try:
            results[name] = _on_gpu(name, folder, device)
        except Exception:  # the other nets are still worth the machine
            results[name] = {"error": traceback.format_exc()}
            print(results[name]["error"], flush=True)
    return results


def _on_gpu(name: str, folder: Path, device: str) -> Result:
    artifacts, batch = built(folder / f"{name}.onnx", device, fixed=True), WORKLOADS[name].batch()
    trainers = {
        "ours": onnxtrain.Trainer(artifacts, device=device, distributed="auto"),
        "alone": onnxtrain.Trainer(artifacts, device=device),
        "summed": onnxtrain.Trainer(artifacts, device=device, distributed="auto"),
    }
    workers = trainers["summed"].workers
    assert workers is not None
    trainers["summed"]._peers = workers
    losses = {v: [t.step(*batch).loss for _ in range(CHECKED)] for v, t in trainers.items()}
    steps = {v: lambda t=t: t.step(*batch) for v, t in trainers.items()}
    result = timed(steps, workers)
    before, start = workers.sent, workers.seconds
    for _ in range(CHECKED):
        steps["summed"]()
    result["bytes_per_step"] = (workers.sent - before) // CHECKED
    result["ms_in_all_reduce"] = 1e3 * (workers.seconds - start) / CHECKED
    result["layout"] = trainers["ours"].layout
    result["captured"] = {v: t.captured for v, t in trainers.items()}
    result["worst_loss"] = _worst(losses["summed"], losses["alone"])
    return result


def part_of(names: Sequence[str], folder: Path, device: str) -> Result:
    """Train as one of several workers on one device; return losses and weights by net."""
    # Two ranks of NCCL cannot share a GPU: the program makes the group.
    torch.distributed.init_process_group("gloo")
    return {n: trained(n, folder, device, distributed="auto") for n in names}


def trained(name: str, folder: Path, device: str, **options: Any) -> Result:
    """Return losses and weights of some steps."""
    try:
        trainer = onnxtrain.Trainer(
            built(folder / f"{name}.onnx", device), device=device, threads=1, **options
        )
        rows = [WORKLOADS[name].batch(seed) for seed in range(CHECKED)]
        if (workers := trainer.workers) is not None:
            part = workers.part(WORKLOADS[name].rows)
            rows = [tuple(a[part] for a in batch) for batch in rows]
        losses = [trainer.step(*batch).loss for batch in rows]
        return {
            "losses": losses,
            "weights": {n: np.array(w) for n, w in trainer.parameters.items()},
        }
    except Exception:
        return {"error": traceback.format_exc()}


def compared(names: Sequence[str], folder: Path, device: str) -> Result:
    """Return how far two workers that share a device are from one process."""
    parts, results = run("part_of", names, folder, 2, device=device), Result()
    for name in names:
        one, two = trained(name, folder, device), parts[name]
        if error := one.get("error") or two.get("error"):
            results[name] = {"error": error}
            print(error, flush=True)
            continue
        squares = [
            (np.square(two["weights"][n].astype(float) - w).sum(), np.square(w.astype(float)).sum())
            for n, w in one["weights"].items()
        ]
        distance, norm = (math.sqrt(sum(column)) for column in zip(*squares, strict=True))
        results[name] = {
            "worst_loss": _worst(two["losses"], one["losses"]),
            "weights": distance / norm,
        }
    return results


def _worst(a: Sequence[float], b: Sequence[float]) -> float:
    return max(abs(x - y) / max(abs(y), 1e-6) for x, y in zip(a, b, strict=True))


def serve(rank: int, size: int, port: int, function: str, out: Any, arguments: Any) -> None:
    """Call a function of this module as one of several workers; worker 0 sends its result."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    positional, named = arguments
    result = globals()[function](*positional, **named)
    if rank == 0:
        out.send(result)
    distributed._leave(torch.distributed)


def run(function: str, names: Sequence[str], folder: Path, size: int, **named: Any) -> Result:
    """Return the result of a function of this module in some workers."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe(duplex=False)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = ([names, folder], named)
    processes = [
        context.Process(target=serve, args=(rank, size, port, function, theirs, arguments))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    theirs.close()
    try:
        if not mine.poll(PATIENCE):
            raise RuntimeError(f"the workers take more than {PATIENCE:g} s")
        return mine.recv()
    except EOFError as error:
        raise RuntimeError("a worker ended without a result") from error
    finally:
        for process in processes:
            process.join(5)
            process.kill()


def cpu_table(results: Mapping[str, Mapping[str, Result]]) -> list[str]:
    """Return the rows of the table of one and two workers."""
    lines = [
        "| net | workers | ms per step | of DDP's throughput | KiB sent per step | in all-reduce |",
        "|---|---|---|---|---|---|",
    ]
    for name, by_size in results.items():
        for size, found in by_size.items():
            ratios = found["time_relative_to_ours"]
            overhead = (
                f" ({100 * (1 / ratios['alone'] - 1):+.1f} % to one process without workers)"
                if "alone" in ratios
                else ""
            )
            sent = f"{found['bytes_per_step'] / 1024:.0f}"
            lines.append(
                f"| {WORKLOADS[name].title} | {size} | {found['ms']['ours']:.2f}{overhead} "
                f"| {ratios['ddp']:.2f} | {sent} | {100 * found['share_in_all_reduce']:.0f} % |"
            )
    return lines


def gpu_table(speed: Result, correct: Result) -> list[str]:
    """Return the rows of the table of a GPU."""
    head = "| net | ms alone | one worker | gradients summed over NCCL | KiB | captured "
    lines = [
        f"{head}| two workers on one GPU: worst loss, weights |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, found in speed.items():
        two = correct.get(name, {})
        match = f"{two['worst_loss']:.1e}, {two['weights']:.1e}" if "weights" in two else "error"
        if "error" in found:
            lines.append(f"| {WORKLOADS[name].title} | error | | | | | {match} |")
            continue
        ratios = found["time_relative_to_ours"]
        ours, summed = 1 / ratios["alone"] - 1, ratios["summed"] / ratios["alone"] - 1
        lines.append(
            f"| {WORKLOADS[name].title} | {found['ms']['alone']:.3f} | {100 * ours:+.1f} % "
            f"| {100 * summed:+.1f} % | {found['bytes_per_step'] / 1024:.0f} "
            f"| {', '.join(v for v, c in found['captured'].items() if c) or 'none'} | {match} |"
        )
    return lines


def resnet50() -> tuple[float, float]:
    """Return parameters and multiply-adds per image of 224 x 224."""
    parameters, work, channels, size = 64 * 3 * 49 + 128, 64 * 3 * 49 * 112**2, 64, 56
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 << stage
        for block in range(blocks):
            before, size = size, size // 2 if stage and not block else size
            convolutions = [
                (channels * width, width, before),
                (width * width * 9, width, size),
                (width * width * 4, 4 * width, size),
            ]
            if not block:
                convolutions.append((channels * width * 4, 4 * width, size))
            parameters += sum(weights + 2 * out for weights, out, _ in convolutions)
            work += sum(weights * side**2 for weights, _, side in convolutions)
            channels = 4 * width
    return parameters + channels * 1000 + 1000, work + channels * 1000


def bert_base() -> float:
    """Return the number of parameters: 12 layers of width 768, 30,522 tokens."""
    width, tables = 768, 30522 + 512 + 2
    layer = 4 * (width**2 + width) + 2 * 4 * width**2 + 5 * width + 4 * width
    return tables * width + 2 * width + 12 * layer + width**2 + width


def decoder(rank: int | None) -> float:
    """Return the parameters of a decoder of 1.2B, Llama 3.2's, or of adapters on its linears."""
    layers, width, keys, hidden, vocabulary = 16, 2048, 512, 8192, 128256
    linears = [(width, width)] * 2 + [(width, keys)] * 2 + [(width, hidden)] * 3
    if rank is not None:
        return layers * sum(rank * (a + b) for a, b in linears)
    return layers * (sum(a * b for a, b in linears) + 2 * width) + (vocabulary + 1) * width


def jobs() -> dict[str, tuple[float, float]]:
    """Return the bytes of gradients in float32 and the FLOPs of a step of one GPU, by job."""
    parameters, work = resnet50()
    decoders = decoder(None)
    tokens = 8 * 1024
    return {
        "ResNet-50, 128 images": (4 * parameters, 3 * 2 * work * 128),
        "BERT-base, 64 x 128 tokens": (4 * bert_base(), 6 * bert_base() * 64 * 128),
        # The frozen weights need no gradient: two passes instead of three.
        "LoRA rank 16 of 1.2B, 8 x 1024 tokens": (4 * decoder(16), 4 * decoders * tokens),
        "1.2B in full, 8 x 1024 tokens": (4 * decoders, 6 * decoders * tokens),
    }


def communication(gpus: int, network: float, size: float, flops: float) -> float:
    """Return the time of the all-reduce relative to that of the computation.

    Rings move ``2 (n - 1) / n`` times the bytes through each GPU and each node, whose slowest link
    bounds them. A tree between the nodes has ``2 log2`` of their number messages one after another.
    """
    nodes = -(-gpus // GPUS_PER_NODE)
    link = GPU_LINK if nodes == 1 else min(GPU_LINK, network)
    seconds = 2 * (gpus - 1) / gpus * size / link + 2 * math.log2(nodes) * LATENCY
    return seconds / (flops / (GPU_FLOPS * UTILIZATION))


def paper_table() -> list[str]:
    """Return the rows of the model on paper."""
    chosen = jobs()
    sizes = (f"{size / 2**20:,.0f}" for size, _ in chosen.values())
    lines = [
        "| GPUs | network of a node | " + " | ".join(chosen) + " |",
        "|---" * (len(chosen) + 2) + "|",
        "| | MiB of gradients | " + " | ".join(sizes) + " |",
    ]
    cases = [(8, "none", GPU_LINK)]
    cases += [(gpus, n, speed) for n, speed in NETWORKS.items() for gpus in (16, 64, 256, 1024)]
    for gpus, network, speed in cases:
        shares = (f"{communication(gpus, speed, *job):.3f}" for job in chosen.values())
        lines.append(f"| {gpus:,} | {network} | " + " | ".join(shares) + " |")
    for network, speed in NETWORKS.items():
        most = (math.ceil(communication(1024, speed, *job) / 0.1) for job in chosen.values())
        needed = " | ".join(str(max(1, n)) for n in most)
        lines.append(f"| 1,024 | {network}: `accumulate=` for less than 0.1 | {needed} |")
    return lines


def replaced(text: str, name: str, lines: Sequence[str]) -> str:
    """Return a page with the lines between two marks replaced."""
    begin = f"<!-- {name}, written by `python -m benchmarks.distributed --write` -->"
    end = "<!-- end -->"
    head, rest = text.split(begin + "\n")
    return f"{head}{begin}\n\n" + "\n".join(lines) + f"\n\n{end}" + rest.split(end, 1)[1]


def on_this_cpu(options: argparse.Namespace) -> Result:
    """Measure one and two workers; print and write the tables."""
    for name in options.nets:
        built(export(name, options.folder), "cpu").save(options.folder / name)
    results: dict[str, dict[str, Result]] = {name: {} for name in options.nets}
    for size in (1, 2):
        for name, found in run("on_cpu", options.nets, options.folder, size).items():
            results[name][str(size)] = found
    facts = machine.facts()
    versions = f"torch {torch.__version__}, onnxruntime {facts['versions']['onnxruntime']}"
    table = [
        "Beside DistributedDataParallel (DDP) on the same net, batch and optimizer, in turns in",
        f"the same processes of one thread: {facts['cpu']}, {versions}, {facts['date'][:10]}.",
        "",
        *cpu_table(results),
    ]
    print("\n".join(table))
    if options.write:
        page = replaced(PAGE.read_text(), "times", table)
        PAGE.write_text(replaced(page, "paper", paper_table()))
    return {"machine": facts, "cpu": results}


def on_this_gpu(options: argparse.Namespace) -> Result:
    """Measure one worker over NCCL, and compare two over gloo with one process."""
    for name in options.nets:
        export(name, options.folder)
    device = options.device
    speed = run("on_gpu", options.nets, options.folder, 1, device=device)
    index = device if device == "cpu" or ":" in device else f"{device}:0"
    try:
        correct = compared(options.nets, options.folder, index)
    except RuntimeError as error:  # the times are still worth the machine
        correct = {"error": repr(error)}
        print(error, flush=True)
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    facts = {"gpu": name, "torch": torch.__version__, "onnxruntime": onnxruntime.__version__}
    table = [f"{name}, torch {torch.__version__}, onnxruntime {onnxruntime.__version__}:", ""]
    print("\n".join([*table, *gpu_table(speed, correct)]))
    return {"machine": facts, "speed": speed, "two_workers": correct}


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("nets", nargs="*", default=NETS)
    parser.add_argument("--device", help="measure one GPU: cuda, or cpu to try the script")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of the files of the nets")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--write", action="store_true", help="write the tables into the page")
    parser.add_argument("--export", action="store_true", help="only write the files of the nets")
    parser.add_argument("--paper", action="store_true", help="only the model on paper")
    options = parser.parse_args()
    if options.export:
        for name in options.nets:
            print(path := export(name, options.folder), path.stat().st_size)
        return
    print("\n".join(paper_table()))
    if options.paper:
        if options.write:
            PAGE.write_text(replaced(PAGE.read_text(), "paper", paper_table()))
        return
    results = on_this_gpu(options) if options.device else on_this_cpu(options)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
