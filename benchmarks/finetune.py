"""Fine-tuning with adapters of rank 8 beside torch and PEFT: step time, tokens/s, peak memory.

    python -m benchmarks.finetune [--models smollm2-135m encoder] [--threads 1 2] [--rounds 5]
        [--tokens 1x256] [--device cuda] [--peer-python PATH] [--write]

A SmolLM2-135M shape with drawn int4 weights, and an encoder of BERT-base's size in float32. Every
engine runs in its own process; rounds of one step each are interleaved, so that ratios compare the
same moments. The peer needs torch, transformers and peft, in an environment of its own:
``--peer-python``. On CUDA the peer runs in bfloat16, and our sizes are fixed (``--precision
bf16-mixed`` for the same precision). Models and artifacts are made on the spot, and again when the
library has changed. An engine that dies is named with its last words; the other models are measured
all the same. ``--write`` stores the run of this device in ``benchmarks/results/finetune.json`` and
writes ``docs/benchmarks-finetune.md`` from there.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.finetuning import page
from benchmarks.finetuning.decoder_file import write
from benchmarks.finetuning.engines import EngineError, finished, measured
from benchmarks.finetuning.shapes import SHAPES

ROOT = Path(__file__).parents[1]
CACHE = ROOT / ".cache" / "bench" / "finetune"
WARM = 2  # rounds that are not counted
RECOMPUTE = {"smollm2-135m": "auto", "1b": "auto", "tiny": "auto"}  # on the CPU


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["smollm2-135m", "encoder"])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", default="1x256")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="float32", help="of our side, as for build")
    parser.add_argument("--peer-python", default=os.environ.get("PEFT_PYTHON", sys.executable))
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    count, length = (int(n) for n in args.tokens.split("x"))
    measured_rows, failures = [], []
    for name in args.models:
        try:
            folder = built(name, args.device, args.precision, (count, length))
            data = batch(name, count, length)
            for threads in args.threads if args.device == "cpu" else [1]:
                some = rows(name, threads, folder, data, count * length, args)
                print("\n".join(map(page.line, some)), flush=True)
                measured_rows += some
        except EngineError as error:
            failures.append(f"{name}: {error}")
            print(failures[-1], file=sys.stderr, flush=True)
    run = {"command": command(args), "where": where(args.device), "rows": measured_rows}
    print(page.table(run))
    if args.write:
        page.write(args.device, run)
    return 1 if failures else 0


def built(name: str, device: str, precision: str, sizes: tuple[int, int]) -> Path:
    """Return the directory of the training artifacts, made in a process of its own if need be."""
    fixed = "" if device == "cpu" else f"-{sizes[0]}x{sizes[1]}"
    folder = CACHE / f"{name}-{device}-{precision}{fixed}-{version()}"
    if not (folder / "manifest.json").exists():
        given = f"{name!r}, {device!r}, {precision!r}, {sizes!r}, {str(folder)!r}"
        code = f"from benchmarks.finetune import build; build({given})"
        finished("build", [sys.executable, "-c", code])
    return folder


@functools.cache
def version() -> str:
    """Return a short name for the library and the models as they are now."""
    digest = hashlib.sha256()
    for part in (ROOT / "src" / "onnxtrain", ROOT / "benchmarks" / "finetuning"):
        for path in sorted(part.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:8]


def build(name: str, device: str, precision: str, sizes: tuple[int, int], folder: str) -> None:
    """Write the training artifacts of a model; those for a GPU have sizes fixed, to be recorded."""
    import onnxtrain
    from onnxtrain.text import without_cache

    if name == "encoder":
        model, loss = encoder(), "cross_entropy"
    else:
        path = CACHE / name / "model.onnx"
        model = without_cache(path if path.exists() else write(SHAPES[name], path))
        loss = "causal_lm"
    adapted = onnxtrain.lora(model, rank=8, alpha=16, targets="all-linear")
    fixed: dict[str, int] = {"batch_size": sizes[0], "sequence_length": sizes[1]}
    on_cpu = device == "cpu"
    artifacts = onnxtrain.build(
        adapted,
        loss=loss,
        optimizer=onnxtrain.optim.AdamW(lr=1e-4),
        target=device,
        precision=precision,
        check=False,
        dims=None if on_cpu else fixed,
        recompute=RECOMPUTE.get(name, ()) if on_cpu else (),
    )
    artifacts.save(folder)


def encoder() -> Any:
    """Return the encoder as a model."""
    import torch

    from benchmarks.finetuning.encoder import Encoder
    from onnxtrain.torch import from_torch

    torch.manual_seed(0)
    return from_torch(
        Encoder().eval(),
        (torch.zeros(2, 16, dtype=torch.long),),
        names=["input_ids"],
        dynamic_shapes=[{0: "batch_size", 1: "sequence_length"}],
    )


def batch(name: str, count: int, length: int) -> Path:
    """Write the batch that both sides train on."""
    rng = np.random.default_rng(0)
    if name == "encoder":
        arrays = {
            "input_ids": rng.integers(0, 30000, (count, length)),
            "labels": rng.integers(0, 2, count),
        }
    else:
        ids = rng.integers(0, SHAPES[name].vocabulary, (count, length))
        arrays = {"input_ids": ids, "attention_mask": np.ones_like(ids), "labels": ids}
    path = CACHE / f"{name}-{count}x{length}.npz"
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, allow_pickle=False, **arrays)
    return path


def rows(
    name: str, threads: int, folder: Path, data: Path, tokens: int, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Measure one model at one number of threads; return a row of the table for each engine."""
    common = ["--threads", str(threads), "--device", args.device]
    ours = [sys.executable, "-m", "benchmarks.finetuning.ours", str(folder), str(data), *common]
    dtype = "bfloat16" if args.device == "cuda" else "float32"
    peer = [args.peer_python, "-m", "benchmarks.finetuning.peft_side", name, str(data), *common]
    engines = {"onnxtrain": ours}
    if not args.no_peer:
        engines[f"torch + PEFT {dtype}"] = [*peer, "--dtype", dtype]
    together = [engines] if args.device == "cpu" else [{n: c} for n, c in engines.items()]
    samples = {}
    for some in together:  # what a device holds is counted for all who use it: one at a time
        samples |= measured(some, threads, WARM + args.rounds)
    base = samples[[*samples][-1]]
    table = []
    for engine, answers in samples.items():
        timed = answers[WARM:]
        seconds = statistics.median(a["seconds"] for a in timed)
        pairs = zip(timed, base[WARM:], strict=True)
        ratio = statistics.median(a["seconds"] / b["seconds"] for a, b in pairs)
        held = "device" if args.device == "cuda" else "peak"
        peak, other = answers[-1][held], base[-1][held]
        row = {
            "model": name,
            "threads": threads,
            "engine": engine,
            "ms": seconds * 1e3,
            "ratio": ratio,
            "tokens": tokens / seconds,
            "peak_mb": peak,
            "memory": peak / (other or 1.0),
        }
        table.append(row)
    return table


def command(args: argparse.Namespace) -> str:
    """Return the command of a run."""
    threads = " ".join(map(str, args.threads))
    options = f"--models {' '.join(args.models)} --tokens {args.tokens} --threads {threads}"
    if args.device != "cpu":
        options += f" --device {args.device} --precision {args.precision}"
    return f"python -m benchmarks.finetune {options} --rounds {args.rounds}"


def where(device: str) -> str:
    """Return device, cores and load of the machine."""
    return f"{device}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the end"


if __name__ == "__main__":
    sys.exit(main())
