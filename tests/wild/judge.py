"""One file: gradients against differences, ten steps, and what is exported."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

import onnxtrain
from onnxtrain import losses
from onnxtrain.errors import OnnxTrainError
from onnxtrain.training import Trainer
from tests.wild.inputs import accepted
from tests.wild.original import Original, mean_square

STEPS = (3e-2, 1e-2, 3e-3, 1e-3, 1e-4, 1e-5)
"""Sizes of steps in units of the weights' own size; the best of them counts."""
SINGLE = 4
"""So many tensors are also tried one by one."""
RATES = (1e-3, 1e-4, 1e-5)
AGREES = {"float32": 0.01, "float16": 0.05}


@dataclasses.dataclass
class Row:
    """What happened to a file."""

    file: str
    verdict: str = ""
    parameters: int = 0
    elements: int = 0
    forward: float | None = None
    gradient: float | None = None
    first: float | None = None
    last: float | None = None
    export: float | None = None
    seconds: float = 0.0
    message: str = ""


def judge(path: Path, label: str) -> Row:
    """Return the row of a file."""
    row, start = Row(label), time.perf_counter()
    try:
        row.verdict = _judge(path, row)
    except OnnxTrainError as error:
        row.verdict, row.message = "refused", str(error)
    except Exception as error:
        row.verdict, row.message = "crash", f"{type(error).__name__}: {error}"
    row.message = row.message.replace(str(path), path.name)
    row.seconds = round(time.perf_counter() - start, 1)
    return row


def _judge(path: Path, row: Row) -> str:
    try:
        original = Original(path)
    except Exception as error:
        row.message = str(error)
        return "not loaded by onnxruntime"
    try:
        feeds = accepted(original.session)
    except TypeError as error:
        row.message = str(error)
        return "no input"
    if feeds is None:
        return "no input"
    name, target = _target(original.outputs(feeds))
    if not name:
        return "no float output"
    loss = losses.LossTerm("mse", output=name)
    settings: dict[str, Any] = {"loss": loss, "optimizer": "sgd"}
    trainer = Trainer(onnxtrain.build(path, mode="as-is", **settings), threads=1)
    row.parameters = len(trainer.manifest.parameters)
    row.elements = sum(int(np.prod(p.shape)) for p in trainer.manifest.parameters)
    batch = {**feeds, _target_name(trainer): target}
    exact = mean_square(original.outputs(feeds)[name], target)
    row.forward = abs(float(trainer.evaluate_batch(**batch).loss) - exact) / max(exact, 1e-12)
    gradients = trainer.gradients(**batch)
    row.gradient = Differences(original, feeds, name, target).error(gradients)
    del trainer
    verdict = _steps(path, row, loss, batch)
    if verdict == "trains right" and row.export is not None and row.export > _exact(original):
        verdict = "export differs from predict"
    if row.gradient is not None and row.gradient > _limit(original):
        return "gradient differs"
    return verdict


def _limit(original: Original) -> float:
    half = any(t.data_type in (10, 16) for t in original.proto.graph.initializer)
    return AGREES["float16" if half else "float32"]


def _exact(original: Original) -> float:
    """Return how near predictions are: where activations are rounded, one of them may differ."""
    rounding = {"DynamicQuantizeLinear", "DynamicQuantizeMatMul", "DynamicQuantizeLSTM"}
    return 1e-2 if any(n.op_type in rounding for n in original.proto.graph.node) else 1e-3


def _target(outputs: Mapping[str, Any]) -> tuple[str, np.ndarray]:
    """Return the output to look at, and what it should be."""
    floats = {
        n: y
        for n, y in outputs.items()
        if isinstance(y, np.ndarray) and y.dtype.kind == "f" and y.size
    }
    if not floats:
        return "", np.empty(0)
    name = next((n for n in floats if "logits" in n), next(iter(floats)))
    y = floats[name]
    size = float(np.std(y.astype(np.float64))) or 1.0
    noise = np.random.default_rng(8).standard_normal(y.shape) * size
    return name, (y.astype(np.float64) + noise).astype(np.float32)


def _target_name(trainer: Trainer) -> str:
    (name,) = [t.name for t in trainer.batch_specs if t.role == "target"]
    return name


