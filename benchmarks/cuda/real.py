"""Real nets on a GPU: ours beside torch eager and torch.compile, interleaved in one process.

    python -m benchmarks.cuda.real --models nets --json real.json
    python -m benchmarks.cuda.report --real real.json

The first run exports and builds the nets and fills torch.compile's cache, several at a time; rows
already in ``real.json`` are kept, so that an interrupted run resumes. All engines get each batch
from the host and return the loss of each step. AdamW, TF32 on for all, and torch's
optimizer is the fused one. Losses of the first 20 steps are compared.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
import traceback
from pathlib import Path
from typing import Any

import torch

import onnxtrain
from benchmarks.cuda.prepare_real import EAGER_ONLY, LR, built, prepare
from benchmarks.cuda.real_nets import REAL, Net
from benchmarks.cuda.steps import Step, facts, profiled, step_of
from onnxtrain.runtime.session import placement

PRECISIONS = ("float32", "bf16-mixed")
ENGINES = ("eager", "compile")
KERNELS = 12  # shown of each engine


def ours(name: str, net: Net, folder: Path, precision: str) -> tuple[Step, Any, dict[str, Any]]:
    """Return a step, the trainer, and what it took to get there."""
    x, labels = (t.numpy() for t in net.batch())
    artifacts, took = built(name, folder, precision)
    start = time.perf_counter()
    trainer = onnxtrain.Trainer(artifacts, device="cuda")
    took |= {"trainer_s": round(time.perf_counter() - start, 1)}
    return lambda: float(trainer.step(x, labels).loss), trainer, took


def torchs(net: Net, precision: str, compiled: bool) -> Step:
    """Return a step of torch."""
    torch.manual_seed(0)
    module = net.module().cuda().train()
    update = torch.optim.AdamW(module.parameters(), lr=LR, weight_decay=0.01, fused=True)
    forward = torch.compile(module) if compiled else module
    step = step_of(forward, update, net.batch(), precision)
    return lambda: step().item()


def taken() -> float:
    """Return GiB of the device's memory that are taken."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


def used() -> float:
    """Return GiB of the device's memory that are taken, without what torch keeps for later."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return taken()


def warm_up() -> None:
    """Load the libraries that both use: their memory belongs to neither."""
    x = torch.randn(2, 3, 32, 32, device="cuda", requires_grad=True)
    y = torch.nn.functional.conv2d(x, torch.randn(4, 3, 3, 3, device="cuda"))
    (y.flatten(1) @ y.flatten(1).T).sum().backward()


def measure(name: str, args: argparse.Namespace, precision: str) -> dict[str, Any]:
    """Return the figures of one net in one precision."""
    net = REAL[name]
    row: dict[str, Any] = {"net": name, "precision": precision}
    base = used()
    step, trainer, took = ours(name, net, args.models, precision)
    row |= took
    start = time.perf_counter()
    losses = {"ours": [step()]}
    row["first_step_s"] = round(time.perf_counter() - start, 2)
    losses["ours"] += [step() for _ in range(args.losses - 1)]
    row["captured"] = trainer.captured
    row["ours_gib"] = round(used() - base, 2)
    row["left"] = [n for source in trainer.step_models for n in placement(source).left][:8]
    engines: dict[str, Step] = {"ours": step}
    for engine in args.engines:
        if engine == "compile" and name in EAGER_ONLY:
            continue
        before = used()
        start = time.perf_counter()
        try:
            run = torchs(net, precision, engine == "compile")
            losses[engine] = [run()]
            row[f"{engine}_first_s"] = round(time.perf_counter() - start, 1)
            losses[engine] += [run() for _ in range(args.losses - 1)]
        except Exception as error:  # a peer that fails is a cell of the table
            row[f"{engine}_error"] = str(error)[:200]
            continue
        engines[engine] = run
        row[f"{engine}_gib"] = round(taken() - before, 2)
    row |= timed_in_turns(engines, args.rounds, args.steps)
    for engine, run in engines.items():
        row[f"{engine}_gpu_ms"], row[f"{engine}_kernels"] = profiled(run, 3, KERNELS)
    row["losses"] = {e: [round(v, 5) for v in values] for e, values in losses.items()}
    for engine in engines.keys() & set(args.engines):
        pairs = list(zip(losses["ours"], losses[engine], strict=True))
        row[f"{engine}_worst_loss"] = max(abs(a - b) / abs(b) for a, b in pairs)
    return row


def timed_in_turns(engines: dict[str, Step], rounds: int, steps: int) -> dict[str, float]:
    """Return the median milliseconds of a step of each engine."""
    spent: dict[str, list[float]] = {e: [] for e in engines}
    for _ in range(rounds):
        for engine, run in engines.items():
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(steps):
                run()
            torch.cuda.synchronize()
            spent[engine].append((time.perf_counter() - begin) / steps * 1e3)
    return {f"{e}_ms": round(statistics.median(t), 2) for e, t in spent.items()}


def main() -> None:
    """Measure what was asked for and is not there yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=list(REAL))
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--precisions", nargs="*", default=PRECISIONS)
    parser.add_argument("--engines", nargs="*", default=ENGINES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--losses", type=int, default=20)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    prepare(args.only, args.models, args.precisions, compiled="compile" in args.engines)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    warm_up()
    rows = json.loads(args.json.read_text())["rows"] if args.json.exists() else []
    known = {(r["net"], r["precision"]) for r in rows if "error" not in r}
    for name in args.only:
        for precision in args.precisions:
            if (name, precision) in known:
                continue
            try:
                row = measure(name, args, precision)
            except Exception as error:  # a net that fails is a row of the table
                traceback.print_exc()
                row = {"net": name, "precision": precision, "error": str(error)[:300]}
            shown = {k: v for k, v in row.items() if "kernels" not in k and k != "losses"}
            print(json.dumps(shown), flush=True)
            rows = [r for r in rows if (r["net"], r["precision"]) != (name, precision)] + [row]
            args.json.write_text(
                json.dumps({"facts": facts("benchmarks.cuda.real"), "rows": rows}, indent=1)
            )
            used()
            torch.compiler.reset()


if __name__ == "__main__":
    main()
