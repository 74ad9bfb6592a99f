"""Checks of a training run: non-finite values, the origin of a checkpoint, its metadata.

- :func:`explain_nonfinite_loss` and :func:`explain_nonfinite_update` find the first tensor that is
  infinite or NaN, and with ``debug_nan`` the node that computes it.
- :func:`check_origin` compares the model, loss and optimizer that wrote a checkpoint with a
  trainer's own.
- :class:`Progress` validates the metadata of a checkpoint before a trainer uses it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import onnx

from onnxtrain.artifacts import Artifacts
from onnxtrain.errors import CheckpointError, OnnxTrainError, argument, by_caller
from onnxtrain.runtime import session as runtime
from onnxtrain.training.labels import explain_sequences

if TYPE_CHECKING:
    from onnxtrain.training.continual import ReplayBuffer
    from onnxtrain.training.data import Batch
    from onnxtrain.training.trainer import Trainer


def is_finite(array: np.ndarray) -> bool:
    """Return whether an array contains neither infinity nor NaN; integers are always finite."""
    if array.dtype.kind in "iubUSO":
        return True
    return bool(np.isfinite(array.astype(np.float32) if array.dtype.kind == "V" else array).all())


def first_nonfinite(named: Iterable[tuple[str, np.ndarray]]) -> str | None:
    """Return the first name whose tensor is not finite, with a description of the tensor."""
    for name, array in named:
        if not is_finite(array):
            return f"{name} ({_describe_array(array)})"
    return None


def explain_nonfinite_loss(
    trainer: Trainer,
    feeds: Mapping[str, np.ndarray],
    computed: Mapping[str, np.ndarray],
    batch: Batch,
    *,
    debug: bool,
) -> str:
    """Return why the loss of a batch is not finite; the step must not be committed yet."""
    head = f"the loss of step {trainer.global_step + 1} is {float(computed[trainer.loss_name])}"
    if found := _nonfinite_data(feeds, batch) or explain_sequences(trainer, feeds, batch):
        return f"{head}\n{found}"
    values = [(f"parameter {n!r}", trainer.view(n)) for n in trainer.parameters]
    values += [(f"buffer {n!r}", trainer.view(n)) for n in trainer.buffers]
    outputs = [(f"output {n!r}", a) for n, a in computed.items() if n != trainer.loss_name]
    first = first_nonfinite([*values, *outputs])
    lines = [head, f"  first tensor that is not finite: {first or 'the loss itself'}"]
    if debug:
        lines.append(f"  {_nonfinite_node(trainer, feeds)}")
    else:
        lines.append(
            f"hint: {argument('debug_nan')} finds the node; the weights are those before this step"
        )
    return "\n".join(lines)


def _nonfinite_data(feeds: Mapping[str, np.ndarray], batch: Batch) -> str | None:
    """Return which rows of the data are not finite, or ``None`` if the batch is finite."""
    for name, array in feeds.items():
        if is_finite(array):
            continue
        bad = ~np.isfinite(array.astype(np.float32) if array.dtype.kind == "V" else array)
        rows = np.flatnonzero(bad.reshape(len(bad), -1).any(1)) if bad.ndim else []
        places = f"\n  in {batch.places([int(r) for r in rows])}" if len(rows) else ""
        return (
            f"  first tensor that is not finite: {name!r} of the batch ({_describe_array(array)})"
            f"{places}\nhint: remove these rows or replace the values; the weights are those "
            "before this step"
        )
    return None


def explain_nonfinite_update(
    trainer: Trainer, feeds: Mapping[str, np.ndarray], batch: Batch
) -> str | None:
    """Return which new value or gradient of a step is not finite, or ``None``."""
    first = first_nonfinite(trainer.pending_updates())
    if first is None or trainer.manifest.options.get("loss_scale"):  # loss scaling skips the step
        return None
    head = f"step {trainer.global_step + 1} has a finite loss, but its update is not finite"
    if found := _nonfinite_data(feeds, batch):
        return f"{head}\n{found}"
    node = _nonfinite_node(trainer, feeds)
    return f"{head}\n  first tensor that is not finite: {first}\n  {node}"


def _nonfinite_node(trainer: Trainer, feeds: Mapping[str, np.ndarray]) -> str:
    node = find_nonfinite_node(*trainer.debug_feeds(feeds))
    return node or "no node of this step computes it from finite values"


def nonfinite_weights(trainer: Trainer) -> dict[str, str]:
    """Return the parameters and buffers that are not finite, each with a description."""
    views = {n: trainer.view(n) for n in (*trainer.parameters, *trainer.buffers)}
    return {n: _describe_array(a) for n, a in views.items() if not is_finite(a)}


def find_nonfinite_node(source: bytes | str, feeds: Mapping[str, np.ndarray]) -> str | None:
    """Run a model with every value as an output; return the node with the first non-finite one.

    NaN is looked for before infinity, which masks contain on purpose.

    Args:
        source: the model.
        feeds: all of its inputs.
    """
    model = runtime.load_graph(source)
    names = [y for node in model.graph.node for y in node.output if y]
    del model.graph.output[:]
    model.graph.output.extend(onnx.ValueInfoProto(name=n) for n in names)
    ort = runtime.import_onnxruntime()
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    plain = runtime.with_weights_folder(source, model.SerializeToString())
    session = runtime.create(plain, options=options)
    values = dict(zip(names, runtime.run(session, names, dict(feeds)), strict=True))
    known = {**feeds, **values}
    for bad in (_has_nan, _has_infinity):
        for node in model.graph.node:
            bad_input = any(bad(known[x]) for x in node.input if x in known)
            for y in node.output:
                if not bad_input and y in values and bad(values[y]):
                    return _describe_node(node, y, known)
    return None


def _describe_node(node: onnx.NodeProto, output: str, known: Mapping[str, np.ndarray]) -> str:
    value = _describe_array(known[output])
    lines = [f"node {node.name!r} ({node.op_type}) computes {output!r} ({value})"]
    lines += [f"  from {x!r} ({_describe_array(known[x])})" for x in node.input if x in known]
    return "\n".join(lines)


def _describe_array(array: np.ndarray) -> str:
    text = f"{array.dtype}{list(array.shape)}"
    if array.dtype.kind != "f" or not array.size:
        return text
    nans, infinities = int(np.isnan(array).sum()), int(np.isinf(array).sum())
    if nans or infinities:
        return f"{text}, {nans} NaN, {infinities} infinite"
    return f"{text}, {array.min():.4g} to {array.max():.4g}"


def _has_nan(array: np.ndarray) -> bool:
    return array.dtype.kind == "f" and bool(np.isnan(array).any())


def _has_infinity(array: np.ndarray) -> bool:
    return array.dtype.kind == "f" and bool(np.isinf(array).any())


INITIAL = "initial_weights"
"""Entry of the manifest's options: digests of the weights that were built."""
_GRAPHS = {"infer": "the model", "eval": "the model in evaluation mode, or its loss"}
_OPTIONS = ("clip", "ema", "mode")
"""Build options that an update depends on."""


