"""Gradients of ``as_module`` beside those of ``vjp``: ``python -m tests.wild.as_torch [PATTERN]``.

Each file of ``make wild`` runs in its own process, with random derivatives of all float outputs; of
what goes into a sigmoid or softmax, if an output ends in one. An error is relative to the largest
element of a tensor's gradient, or to a hundredth of the largest of all tensors. Both differentiate
the same graph and differ in what the runtime fuses, so deep nets may differ by a multiple of what
the last bit of their weights changes.
"""

from __future__ import annotations

import collections
import fnmatch
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

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
from tests.wild.surgery import before_saturation

LIMIT, HALF_LIMIT = 1e-5, 2e-2
"""Largest errors of files in float32 and in float16."""
ROUNDING = 4
"""Or this many times what the last bit of the weights changes: that much deep nets round."""


class Errors(NamedTuple):
    """How far gradients are from those of ``vjp``."""

    module: float
    rounding: float
    """Of ``vjp`` with weights that differ in their last bit."""


def gradient_errors(path: Path, folder: Path) -> Errors:
    """Return the largest errors of the gradients of a file's trainable weights.

    Args:
        path: of the file.
        folder: for a copy, whose outputs before a sigmoid or softmax are outputs as well.

    Raises:
        OnnxTrainError: if ``vjp`` or ``as_module`` refuses the file.
    """
    warnings.simplefilter("ignore")
    session = onnxruntime.InferenceSession(str(path), _options())
    found = accepted(session)
    if found is None:
        raise LookupError("no input that the file runs on")
    feeds = {n: np.array(a) for n, a in found.items()}
    saturated = []
    for output in session.get_outputs():
        inner = before_saturation(path, output.name, folder)
        if inner is not None:
            path = inner[0]
            saturated.append(output.name)
    graph, weights = onnxtrain.vjp(path), onnxtrain.parameters(path)
    module = as_module(path, threads=1).eval()
    parameters = dict(module.named_parameters())
    assert sorted(parameters) == sorted(weights)
    results = module(**{n: torch.from_numpy(a) for n, a in feeds.items()})
    results = (results,) if isinstance(results, torch.Tensor) else results
    floats = [(n, y) for n, y in zip(module.outputs, results, strict=True) if y.is_floating_point()]
    draw = torch.Generator().manual_seed(1)
    seeds = [torch.randn(y.shape, generator=draw).to(y.dtype) for _, y in floats]
    seeds = [s * (n not in saturated) for s, (n, _) in zip(seeds, floats, strict=True)]
    pairs = [(y, s) for (_, y), s in zip(floats, seeds, strict=True) if y.requires_grad]
    torch.autograd.backward(*zip(*pairs, strict=True))
    names = [v.name for v in graph.graph.input][-len(seeds) :]
    cotangents = {n: s.numpy() for n, s in zip(names, seeds, strict=True)}
    nudged = {n: np.nextafter(w, w + w) if w.dtype.kind == "f" else w for n, w in weights.items()}
    reference = onnxruntime.InferenceSession(graph.SerializeToString(), _options())
    expected, near = (
        _gradients(reference, list(weights), {**feeds, **some, **cotangents})
        for some in (weights, nudged)
    )
    own = {n: p.grad for n, p in parameters.items()}
    found = {n: 0.0 if g is None else g.double().numpy() for n, g in own.items()}
    return Errors(_worst(found, expected), _worst(near, expected))


def _options() -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # of inputs that are tried
    return options


def _gradients(
    session: onnxruntime.InferenceSession, weights: list[str], feeds: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    gradients = session.run([f"{n}_grad" for n in weights], feeds)
    return {n: np.asarray(g, np.float64) for n, g in zip(weights, gradients, strict=True)}


def _worst(found: Mapping[str, Any], expected: Mapping[str, np.ndarray]) -> float:
    sizes = {n: np.abs(g).max(initial=0.0) for n, g in expected.items()}
    floor = 1e-2 * max(sizes.values()) + 1e-30
    errors = (
        np.abs(found[n] - g).max(initial=0.0) / max(sizes[n], floor) for n, g in expected.items()
    )
    return float(max(errors))


def judged(path: Path, label: str) -> Row:
    """Return the row of a file."""
    row, start = Row(label), time.perf_counter()
    onnxruntime.set_default_logger_severity(4)
    try:
        with tempfile.TemporaryDirectory() as folder:
            row.gradient, rounding = gradient_errors(path, Path(folder))
        limit = HALF_LIMIT if "fp16" in label else LIMIT
        row.verdict = "equal" if row.gradient <= max(limit, ROUNDING * rounding) else "differs"
        row.message = (
            f"{rounding:.0e} by the last bit of the weights" if row.gradient > limit else ""
        )
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
