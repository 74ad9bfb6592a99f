"""One file: gradients against differences, ten steps, and the exported model."""

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
from tests.wild.differences import Differences
from tests.wild.inputs import accepted
from tests.wild.original import Original, mean_square
from tests.wild.surgery import ADAPTERS, before_saturation, with_adapters

RATES = (1e-3, 1e-4, 1e-5)
AGREES, AGREES_SMOOTH, AGREES_FLOAT16 = 1e-2, 1e-3, 5e-2
SMOOTH = ("mobius/", "genai/")
"""Producers of decoders and encoders, where nearness is limited by rounding alone."""
HINT = "straight_through=True"
"""What a refusal advises for files that round their activations; the advice is followed."""
KINKS = frozenset({"Relu", "LeakyRelu", "PRelu", "Abs", "MaxPool", "HardSigmoid", "HardSwish"})
"""Operators with kinks: a difference across a kink is not a derivative."""


@dataclasses.dataclass
class Row:
    """What happened to a file."""

    file: str
    verdict: str = ""
    parameters: int = 0
    elements: int = 0
    forward: float | None = None
    gradient: float | None = None
    checked: int = 0
    closer: str = ""
    adapters: float | None = None
    first: float | None = None
    last: float | None = None
    export: float | None = None
    seconds: float = 0.0
    message: str = ""
    day: str = ""
    stamp: str = ""


def judge(path: Path, label: str) -> Row:
    """Return the row of a file."""
    row, start = Row(label), time.perf_counter()
    try:
        row.verdict = _judge(path, row)
    except OnnxTrainError as error:
        row.verdict, row.message = "refused", str(error)
    except Exception as error:  # whatever it is, it is the row's answer: a crash
        row.verdict, row.message = "crash", f"{type(error).__name__}: {error}"
    row.message = row.message.replace(str(path), path.name)
    row.seconds = round(time.perf_counter() - start, 1)
    return row


def _judge(path: Path, row: Row) -> str:
    try:
        original = Original(path)
    except Exception as error:  # protobuf and the runtime raise classes of their own
        row.message = str(error)
        return "not loaded by onnxruntime"
    try:
        feeds = accepted(original.session)
    except TypeError as error:
        row.message = str(error)
        return "no input"
    if feeds is None:
        return "no input"
    name, _ = _target(original.outputs(feeds))
    if not name:
        return "no float output"
    with tempfile.TemporaryDirectory() as folder:
        inner = before_saturation(path, name, Path(folder))
        if inner is not None:
            path, name = inner
            original = Original(path)
        verdict = _trained(path, original, feeds, name, row)
        adapted = with_adapters(path, Path(folder))
        if adapted is not None:
            row.adapters = _gradient(
                adapted, Original(adapted), feeds, name, row.file, train=ADAPTERS
            ).gradient
    worst = max(e for e in (row.gradient, row.adapters, 0.0) if e is not None)
    return "gradient differs" if worst > _limit(original, row.file) else verdict


def _trained(
    path: Path, original: Original, feeds: dict[str, np.ndarray], name: str, row: Row
) -> str:
    """Fill the row; return what training and exporting came to."""
    _, target = _target(original.outputs(feeds), name)
    source: Any = path
    options: dict[str, Any] = {}
    try:
        seen = _gradient(path, original, feeds, name, row.file)
    except OnnxTrainError as error:
        if HINT not in str(error):
            raise
        row.message, options = str(error), {"straight_through": True}
        if "onnxtrain.lora" in str(error):
            source = onnxtrain.lora(path, targets=["*"], rank=2)
    else:
        for field in ("parameters", "elements", "forward", "gradient", "checked", "closer"):
            setattr(row, field, getattr(seen, field))
    verdict = _steps(source, row, losses.LossTerm("mse", output=name), feeds, target, **options)
    if verdict == "trains right" and row.export is not None and row.export > _exact(original):
        return "export differs from predict"
    return "refused; trains by its hint" if options and verdict == "trains right" else verdict


def _gradient(
    path: Path,
    original: Original,
    feeds: dict[str, np.ndarray],
    name: str,
    label: str,
    **options: Any,
) -> Row:
    """Return a row with what the gradient came to."""
    row, (_, target) = Row(label), _target(original.outputs(feeds), name)
    settings: dict[str, Any] = {"loss": losses.LossTerm("mse", output=name), "optimizer": "sgd"}
    trainer = Trainer(onnxtrain.build(path, mode="as-is", **settings, **options), threads=1)
    batch = {**feeds, _target_name(trainer): target}
    _count(trainer, row)
    exact = mean_square(original.outputs(feeds)[name], target)
    row.forward = abs(float(trainer.evaluate_batch(**batch).loss) - exact) / max(exact, 1e-12)
    differences = Differences(original, feeds, name, target)
    row.gradient = differences.error(trainer.gradients(**batch), _limit(original, label))
    row.checked, row.closer = differences.checked, differences.closer
    return row


def _count(trainer: Trainer, row: Row) -> None:
    row.parameters = len(trainer.manifest.parameters)
    row.elements = sum(int(np.prod(p.shape)) for p in trainer.manifest.parameters)


def _limit(original: Original, label: str) -> float:
    if any(t.data_type in (10, 16) for t in original.proto.graph.initializer):
        return AGREES_FLOAT16
    bent = any(n.op_type in KINKS for n in original.proto.graph.node)
    return AGREES_SMOOTH if label.startswith(SMOOTH) and not bent else AGREES


def _exact(original: Original) -> float:
    """Return how near predictions are: where activations are rounded, one of them may differ."""
    rounding = {
        "QuantizeLinear",
        "DynamicQuantizeLinear",
        "DynamicQuantizeMatMul",
        "DynamicQuantizeLSTM",
    }
    return 1e-2 if any(n.op_type in rounding for n in original.proto.graph.node) else 1e-3


def _target(outputs: Mapping[str, Any], name: str = "") -> tuple[str, np.ndarray]:
    """Return the output to look at, and what it should be."""
    floats = {
        n: y
        for n, y in outputs.items()
        if isinstance(y, np.ndarray) and y.dtype.kind == "f" and y.size
    }
    if not floats:
        return "", np.empty(0)
    name = name or next((n for n in floats if "logits" in n), next(iter(floats)))
    y = floats[name]
    size = float(np.std(y.astype(np.float64))) or 1.0
    noise = np.random.default_rng(8).standard_normal(y.shape) * size
    return name, (y.astype(np.float64) + noise).astype(np.float32)


def _target_name(trainer: Trainer) -> str:
    (name,) = [t.name for t in trainer.batch_specs if t.role == "target"]
    return name


def _steps(
    source: Any,
    row: Row,
    loss: Any,
    inputs: dict[str, np.ndarray],
    target: np.ndarray,
    **options: Any,
) -> str:
    """Take ten steps at a rate that lowers the loss, and compare what is exported."""
    trainer = None
    for rate in RATES:
        settings: dict[str, Any] = {"loss": loss, "optimizer": f"adamw:lr={rate}", **options}
        trainer = Trainer(onnxtrain.build(source, **settings), threads=1)
        batch = {**inputs, _target_name(trainer): target}
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
    _count(trainer, row)
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