def graph_digests(artifacts: Artifacts) -> dict[str, str]:
    """Return digests of the model and its loss that do not depend on the weights."""
    manifest = artifacts.manifest
    trained = {w.name for w in (*manifest.parameters, *manifest.buffers)}
    return {
        role: _digest(runtime.load_graph(artifacts.source(role)).graph, trained)
        for role in _GRAPHS
        if manifest.model(role) is not None
    }


def _digest(graph: onnx.GraphProto, trained: set[str]) -> str:
    """Return the sha256 of all nodes and scalar constants; other values count by position."""
    weights = {t.name for t in graph.initializer}
    positions: dict[str, str] = {}

    def canonical(name: str) -> str:
        return name if name in weights else positions.setdefault(name, str(len(positions)))

    digest = hashlib.sha256()
    for tensor in graph.initializer:
        # Scalars are settings, such as a margin.
        if not tensor.dims and not tensor.external_data and tensor.name not in trained:
            digest.update(tensor.SerializeToString(deterministic=True))
    for node in graph.node:
        plain = onnx.NodeProto(op_type=node.op_type, domain=node.domain)
        plain.input.extend(canonical(x) for x in node.input)
        plain.output.extend(canonical(y) for y in node.output)
        plain.attribute.extend(sorted(node.attribute, key=lambda a: a.name))
        digest.update(plain.SerializeToString(deterministic=True))
    return digest.hexdigest()


def check_origin(
    meta: dict[str, Any], own: Mapping[str, Any], label: str, *, strict: bool
) -> dict[str, Any]:
    """Return the metadata of a checkpoint, with ``"differences"`` if its origin differs.

    Raises:
        CheckpointError: with the differences, if ``strict``.
    """
    listing = origin_differences(meta, own)
    if listing and strict:
        raise CheckpointError(
            f"{label}: another model, loss or optimizer wrote this checkpoint\n  "
            + "\n  ".join(listing)
            + "\nhint: "
            + by_caller(
                "load(..., strict=False) accepts it; load_weights() loads the weights only",
                "pass a checkpoint of these artifacts, or build them with its settings",
            )
        )
    return {**meta, "differences": listing} if listing else meta


