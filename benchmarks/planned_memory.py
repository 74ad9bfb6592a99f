"""Predicted against measured memory: ``onnxtrain plan`` beside the peak of a run.

    python -m benchmarks.planned_memory [--nets resnet gpt2 ...] [--target 250] [--write]

Nets of the zoo at a batch whose activations take about ``--target`` MB, and directories of training
artifacts given by path, language models at 1 x 256 tokens. Each run is a separate process that
trains two steps; its peak is ``VmHWM``. ``--write`` puts the table into ``docs/memory.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import onnxtrain
from benchmarks.finetuning.serve import peak
from onnxtrain.errors import OnnxTrainError
from onnxtrain.planning.memory_plan import TrainingMemory
from onnxtrain.training import Trainer

PAGE = Path(__file__).parents[1] / "docs" / "memory.md"
MARKS = ("<!-- table -->", "<!-- end of table -->")
MB = 2**20
STEPS = 2
LENGTH = 256
NETS = [
    "lenet",
    "resnet",
    "resnext",
    "densenet",
    "squeezenet",
    "shufflenet",
    "unet",
    "dcgan_generator",
    "style_transfer",
    "super_resolution",
    "conv_autoencoder",
    "diffusion_unet",
    "gpt2",
    "llama",
    "t5",
    "whisper",
    "transformer_lm",
    "mobilenet_v2",
    "efficientnet",
    "convnext",
    "mlp",
    "mlp_mixer",
    "siren",
    "gru",
    "tcn",
    "wavenet",
    "mamba",
    "vit",
    "swin",
    "word2vec",
    "dlrm",
    "capsule",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nets", nargs="+", default=NETS)
    parser.add_argument("--target", type=float, default=100, help="MB of activations")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        serve(*args.child)
        return
    lines = []
    for name in args.nets:
        with tempfile.TemporaryDirectory() as folder:
            lines.append(row(name, Path(folder), args.target * MB))
        print(lines[-1], flush=True)
    if args.write:
        before, _, rest = PAGE.read_text().partition(MARKS[0])
        after = rest.partition(MARKS[1])[2]
        head = "| net | sizes | predicted MB | measured MB | off |\n|---|---|---|---|---|"
        table = "\n".join([head, *lines])
        PAGE.write_text(f"{before}{MARKS[0]}\n\n{table}\n\n{MARKS[1]}{after}")


def row(name: str, folder: Path, target: float) -> str:
    """Return the line of a net, or why there is none."""
    try:
        path = Path(name) if os.sep in name else built(name, folder)
    except OnnxTrainError as error:
        return f"| {name} | {str(error).splitlines()[0]} | | | |"
    run = TrainingMemory(onnxtrain.Artifacts.load(path))
    inputs = run.spec.inputs_of("input", "target")
    symbols = {d for t in inputs for d in t.shape if isinstance(d, str) and d.isidentifier()}
    sizes = {s: LENGTH if "sequence" in s else 1 for s in symbols}
    if "batch" in symbols:
        live = run.step({**sizes, "batch": 64}).live
        sizes["batch"] = min(int(64 * target / max(live, 1)), 400_000)
    predicted = sum(run.parts(sizes).values()) / MB
    data = folder / "batch.npz"
    np.savez(data, allow_pickle=False, **batch(inputs, sizes))
    command = [sys.executable, "-m", "benchmarks.planned_memory", "--child", str(path), str(data)]
    answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    measured = json.loads(answer.splitlines()[-1])
    chosen = ", ".join(f"{n} = {v}" for n, v in sorted(sizes.items()))
    label = path.name if os.sep in name else name
    off = predicted / measured - 1
    return f"| {label} | {chosen} | {predicted:.0f} | {measured:.0f} | {off:+.1%} |"


def built(name: str, folder: Path) -> Path:
    """Write the artifacts of a net of the zoo."""
    from tests.zoo.export import export
    from tests.zoo.models import ZOO

    from onnxtrain.losses import LossTerm

    entry = ZOO[name]
    model = export(entry, entry.modes[-1]).model
    loss = [LossTerm("mse", output=model.graph.output[0].name)]
    onnxtrain.build(model, loss=loss, optimizer="adamw", check=False).save(folder / name)
    return folder / name


def batch(inputs: list, sizes: dict[str, int]) -> dict[str, np.ndarray]:
    """Return random numbers, and small integers that are in every table."""
    rng = np.random.default_rng(0)
    arrays = {}
    for t in inputs:
        shape = [sizes[d] if isinstance(d, str) else d for d in t.shape]
        if "int" in t.dtype:
            arrays[t.name] = np.ones(shape, t.dtype)
        else:
            arrays[t.name] = rng.standard_normal(shape).astype(t.dtype)
    return arrays


def serve(folder: str, data: str) -> None:
    """Train some steps; print the peak of this process."""
    with np.load(data) as file:
        arrays = dict(file)
    trainer = Trainer(folder, threads=1)
    for _ in range(STEPS):
        trainer.step(**arrays)
    print(json.dumps(peak()))


if __name__ == "__main__":
    main()
