"""The engines to time, and the virtual environments they run from.

    python -m benchmarks.peers          # creates missing ones, under .cache/bench/venvs
    python -m benchmarks.peers torch    # only some

Needs only Python itself, and for ``torch.compile`` a C++ compiler (``g++``).
"""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

from tools.pins import pinned

ROOT = Path(__file__).parents[1]
CACHE = ROOT / ".cache" / "bench"
VENVS = CACHE / "venvs"

# What is installed, in this order: the pins of one line are resolved together.
REQUIREMENTS: dict[str, list[list[str]]] = {
    "torch": [[*pinned("torch"), "numpy", "setuptools"]],
    "ort-training": [
        [*pinned("torch"), "onnx<1.17", "numpy<2"],
        ["onnxruntime-training-cpu==1.19.2", "onnx<1.17", "numpy<2"],
    ],
    "onnxsim": [["onnxsim==0.8.1", *pinned("onnxruntime")]],
}


@dataclasses.dataclass(frozen=True)
class Peer:
    """An engine: its name in tables, its environment, and the module that serves it."""

    name: str
    title: str
    venv: str | None
    """``None`` is the environment of this project."""
    module: str
    arguments: tuple[str, ...] = ()
    builds: bool = False
    """Whether training starts from files that are built before."""

    def python(self) -> Path:
        """Return the interpreter of its environment."""
        folder = ROOT / ".venv" if self.venv is None else VENVS / self.venv
        return folder / "bin" / "python"


OURS = Peer("onnxtrain", "onnxtrain", None, "onnxtrain_engine", builds=True)
REFERENCE = Peer("torch", "torch eager, tuned", "torch", "torch_engine")
PEERS = {
    p.name: p
    for p in (
        OURS,
        REFERENCE,
        Peer("compile", "torch.compile", "torch", "torch_engine", ("--compile",)),
        Peer(
            "ort-training",
            "ORT training 1.19.2",
            "ort-training",
            "ort_training_engine",
            builds=True,
        ),
        Peer("onnxsim", "onnxsim loop", "onnxsim", "onnxsim_engine"),
    )
}


def missing() -> list[str]:
    """Return the environments that are not there as they should be."""
    return [
        name
        for name, lines in REQUIREMENTS.items()
        if not (VENVS / name / ".ready").exists()
        or (VENVS / name / ".ready").read_text() != _mark(lines)
    ]


def _mark(lines: list[list[str]]) -> str:
    return hashlib.sha256(repr(lines).encode()).hexdigest()


def make(name: str) -> None:
    """Make one environment."""
    folder = VENVS / name
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    for line in REQUIREMENTS[name]:
        subprocess.run([str(folder / "bin" / "pip"), "install", "--quiet", *line], check=True)
    (folder / ".ready").write_text(_mark(REQUIREMENTS[name]))


def main() -> None:
    if shutil.which("g++") is None:
        print("no g++: torch.compile will be shown as refused; install g++ to time it")
    wanted = sys.argv[1:] or list(REQUIREMENTS)
    for name in (n for n in missing() if n in wanted):
        print(f"making {VENVS.relative_to(ROOT)}/{name}: {REQUIREMENTS[name]}", flush=True)
        make(name)
    print(f"environments ready: {', '.join(wanted)}")


if __name__ == "__main__":
    main()