def origin_differences(meta: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """Return how the origin of a checkpoint differs from a trainer's own, one line each.

    Args:
        meta: metadata of the checkpoint; missing entries are not compared.
        own: metadata that the trainer would write.
    """
    there, here = meta.get("manifest"), own["manifest"]
    if not isinstance(there, Mapping):
        return []  # from onnxruntime-training, or written by hand
    there = cast(Mapping[str, Any], there)
    listing: list[str] = []
    for name in ("optimizer", "loss"):
        listing += _entry_differences(name, _as_dict(there.get(name)), _as_dict(here[name]))
    listing += _entry_differences(
        "", {"accumulate": there.get("accumulate", 1)}, here, ("accumulate",)
    )
    listing += _entry_differences("", _as_dict(there.get("options")), here["options"], _OPTIONS)
    started, own_start = (_as_dict(_as_dict(m.get("options")).get(INITIAL)) for m in (there, here))
    if started and started.get("frozen") != own_start.get("frozen"):
        listing.append("the frozen weights have other values")
    graphs = _as_dict(meta.get("graphs"))
    if _lowering_settings(there) != _lowering_settings(here):
        graphs.pop("eval", None)  # targets compute a loss by different nodes
    listing += [
        f"{_GRAPHS[role]} has other nodes"
        for role, digest in own["graphs"].items()
        if role in graphs and graphs[role] != digest
    ][:1]
    return listing


def check_initial_weights(meta: Mapping[str, Any], artifacts: Artifacts, label: str) -> None:
    """Check that a run in a directory started from the weights that its artifacts were built with.

    Artifacts in memory are not compared: a script that creates a torch module and resumes draws
    other initial weights in each process, and the checkpoint replaces all of them.

    Raises:
        CheckpointError: if the directory has been built from another model since.
    """
    options = _as_dict(_as_dict(meta.get("manifest")).get("options"))
    started = _as_dict(options.get(INITIAL)).get("trained")
    own = _as_dict(artifacts.manifest.options.get(INITIAL)).get("trained")
    if artifacts.directory is None or started is None or own in (None, started):
        return
    raise CheckpointError(
        f"{label}: this run started from other weights than those that {artifacts.directory} was "
        "built with\nhint: "
        + by_caller(
            "fit(..., directory=...) with another directory starts a run of this model; load() "
            "loads the checkpoint anyway",
            "onnxtrain train ... --out DIRECTORY starts a run of this model; onnxtrain export "
            "... --checkpoint FILE exports the checkpoint anyway",
        )
    )


def _lowering_settings(manifest: Mapping[str, Any]) -> Any:
    models = [_as_dict(m) for m in manifest.get("models", []) if _as_dict(m).get("role") == "eval"]
    options = _as_dict(manifest.get("options"))
    return [m.get("target") for m in models], options.get("opset"), options.get("precision")


def _as_dict(value: Any) -> dict[str, Any]:
    return dict(cast(Mapping[str, Any], value)) if isinstance(value, Mapping) else {}


def _entry_differences(
    name: str,
    there: Mapping[str, Any],
    here: Mapping[str, Any],
    keys: tuple[str, ...] | None = None,
) -> list[str]:
    keys = tuple(sorted({*there, *here})) if keys is None else keys
    prefix = f"{name}." if name else ""
    return [
        f"{prefix}{k} is {there.get(k)!r} in the checkpoint, {here.get(k)!r} here"
        for k in keys
        if there.get(k) != here.get(k)
    ]


SEED_LIMIT = 1 << 24
"""float32 represents all integers below exactly."""
_MAX_LR = float(np.finfo(np.float32).max)
_STEP_LIMIT = (1 << 31) - 1


@dataclasses.dataclass(frozen=True)
class Progress:
    """Learning rate, step counter, seed and properties of a trainer."""

    lr: float
    step: int
    seed: int
    properties: dict[str, int | float | str]

    def read(self, meta: Mapping[str, Any], label: str) -> Progress:
        """Return the progress in the metadata of a checkpoint; this one fills missing entries.

        Raises:
            CheckpointError: with every invalid entry.
        """
        lr, step, seed = (meta.get(n, getattr(self, n)) for n in ("lr", "step", "seed"))
        properties = meta.get("properties", {})
        problems: list[str] = []
        if not _is_lr(lr):
            problems.append(f"'lr' must be finite and not negative, got {lr!r}")
        for name, value, end in (("step", step, _STEP_LIMIT), ("seed", seed, SEED_LIMIT)):
            if type(value) is not int or not 0 <= value < end:
                problems.append(f"{name!r} must be an integer in [0, {end}), got {value!r}")
        if not _are_properties(properties):
            problems.append(f"'properties' must map names to numbers or texts, got {properties!r}")
        if problems:
            raise CheckpointError(f"{label}: invalid metadata:\n  " + "\n  ".join(problems))
        return Progress(float(lr), step, seed, dict(properties))


class LoadedCheckpoint(NamedTuple):
    """A checkpoint that fits a trainer and is not applied yet."""

    arrays: dict[str, np.ndarray]
    progress: Progress
    meta: dict[str, Any]
    replay: ReplayBuffer | None = None


def check_lr(value: Any, name: str) -> float:
    """Return a learning rate as a float.

    Raises:
        OnnxTrainError: if it is negative, infinite, NaN or not a number.
    """
    if isinstance(value, np.ndarray | np.generic) and value.size == 1:
        value = value.item()
    if not _is_lr(value):
        raise OnnxTrainError(f"{name} must be finite and not negative, got {value!r}")
    return float(value)


def _is_lr(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value) and 0 <= value <= _MAX_LR


def _are_properties(value: Any) -> bool:
    if not isinstance(value, Mapping):
        return False
    return all(isinstance(v, int | float | str) for v in cast(Mapping[str, Any], value).values())
