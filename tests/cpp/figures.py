"""Time, size and memory of the C++ trainer: ``python -m tests.cpp.figures [--write]``.

Prints Markdown tables; ``--write`` puts them into ``docs/any-language.md``.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx_ir as ir

import onnxtrain
from onnxtrain.checkpoint import to_bytes
from tests.artifacts.models import finished, graph, weight
from tests.cpp import nets, ort_root
from tests.cpp.programs import built

PAGE = ort_root.ROOT / "docs/any-language.md"
MARKS = ("<!-- figures -->\n", "<!-- end of figures -->\n")


def digits(folder: Path) -> None:
    """Write artifacts of a net 784-256-10 and a batch of 64."""
    rng, op = np.random.default_rng(0), graph()
    x = op.input("x", ir.DataType.FLOAT, ["batch", 784])
    w1 = weight(op, "w1", (rng.standard_normal((784, 256)) / 28).astype(np.float32))
    w2 = weight(op, "w2", (rng.standard_normal((256, 10)) / 16).astype(np.float32))
    model = finished(op, logits=op.MatMul(op.Relu(op.MatMul(x, w1)), w2))
    onnxtrain.build(model, loss="cross_entropy", optimizer="adamw").save(folder / "artifacts")
    batch: dict[str, np.ndarray] = {"0/x": rng.standard_normal((64, 784)).astype(np.float32)}
    batch["0/labels"] = rng.integers(0, 10, 64)
    (folder / "batches").write_bytes(to_bytes(batch, {}))


def overhead(program: Path, folder: Path, steps: int) -> str:
    """Return the cells of a row: microseconds of a plain call and of a step, and per cent."""
    command = [program, "bench", folder / "artifacts", folder / "batches", steps]
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=True)
    words = done.stdout.split()
    return f"{words[1]} | {words[4]} | {words[7]} %"


def peak(*command: object) -> float:
    """Return the most memory that a program had, in MB."""
    code = (
        "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, "
        "stdout=subprocess.DEVNULL); print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    words = [sys.executable, "-c", code, *(str(c) for c in command)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return int(done.stdout) / 1024


def tables(folder: Path) -> str:
    """Return all figures as Markdown."""
    release = built("release")
    program = release / "tests/driver"
    lines = ["| net | plain `Run`, us | step, us | overhead |", "|---|---|---|---|"]
    places = {name: folder / name for name in ("mlp", "cnn", "transformer")}
    for name, place in places.items():
        place.mkdir()
        nets.artifacts(name, place / "artifacts")
        nets.batches(name, place / "batches")
        lines.append(f"| {name} of the tests, batch 8 | {overhead(program, place, 300)} |")
    place = folder / "digits"
    place.mkdir()
    digits(place)
    lines.append(f"| 784-256-10, batch 64, AdamW | {overhead(program, place, 20)} |")
    stripped = folder / "stripped"
    lines += ["", "| what | size or memory |", "|---|---|"]
    for name in ("libonnxtrain_c.so", "tests/quickstart"):
        subprocess.run(["strip", "-o", str(stripped), str(release / name)], check=True)
        lines.append(f"| `{Path(name).name}`, stripped | {stripped.stat().st_size / 1024:.0f} KB |")
    library = ort_root.wheel_library()
    lines.append(f"| `{library.name}`, beside it | {library.stat().st_size / 2**20:.0f} MB |")
    train = ("train", place / "artifacts", place / "batches", 100, folder / "l", folder / "c")
    lines.append(f"| peak memory, 784-256-10, 100 steps, C++ | {peak(program, *train):.0f} MB |")
    loaded = peak(program, "schedule", "cosine", 1, 1, 1)
    lines.append(f"| of it, the program with the library loaded | {loaded:.0f} MB |")
    script = (
        "import onnxtrain, numpy as np, sys; t = onnxtrain.Trainer(sys.argv[1], threads=1)\n"
        "x, y = np.ones((64, 784), np.float32), np.zeros(64, np.int64)\n"
        "for _ in range(100): t.step(x, y)"
    )
    python = peak(sys.executable, "-c", script, place / "artifacts")
    lines.append(f"| the same in Python | {python:.0f} MB |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print the tables, and write them if asked."""
    with tempfile.TemporaryDirectory() as folder:
        text = tables(Path(folder))
    print(text)
    if "--write" in sys.argv:
        page = PAGE.read_text(encoding="utf-8")
        before, rest = page.split(MARKS[0])
        PAGE.write_text(before + MARKS[0] + "\n" + text + "\n" + MARKS[1] + rest.split(MARKS[1])[1])


if __name__ == "__main__":
    main()
