"""Training steps on CUDA: stock onnxruntime-gpu beside torch eager, interleaved in one process.

    python -m benchmarks.cuda.steps                       # needs torch with CUDA, onnxruntime-gpu
    python -m benchmarks.cuda.steps --only cnn --profile  # kernels of both, by time
    python -m benchmarks.cuda.steps --json steps.json && python -m benchmarks.cuda.report steps.json

Both get each batch as host arrays and return the loss of each step. TF32 is on for both,
torch's optimizers are the fused ones. Losses of the first steps must agree, or no time is shown.
``--models`` names a folder with skeletons (``python -m benchmarks.cuda.nets DIR``), for machines
whose torch cannot export.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import onnxtrain
from benchmarks.cuda.nets import NETS, exported, filled
from benchmarks.workloads import Workload
from onnxtrain import optim
from onnxtrain.runtime.session import placement

CHECKED = 5  # steps whose losses are compared
TOLERANCE = {"float32": 5e-3, "bf16-mixed": 2e-2}
Step = Callable[[], float]


@dataclasses.dataclass
class Row:
    """What was found for one net, optimizer and precision."""

    net: str
    optimizer: str
    precision: str
    ours_ms: float
    torch_ms: float
    torch_async_ms: float
    spread: tuple[float, float]
    worst_loss: float
    captured: bool
    nodes: dict[str, int]
    left: tuple[str, ...]


def torch_step(net: Workload, optimizer: str, precision: str) -> tuple[Step, Step]:
    """Return a step of torch eager that reads the loss, and one that does not wait for it."""
    module = net.module().cuda().train()
    kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[optimizer]
    update = kind(module.parameters(), lr=net.rate(optimizer), fused=True)
    x, labels = (torch.from_numpy(a) for a in net.batch())
    step = step_of(module, update, (x, labels), precision)
    return lambda: step().item(), lambda: _unread(step)


def step_of(
    forward: Callable[[Any], torch.Tensor],
    update: torch.optim.Optimizer,
    batch: tuple[torch.Tensor, torch.Tensor],
    precision: str,
) -> Callable[[], torch.Tensor]:
    """Return a step of torch on a batch of the host, which gives the loss."""
    x, labels = batch
    mixed = precision != "float32"

    def step() -> torch.Tensor:
        update.zero_grad(set_to_none=True)
        here, wanted = x.cuda(), labels.cuda()
        with torch.autocast("cuda", torch.bfloat16, enabled=mixed):
            loss = torch.nn.functional.cross_entropy(forward(here).float(), wanted)
        loss.backward()
        update.step()
        return loss

    return step


def _unread(step: Callable[[], Any]) -> float:
    step()
    return 0.0


def our_step(
    net: Workload, model: Any, optimizer: str, precision: str, *, fixed: bool, capture: bool | None
) -> tuple[Step, onnxtrain.Trainer]:
    """Return a step of the trainer, and the trainer."""
    rate = net.rate(optimizer)
    chosen = optim.SGD(lr=rate) if optimizer == "sgd" else optim.AdamW(lr=rate)
    artifacts = onnxtrain.build(
        model,
        loss="cross_entropy",
        optimizer=chosen,
        target="cuda",
        precision=precision,
        dims=net.dims() if fixed else None,
    )
    trainer = onnxtrain.Trainer(artifacts, device="cuda", capture=capture)
    batch = net.batch()
    return lambda: float(trainer.step(*batch).loss), trainer


def timed(step: Step, count: int) -> float:
    """Return milliseconds per step."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / count * 1e3


