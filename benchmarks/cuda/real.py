"""Real nets on a GPU: ours beside torch eager and torch.compile, interleaved in one process.

    python -m benchmarks.cuda.real --export nets          # once; several at a time
    python -m benchmarks.cuda.real --models nets --json real.json
    python -m benchmarks.cuda.report real.json

All get each batch from the host and give the loss of each step back. AdamW, TF32 on for all, and
torch's optimizer is the fused one. Losses of the first steps are compared.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import onnxtrain
from benchmarks.cuda.real_nets import REAL, Net
from benchmarks.cuda.steps import facts, kernels
from onnxtrain import optim
from onnxtrain.runtime.placement import placement

LR = 1e-4
Step = Callable[[], float]


def export(name: str, folder: Path) -> None:
    """Write a net as ONNX, with its weights in a file beside it."""
    import onnx_ir as ir

    from onnxtrain.torch import from_torch

    start = time.perf_counter()
    torch.manual_seed(0)
    net = REAL[name]
    model = from_torch(net.module(), (net.batch()[0],))
    folder.mkdir(parents=True, exist_ok=True)
    ir.save(model, folder / f"{name}.onnx", external_data=f"{name}.data")
    print(f"{name}: exported in {time.perf_counter() - start:.0f} s", flush=True)


def ours(
    name: str, net: Net, folder: Path, precision: str, **options: Any
) -> tuple[Step, Any, dict]:
    """Return a step, the trainer, and what it took to get there."""
    x, labels = (t.numpy() for t in net.batch())
    start = time.perf_counter()
    artifacts = onnxtrain.build(
        folder / f"{name}.onnx", loss="cross_entropy",
        optimizer=optim.AdamW(lr=LR, weight_decay=0.01),
        target="cuda", precision=precision, dims={"batch": len(x)}, **options,
    )  # fmt: skip
    built = time.perf_counter()
    trainer = onnxtrain.Trainer(artifacts, device="cuda")
    ready = time.perf_counter()
    del artifacts
    return (
        lambda: float(trainer.step(x, labels).loss),
        trainer,
        {"build_s": built - start, "trainer_s": ready - built},
    )


def torchs(net: Net, precision: str, compiled: bool) -> Step:
    """Return a step of torch."""
    torch.manual_seed(0)
    module = net.module().cuda().train()
    update = torch.optim.AdamW(module.parameters(), lr=LR, weight_decay=0.01, fused=True)
    x, labels = net.batch()
    mixed = precision != "float32"
    forward = torch.compile(module) if compiled else module

    def step() -> float:
        update.zero_grad(set_to_none=True)
        here, wanted = x.cuda(), labels.cuda()
        with torch.autocast("cuda", torch.bfloat16, enabled=mixed):
            loss = torch.nn.functional.cross_entropy(forward(here).float(), wanted)
        loss.backward()
        update.step()
        return loss.item()

    return step


def used() -> float:
    """Return GiB of the device's memory that are taken."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


def measure(name: str, args: argparse.Namespace, precision: str) -> dict[str, Any]:
    """Return the figures of one net in one precision."""
    net = REAL[name]
    row: dict[str, Any] = {"net": name, "precision": precision}
    base = used()
    step, trainer, times = ours(name, net, args.models, precision)
    row |= {k: round(v, 1) for k, v in times.items()} | {"captured": trainer.captured}
    start = time.perf_counter()
    losses = {"ours": [step()]}
    row["first_step_s"] = round(time.perf_counter() - start, 2)
    losses["ours"] += [step() for _ in range(args.losses - 1)]
    row["ours_gib"] = round(used() - base, 2)
    row["left"] = [n for source in trainer.step_models for n in placement(source).left][:8]
    engines: dict[str, Step] = {"ours": step}
    for engine in args.engines:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_reserved()
        try:
            run = torchs(net, precision, engine == "compile")
            losses[engine] = [run() for _ in range(args.losses)]
        except Exception as error:  # a peer that fails is a cell of the table
            row[f"{engine}_error"] = str(error)[:200]
            continue
        engines[engine] = run
        row[f"{engine}_gib"] = round((torch.cuda.max_memory_reserved() - before) / 2**30, 2)
    spent: dict[str, list[float]] = {e: [] for e in engines}
    for _ in range(args.rounds):
        for engine, run in engines.items():
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(args.steps):
                run()
            torch.cuda.synchronize()
            spent[engine].append((time.perf_counter() - begin) / args.steps * 1e3)
    row |= {f"{e}_ms": round(statistics.median(t), 2) for e, t in spent.items()}
    row["losses"] = {e: [round(v, 5) for v in values] for e, values in losses.items()}
    if "eager" in losses:
        pairs = list(zip(losses["ours"], losses["eager"], strict=True))
        row["worst_loss"] = max(abs(a - b) / abs(b) for a, b in pairs)
    if args.profile:
        print(f"ours, {name} {precision}\n{kernels(step, 3, args.profile)}", flush=True)
    return row


def main() -> None:
    """Export, or measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[n for n in REAL if n != "gpt2-large"])
    parser.add_argument("--export", type=Path)
    parser.add_argument("--models", type=Path)
    parser.add_argument("--precisions", nargs="*", default=["float32", "bf16-mixed"])
    parser.add_argument("--engines", nargs="*", default=["eager", "compile"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--losses", type=int, default=20)
    parser.add_argument("--profile", type=int, default=0, help="show so many kernels")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.export and len(args.only) > 1:
        command = [sys.executable, "-m", "benchmarks.cuda.real", "--export", str(args.export)]
        running = [subprocess.Popen([*command, "--only", name]) for name in args.only]
        raise SystemExit(max(p.wait() for p in running))
    if args.export:
        return export(args.only[0], args.export)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    rows = []
    for name in args.only:
        for precision in args.precisions:
            try:
                row = measure(name, args, precision)
            except Exception as error:  # a net that fails is a row of the table
                traceback.print_exc()
                row = {"net": name, "precision": precision, "error": str(error)[:300]}
            print(json.dumps(row), flush=True)
            rows.append(row)
            gc.collect()
            torch.cuda.empty_cache()
            torch.compiler.reset()
    if args.json:
        args.json.write_text(json.dumps({"facts": facts(), "rows": rows}, indent=1))
    return None


if __name__ == "__main__":
    main()