class Differences:
    """Central differences of the loss of the original file."""

    def __init__(
        self, original: Original, feeds: Mapping[str, np.ndarray], name: str, target: np.ndarray
    ) -> None:
        self.original, self.feeds, self.name, self.target = original, feeds, name, target

    def error(self, gradients: Mapping[str, np.ndarray]) -> float | None:
        """Return the largest disagreement, along all weights and along some by themselves."""
        weights = self.original.weights(list(gradients))
        weights = {n: w for n, w in weights.items() if w.dtype.kind in "fV"}
        if not weights:
            return None
        self.session = self.original.adjustable(list(weights))
        given = {x.name for x in self.session.get_inputs()}
        given |= {x.name for x in self.session.get_overridable_initializers()}
        weights = {n: w for n, w in weights.items() if n in given}
        whole = {n: gradients[n].astype(np.float64) for n in weights}
        norms = {n: np.linalg.norm(g) * _size(weights[n]) for n, g in whole.items()}
        if not any(norms.values()):
            return None
        chosen = sorted(norms, key=lambda n: -norms[n])
        chosen = chosen[:: max(1, len(chosen) // SINGLE)][:SINGLE]
        top = max(norms.values())
        errors = [self._along(weights, whole)]
        errors += [self._along(weights, {n: whole[n]}) for n in chosen if norms[n] > 1e-3 * top]
        return max(errors)

    def _along(self, weights: Mapping[str, np.ndarray], ways: Mapping[str, np.ndarray]) -> float:
        """Return the relative error of the derivative along a direction."""
        scaled = {n: g * _size(weights[n]) ** 2 for n, g in ways.items()}
        length = np.sqrt(sum(np.square(s / _size(weights[n])).sum() for n, s in scaled.items()))
        if not length:
            return 0.0
        unit = {n: s / length for n, s in scaled.items()}
        return min(self._at(weights, ways, unit, h) for h in STEPS)

    def _at(
        self,
        weights: Mapping[str, np.ndarray],
        ways: Mapping[str, np.ndarray],
        unit: Mapping[str, np.ndarray],
        h: float,
    ) -> float:
        values, moved = [], []
        for sign in (1, -1):
            feeds = dict(self.feeds)
            for n, d in unit.items():
                moved_to = weights[n].astype(np.float64) + sign * h * d
                feeds[n] = np.asarray(moved_to, weights[n].dtype)
            moved.append({n: feeds[n].astype(np.float64) for n in unit})
            values.append(mean_square(self.session.run([self.name], feeds)[0], self.target))
        # Along what was really moved, after rounding to the type of the file.
        want = sum(float((ways[n] * (moved[0][n] - moved[1][n])).sum()) for n in unit)
        return abs(values[0] - values[1] - want) / abs(want) if want else np.inf


def _size(weight: np.ndarray) -> float:
    """Return the usual size of a weight's elements."""
    return float(np.sqrt(np.square(weight.astype(np.float64)).mean())) or 1.0


def _steps(path: Path, row: Row, loss: Any, batch: Mapping[str, np.ndarray]) -> str:
    """Take ten steps at a rate that lowers the loss, and compare what is exported."""
    trainer = None
    for rate in RATES:
        trainer = Trainer(onnxtrain.build(path, loss=loss, optimizer=f"adamw:lr={rate}"), threads=1)
        values = [float(trainer.step(**batch).loss) for _ in range(10)]
        values.append(float(trainer.evaluate_batch(**batch).loss))
        row.first, row.last = values[0], min(values[-2:])
        if not np.isfinite(values).all():
            return "NaN"
        if row.last < row.first:
            break
    else:
        return "loss does not fall"
    assert trainer is not None
    inputs = {n: a for n, a in batch.items() if n != _target_name(trainer)}
    predicted = trainer.predict(**inputs)
    with tempfile.TemporaryDirectory() as folder:
        trainer.export(Path(folder) / "out.onnx")
        session = onnxruntime.InferenceSession(Path(folder) / "out.onnx")
        names = [y.name for y in session.get_outputs()]
        outputs = dict(zip(names, session.run(names, inputs), strict=True))
    row.export = max(_difference(predicted[n], outputs[n]) for n in names)
    return "trains right"


def _difference(a: Any, b: Any) -> float:
    if not isinstance(a, np.ndarray) or a.dtype.kind != "f" or not a.size:
        return 0.0
    a, b = a.astype(np.float64), np.asarray(b).astype(np.float64)
    return float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-6))
