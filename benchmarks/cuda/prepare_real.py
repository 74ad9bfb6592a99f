"""What real nets need before they are timed: their ONNX files, and torch.compile's cache.

    python -m benchmarks.cuda.prepare_real --export gpt2 nets
    python -m benchmarks.cuda.prepare_real --compile gpt2 bf16-mixed

Each of these is a process of its own, since both take a minute or more on one core.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.cuda.real_nets import REAL
from benchmarks.cuda.steps import step_of

LATE = ("gpt2-large",)  # exported while others are timed
_ME = (sys.executable, "-m", "benchmarks.cuda.prepare_real")


class Exports:
    """Processes that write ONNX files."""

    def __init__(self, running: dict[str, subprocess.Popen[bytes]]) -> None:
        self._running = running

    def wait_for(self, name: str) -> None:
        """Wait until a net's file is there."""
        process = self._running.pop(name, None)
        if process is not None and process.wait():
            print(f"{name}: not exported", file=sys.stderr)


def prepare(
    names: Sequence[str], folder: Path, precisions: Sequence[str], *, compiled: bool
) -> Exports:
    """Start what is missing, and wait for all but the largest exports."""
    folder.mkdir(parents=True, exist_ok=True)
    exports = {
        n: subprocess.Popen([*_ME, "--export", n, str(folder)])
        for n in names
        if not (folder / f"{n}.done").exists()
    }
    warm = [n for n in names if compiled and not (folder / f"{n}.compiled").exists()]
    compiles = [subprocess.Popen([*_ME, "--compile", n, *precisions]) for n in warm]
    for process in compiles:
        process.wait()
    for n in warm:
        (folder / f"{n}.compiled").touch()
    made = Exports(exports)
    for n in names:
        if n not in LATE:
            made.wait_for(n)
    return made


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
    """Export or compile one net."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--export", nargs=2)
    parser.add_argument("--compile", nargs="+")
    args = parser.parse_args()
    if args.export:
        export(args.export[0], Path(args.export[1]))
    else:
        compile_once(args.compile[0], args.compile[1:])


if __name__ == "__main__":
    main()
