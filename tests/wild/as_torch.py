"""Gradients of ``as_module`` beside those of ``vjp``: ``python -m tests.wild.as_torch [PATTERN]``.

Each file of ``make wild`` runs in its own process, with random derivatives of all float outputs.
An error is relative to the largest element of a tensor's gradient, or to a hundredth of the
largest of all tensors. Both differentiate the same graph and differ in what the runtime fuses.
"""

from __future__ import annotations

import collections
import fnmatch
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import onnxruntime
import torch

import onnxtrain
from onnxtrain.errors import OnnxTrainError
from onnxtrain.torch import as_module
from tests.wild.__main__ import files
from tests.wild.apart import apart
from tests.wild.inputs import accepted
from tests.wild.judge import Row

LIMIT, HALF_LIMIT = 1e-5, 2e-2
"""Largest errors of files in float32 and in float16."""


def gradient_error(path: Path) -> float:
    """Return the largest error of a gradient of a file's trainable weights.

    Raises:
        OnnxTrainError: if ``vjp`` or ``as_module`` refuses the file.
    """
    warnings.simplefilter("ignore")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # of inputs that are tried
    session = onnxruntime.InferenceSession(str(path), options)
    found = accepted(session)
    if found is None:
        raise LookupError("no input that the file runs on")
    feeds = {n: np.array(a) for n, a in found.items()}
    graph, weights = onnxtrain.vjp(path), onnxtrain.parameters(path)
    module = as_module(path, threads=1).eval()
    parameters = dict(module.named_parameters())
    assert sorted(parameters) == sorted(weights)
    results = module(**{n: torch.from_numpy(a) for n, a in feeds.items()})
    results = (results,) if isinstance(results, torch.Tensor) else results
    floats = [y for y in results if y.is_floating_point()]
    draw = torch.Generator().manual_seed(1)
    seeds = [torch.randn(y.shape, generator=draw).to(y.dtype) for y in floats]
    pairs = [(y, s) for y, s in zip(floats, seeds, strict=True) if y.requires_grad]
    torch.autograd.backward(*zip(*pairs, strict=True))
    names = [v.name for v in graph.graph.input][-len(seeds) :]
    cotangents = {n: s.numpy() for n, s in zip(names, seeds, strict=True)}
    gradients = [f"{n}_grad" for n in weights]
    reference = onnxruntime.InferenceSession(graph.SerializeToString(), options)
    values = reference.run(gradients, {**feeds, **weights, **cotangents})
    expected = dict(zip(weights, (np.asarray(g, np.float64) for g in values), strict=True))
    sizes = {n: np.abs(g).max(initial=0.0) for n, g in expected.items()}
    floor = 1e-2 * max(sizes.values()) + 1e-30
    worst = 0.0
    for name, g in expected.items():
        p = parameters[name].grad
        ours = np.zeros_like(g) if p is None else p.double().numpy()
        worst = max(worst, np.abs(ours - g).max(initial=0.0) / max(sizes[name], floor))
    return worst


def judged(path: Path, label: str) -> Row:
    """Return the row of a file."""
    row, start = Row(label), time.perf_counter()
    onnxruntime.set_default_logger_severity(4)
    try:
        row.gradient = gradient_error(path)
        limit = HALF_LIMIT if "fp16" in label else LIMIT
        row.verdict = "equal" if row.gradient <= limit else "differs"
    except OnnxTrainError as error:
        row.verdict, row.message = "refused", str(error)
    except Exception as error:  # whatever it is, it is the row's answer
        row.verdict, row.message = "no answer", f"{type(error).__name__}: {error}"
    row.seconds = round(time.perf_counter() - start, 1)
    return row


def main() -> int:
    pattern = (*sys.argv[1:], "*")[0]
    counts = collections.Counter[str]()
    for name, path in files().items():
        if fnmatch.fnmatch(name, pattern):
            row = apart(name, path, judged)
            counts[row.verdict] += 1
            error = "" if row.gradient is None else f"{row.gradient:.0e}"
            first = (row.message or "").splitlines()[:1]
            print(f"{row.verdict:9} {name:50} {error:6} {row.seconds:5.1f} s", *first, flush=True)
    print(", ".join(f"{n} {verdict}" for verdict, n in counts.most_common()))
    return counts["differs"]


if __name__ == "__main__":
    sys.exit(main() > 0)
