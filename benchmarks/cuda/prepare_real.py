"""Prepare real nets for timing: build their artifacts and fill torch.compile's cache.

    python -m benchmarks.cuda.prepare_real --make gpt2 nets bf16-mixed
    python -m benchmarks.cuda.prepare_real --compile gpt2 bf16-mixed

Each step runs in its own process, since both take a minute or more on one core. The first
exports the ONNX file if it does not exist, and builds.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

import onnxtrain
from benchmarks.cuda.real_nets import REAL
from benchmarks.cuda.steps import step_of
from onnxtrain import optim

LR = 1e-4
EAGER_ONLY = ("gpt2-large",)  # torch.compile takes minutes for it
_ME = (sys.executable, "-m", "benchmarks.cuda.prepare_real")


def prepare(
    names: Sequence[str], folder: Path, precisions: Sequence[str], *, compiled: bool
) -> None:
    """Make what is missing, all at once; nothing else runs afterwards, when nets are timed."""
    folder.mkdir(parents=True, exist_ok=True)
    making = {
        n: subprocess.Popen([*_ME, "--make", n, str(folder), *precisions])
        for n in names
        if not all(_facts(folder, n, p).exists() for p in precisions)
    }
    marks = {n: folder / f"{n}.compiled" for n in names if compiled and n not in EAGER_ONLY}
    warm = [n for n, mark in marks.items() if not mark.exists()]
    compiles = [subprocess.Popen([*_ME, "--compile", n, *precisions]) for n in warm]
    for process in compiles:
        process.wait()
    for n in warm:
        marks[n].touch()
    for n, process in making.items():
        if process.wait():
            print(f"{n}: not made", file=sys.stderr)


def export(name: str, folder: Path) -> None:
    """Write a net as ONNX, with its weights in a file beside it."""
    import onnx_ir as ir

    from onnxtrain.torch import from_torch

    start = time.perf_counter()
    torch.manual_seed(0)
    net = REAL[name]
    model = from_torch(net.module(), (net.batch()[0],))
    ir.save(model, folder / f"{name}.onnx", external_data=f"{name}.data")
    (folder / f"{name}.done").touch()
    print(f"{name}: exported in {time.perf_counter() - start:.0f} s", flush=True)


def build(name: str, folder: Path, precision: str) -> None:
    """Build a net for a GPU, and write down how long that took and what memory of the host."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    artifacts = onnxtrain.build(
        folder / f"{name}.onnx",
        loss="cross_entropy",
        optimizer=optim.AdamW(lr=LR, weight_decay=0.01),
        target="cuda",
        precision=precision,
        dims={"batch": len(REAL[name].batch()[0])},
    )
    took = {
        "build_s": round(time.perf_counter() - start, 1),
        "build_gib": round(
            (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20, 2
        ),
        "casts": sum(n.op_type == "Cast" for m in artifacts.models.values() for n in m.graph.node),
    }
    artifacts.save(_facts(folder, name, precision).with_suffix(""))
    _facts(folder, name, precision).write_text(json.dumps(took))
    print(f"{name}, {precision}: built in {took['build_s']} s", flush=True)


def built(name: str, folder: Path, precision: str) -> tuple[onnxtrain.Artifacts, dict[str, float]]:
    """Return a net's artifacts, and how long it took to build them."""
    facts = _facts(folder, name, precision)
    return onnxtrain.Artifacts.load(facts.with_suffix("")), json.loads(facts.read_text())


def _facts(folder: Path, name: str, precision: str) -> Path:
    return folder / f"{name}-{precision}.json"


def compile_once(name: str, precisions: Sequence[str]) -> None:
    """Run two compiled steps, so that what they compile lies in the cache."""
    start = time.perf_counter()
    net = REAL[name]
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    for precision in precisions:
        torch.manual_seed(0)
        module = net.module().cuda().train()
        update = torch.optim.AdamW(module.parameters(), fused=True)
        step = step_of(torch.compile(module), update, net.batch(), precision)
        step()
        step().item()
        torch.compiler.reset()
    print(f"{name}: compiled in {time.perf_counter() - start:.0f} s", flush=True)


def main() -> None:
    """Export, make or compile one net."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--make", nargs="+", metavar=("NET", "FOLDER"))
    parser.add_argument("--export", nargs=2, metavar=("NET", "FOLDER"))
    parser.add_argument("--compile", nargs="+", metavar=("NET", "PRECISION"))
    args = parser.parse_args()
    if args.compile:
        compile_once(args.compile[0], args.compile[1:])
        return
    if args.export:
        export(args.export[0], Path(args.export[1]))
        return
    name, folder, *precisions = args.make
    if not (Path(folder) / f"{name}.done").exists():  # in a process of its own: so is its memory
        subprocess.run([*_ME, "--export", name, folder], check=True)
    for precision in precisions:
        if not _facts(Path(folder), name, precision).exists():
            build(name, Path(folder), precision)


if __name__ == "__main__":
    main()
