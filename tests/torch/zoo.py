"""Every zoo model through ``from_torch``, then one training step: ``python -m tests.torch.zoo``."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch

from onnxtrain import optim
from onnxtrain.artifacts.build import build
from onnxtrain.errors import OnnxTrainError
from onnxtrain.graph import shapes as S
from onnxtrain.torch import from_torch, last_report
from onnxtrain.torch.checking import flatten_tensors
from onnxtrain.training import Trainer
from tests.zoo.models import ZOO, ZooModel

RATE = 0.05
TOLERANCE = 1e-3
# An update this much smaller than the largest one is measured against the largest.
FLOOR = 1e-2


@dataclass(frozen=True)
class Outcome:
    """What became of one model in one mode: ``pass``, ``refused`` with a reason, or ``fail``."""

    status: str
    exporter: str = ""
    note: str = ""
    worst: float = 0.0


def graph_loss(op, *outputs):
    """Return the mean square of every float output, added up."""
    total = None
    for y in outputs:
        if S.is_float(y):
            term = op.ReduceMean(op.Mul(y, y), keepdims=0)
            total = term if total is None else op.Add(total, term)
    return total


def torch_loss(outputs) -> torch.Tensor:
    """Return the same in torch."""
    return sum(y.square().mean() for y in flatten_tensors(outputs) if y.is_floating_point())


def run(entry: ZooModel, mode: str) -> Outcome:
    """Export, build, train one step, and compare loss and parameters with torch's."""
    module, inputs = entry.build(mode), entry.inputs(entry.batches[0])
    try:
        model = from_torch(module, inputs, train=mode == "train", dynamic_batch=not entry.static)
        report = last_report(model)
        artifacts = build(model, loss=graph_loss, optimizer=optim.SGD(lr=RATE), mode="as-is")
    except OnnxTrainError as error:
        return Outcome("refused", note=" ".join(str(error).split())[:200])
    trainer = Trainer(artifacts, threads=1)
    foreign = {p.name for p in trainer.manifest.parameters} - set(report.names.values())
    if foreign:
        return Outcome("fail", report.exporter, f"no parameters of the module: {sorted(foreign)}")
    names = [x.name for x in model.graph.inputs]
    feeds = {n: x.numpy() for n, x in zip(names, inputs, strict=True) if n in trainer.inputs}
    loss = trainer.step(**feeds).loss
    wanted = torch_loss(module(*inputs))
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    wanted.backward()
    torch.optim.SGD(module.parameters(), lr=RATE).step()
    if not np.isclose(loss, wanted.item(), rtol=1e-4, atol=1e-6):
        return Outcome("fail", report.exporter, f"loss {loss:.6g}, torch {wanted.item():.6g}")
    return _compare(entry, module, trainer, before, report)


def _compare(entry, module, trainer, before, report) -> Outcome:
    moved = {n: (p.detach() - before[n]).norm().item() for n, p in module.named_parameters()}
    floor = FLOOR * max(moved.values())
    worst, at = 0.0, ""
    for name, p in module.named_parameters():
        stored = report.names[name]
        if stored not in trainer.parameters:  # nothing reads it
            if moved[name]:
                return Outcome("fail", report.exporter, f"{name} is not trained")
            continue
        off = np.linalg.norm(trainer.parameters[stored] - p.detach().numpy())
        error = float(off) / max(moved[name], floor, 1e-12)
        if not error <= worst:
            worst, at = error, name
    if worst <= TOLERANCE:
        return Outcome("pass", report.exporter, "", worst)
    if entry.kink:
        return Outcome("kink", report.exporter, f"{at}: {entry.kink}", worst)
    return Outcome("fail", report.exporter, f"{at} is off by {worst:.1e} of its update", worst)


def main(arguments: list[str]) -> int:
    """Run the named models (all by default); print a line for each, then the counts."""
    parser = argparse.ArgumentParser(prog="python -m tests.torch.zoo")
    parser.add_argument("names", nargs="*", metavar="NAME")
    chosen = parser.parse_args(arguments).names or list(ZOO)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    counts: Counter[str] = Counter()
    exporters: Counter[str] = Counter()
    for name in chosen:
        for mode in ZOO[name].modes:
            try:
                outcome = run(ZOO[name], mode)
            except Exception as error:
                text = (str(error).strip().splitlines() or [""])[0]
                outcome = Outcome("fail", note=f"{type(error).__name__}: {text}"[:300])
            counts[outcome.status] += 1
            exporters[outcome.exporter or "none"] += 1
            print(
                f"{name:24}{mode:7}{outcome.exporter:8}{outcome.status:9}"
                f"{outcome.worst:.1e}  {outcome.note}",
                flush=True,
            )
    print(f"from_torch: {counts.total()} runs of {len(chosen)} models: {dict(counts)}")
    print(f"exporters: {dict(exporters)}")
    return 1 if counts["fail"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
