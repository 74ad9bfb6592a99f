"""Memory saved and time spent by ``build(recompute=...)`` on a GPT-2-like net.

    python -m benchmarks.recompute [--layers 12] [--width 256] [--batch 8] [--write]

Each setting runs in its own process, so that memory peaks do not mix; rounds of timed steps are
interleaved between the processes. Prints a Markdown table; ``--write`` puts it into
``docs/artifacts.md``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

DOCS = Path(__file__).parents[1] / "docs" / "artifacts.md"
MARKS = ("<!-- recompute table -->", "<!-- end of recompute table -->")
WAYS: dict[str, str | list[str]] = {"keep everything": [], "`h.*`": ["h.*"], "`auto`": "auto"}
WORDS = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("layers", 12), ("width", 256), ("length", 128), ("batch", 8)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        serve(Path(args.child), args.batch, args.length, args.threads)
        return
    with tempfile.TemporaryDirectory() as folder:
        export(args, Path(folder))
        text = table(measure(args, Path(folder)), args)
    print(text)
    if args.write:
        page = DOCS.read_text()
        before, after = page.split(MARKS[0])[0], page.split(MARKS[1])[1]
        DOCS.write_text(f"{before}{MARKS[0]}\n\n{text}\n{MARKS[1]}{after}")


def export(args: argparse.Namespace, folder: Path) -> None:
    import torch

    import onnxtrain
    from benchmarks.workloads.text import GPT2
    from onnxtrain.torch import from_torch

    net = GPT2(WORDS, args.width, args.layers, 4, args.length)
    words = torch.zeros(args.batch, args.length, dtype=torch.long)
    model = from_torch(net.train(), (words,))
    for i, recompute in enumerate(WAYS.values()):
        loss, optimizer = "cross_entropy", onnxtrain.optim.AdamW(lr=1e-3)
        onnxtrain.build(model, loss=loss, optimizer=optimizer, recompute=recompute).save(
            folder / str(i)
        )


def serve(folder: Path, batch: int, length: int, threads: int) -> None:
    """Run one step per line of standard input; answer with its time, loss and the peak so far."""
    from onnxtrain.artifacts import Artifacts
    from onnxtrain.training import Trainer

    trainer = Trainer(Artifacts.load(folder), threads=threads, layout="vector")
    rng = np.random.default_rng(0)
    x = rng.integers(0, WORDS, (batch, length))
    y = rng.integers(0, WORDS, batch * length)
    start = peak()
    for _ in sys.stdin:
        begun = time.perf_counter()
        loss = trainer.step(x, y).loss
        taken = time.perf_counter() - begun
        print(json.dumps([taken, loss, peak() - start]), flush=True)


def peak() -> float:
    """Return the largest resident size of this process so far, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(x.split()[1]) for x in lines if x.startswith("VmHWM")) / 1024


def measure(args: argparse.Namespace, folder: Path) -> dict[str, list[list[float]]]:
    names = [f"--{n}={getattr(args, n)}" for n in ("batch", "length", "threads")]
    workers = {
        way: subprocess.Popen(
            [sys.executable, "-m", "benchmarks.recompute", f"--child={folder / str(i)}", *names],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for i, way in enumerate(WAYS)
    }
    samples: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    for _ in range(args.rounds + 1):  # the first one warms up
        for way, worker in workers.items():
            assert worker.stdin is not None
            assert worker.stdout is not None
            worker.stdin.write("\n")
            worker.stdin.flush()
            samples[way].append(json.loads(worker.stdout.readline()))
    for worker in workers.values():
        worker.communicate()
    return samples


def table(samples: dict[str, list[list[float]]], args: argparse.Namespace) -> str:
    first = next(iter(samples.values()))
    base = statistics.median(t for t, _, _ in first[1:])
    options = f"--layers {args.layers} --width {args.width} --batch {args.batch}"
    lines = [
        f"`python -m benchmarks.recompute {options}`, {args.threads} threads:",
        "",
        "| recompute | memory of the steps, MB | step, ms | time | last loss |",
        "|---|---|---|---|---|",
    ]
    for way, rows in samples.items():
        taken = statistics.median(t for t, _, _ in rows[1:])
        lines.append(
            f"| {way} | {rows[-1][2]:.0f} | {taken * 1e3:.0f} | {taken / base:.2f} "
            f"| {rows[-1][1]:.6f} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