def measure(
    net: Workload, model: Any, optimizer: str, precision: str, rounds: int, count: int, **how: Any
) -> Row:
    """Time both on the same data, in turns."""
    ours, trainer = our_step(net, model, optimizer, precision, **how)
    read, free = torch_step(net, optimizer, precision)
    pairs = [(ours(), read()) for _ in range(CHECKED)]
    worst = max(abs(a - b) / max(abs(b), 1e-6) for a, b in pairs)
    if not worst <= TOLERANCE[precision]:
        raise SystemExit(f"{net.name} {optimizer} {precision}: losses differ: {pairs}")
    for step in (ours, read, free):
        timed(step, count)
    timings: list[tuple[float, float, float]] = []
    for i in range(rounds):
        steps = (ours, read, free) if i % 2 else (free, read, ours)
        times = [timed(s, count) for s in steps]
        timings.append(tuple(times if i % 2 else times[::-1]))  # type: ignore[arg-type]
    a, b, c = (statistics.median(column) for column in zip(*timings, strict=True))
    ratios = sorted(x / y for x, y, _ in timings)
    where = [placement(source) for source in trainer.step_models]
    nodes = sum((collections.Counter(w.counts) for w in where), collections.Counter())
    return Row(
        net.name,
        optimizer,
        precision,
        a,
        b,
        c,
        (ratios[0], ratios[-1]),
        worst,
        trainer.captured,
        dict(nodes),
        tuple(n for w in where for n in w.left),
    )


def kernels(step: Step, count: int = 5, top: int = 18) -> str:
    """Return a table of the GPU's kernels by time, for whatever runs in this process."""
    return "\n".join(profiled(step, count, top)[1])


def profiled(step: Step, count: int, top: int) -> tuple[float, list[str]]:
    """Return for how many milliseconds of a step the GPU is busy, and its kernels by time."""
    from torch.profiler import ProfilerActivity, profile

    step()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(count):
            step()
        torch.cuda.synchronize()
    events = sorted(seen.key_averages(), key=lambda e: -e.self_device_time_total)
    total = sum(e.self_device_time_total for e in events) / count / 1e3
    launches = sum(e.count for e in events) / count
    lines = [f"{total:8.3f} ms in {launches:.0f} launches per step"]
    lines += [
        f"{e.self_device_time_total / count / 1e3:8.3f} {e.count / count:6.1f}x {e.key[:110]}"
        for e in events[:top]
    ]
    return round(total, 2), lines


def facts(module: str = "benchmarks.cuda.steps") -> dict[str, str]:
    """Return what the figures of a module depend on."""
    import onnxruntime

    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "GPU": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "onnxruntime-gpu": onnxruntime.__version__,
        "command": " ".join([f"python -m {module}", *map(_plain, sys.argv[1:])]),
    }


def _plain(argument: str) -> str:
    """Return an argument without the folders of one machine."""
    return Path(argument).name if "/" in argument else argument


def main() -> None:
    """Measure what was asked for and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=list(NETS), choices=list(NETS))
    parser.add_argument("--optimizers", nargs="*", default=["sgd", "adamw"])
    parser.add_argument("--precisions", nargs="*", default=["float32", "bf16-mixed"])
    parser.add_argument("--models", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--free", action="store_true", help="leave the batch symbolic")
    parser.add_argument("--no-capture", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    how = {"fixed": not args.free, "capture": False if args.no_capture else None}
    rows: list[Row] = []
    for name in args.only:
        net = NETS[name]
        source = args.models / f"{name}.onnx" if args.models else None
        model = filled(source, net.module()) if source else exported(net)
        for optimizer in args.optimizers:
            for precision in args.precisions:
                if precision != "float32" and name not in ("transformer", "gpt2"):
                    continue
                if args.profile:
                    ours, _ = our_step(net, model, optimizer, precision, **how)
                    print(f"ours, {name} {optimizer} {precision}\n{kernels(ours)}")
                    theirs = torch_step(net, optimizer, precision)[0]
                    print(f"torch, {name} {optimizer} {precision}\n{kernels(theirs)}")
                    continue
                count = args.steps or (20 if name in ("transformer", "gpt2") else 100)
                row = measure(net, model, optimizer, precision, args.rounds, count, **how)
                print(json.dumps(dataclasses.asdict(row)), flush=True)
                rows.append(row)
                gc.collect()
                torch.cuda.empty_cache()
    if args.json:
        report = {"facts": facts(), "rows": [dataclasses.asdict(r) for r in rows]}
        args.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    np.set_printoptions(precision=4)
    main()
