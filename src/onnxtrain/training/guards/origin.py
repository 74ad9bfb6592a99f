"""Whether a checkpoint was made by the same model, loss and optimizer."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, cast

import onnx

from onnxtrain.artifacts import Artifacts
from onnxtrain.errors import CheckpointError
from onnxtrain.training.layouts import model_of

_GRAPHS = {"infer": "the model", "eval": "the model in evaluation, or its loss"}
_OPTIONS = ("clip", "ema", "mode")
"""Options of the build that an update depends on."""


def graph_digests(artifacts: Artifacts) -> dict[str, str]:
    """Return a digest of what the model and its loss compute, whatever the weights."""
    manifest = artifacts.manifest
    trained = {w.name for w in (*manifest.parameters, *manifest.buffers)}
    return {
        role: _digest(model_of(artifacts.source(role)).graph, trained)
        for role in _GRAPHS
        if manifest.model(role) is not None
    }


def _digest(graph: onnx.GraphProto, trained: set[str]) -> str:
    """Return the sha256 of all nodes, with weights by name, and of constants of one number."""
    weights = {t.name for t in graph.initializer}
    numbers: dict[str, str] = {}

    def known(name: str) -> str:
        return name if name in weights else numbers.setdefault(name, str(len(numbers)))

    digest = hashlib.sha256()
    for tensor in graph.initializer:
        # A setting, such as a margin.
        if not tensor.dims and not tensor.external_data and tensor.name not in trained:
            digest.update(tensor.SerializeToString(deterministic=True))
    for node in graph.node:
        plain = onnx.NodeProto(op_type=node.op_type, domain=node.domain)
        plain.input.extend(known(x) for x in node.input)
        plain.output.extend(known(y) for y in node.output)
        plain.attribute.extend(sorted(node.attribute, key=lambda a: a.name))
        digest.update(plain.SerializeToString(deterministic=True))
    return digest.hexdigest()


def compared(
    meta: dict[str, Any], own: Mapping[str, Any], label: str, *, strict: bool
) -> dict[str, Any]:
    """Return the metadata of a checkpoint, with the differences of its origin if there are any.

    Raises:
        CheckpointError: listing them, if ``strict``.
    """
    listing = differences(meta, own)
    if listing and strict:
        raise CheckpointError(
            f"{label}: made by another model, loss or optimizer\n  "
            + "\n  ".join(listing)
            + "\nhint: load(..., strict=False) takes it all the same; load_weights() takes weights"
        )
    return {**meta, "differences": listing} if listing else meta


def differences(meta: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """Return in words how the origin of a checkpoint differs from a trainer's own.

    Args:
        meta: of the checkpoint; entries that it has not are not compared.
        own: what the trainer would record.
    """
    there, here = meta.get("manifest"), own["manifest"]
    if not isinstance(there, Mapping):
        return []  # of onnxruntime-training, or written by hand
    there = cast(Mapping[str, Any], there)
    listing: list[str] = []
    for name in ("optimizer", "loss"):
        listing += _entries(name, _plain(there.get(name)), _plain(here[name]))
    listing += _entries("", {"accumulate": there.get("accumulate", 1)}, here, ("accumulate",))
    listing += _entries("", _plain(there.get("options")), here["options"], _OPTIONS)
    graphs = _plain(meta.get("graphs"))
    if _forms(there) != _forms(here):
        graphs.pop("eval", None)  # a loss has other nodes on other targets
    listing += [
        f"{_GRAPHS[role]} has other nodes"
        for role, digest in own["graphs"].items()
        if role in graphs and graphs[role] != digest
    ][:1]
    return listing


def _forms(manifest: Mapping[str, Any]) -> Any:
    models = [_plain(m) for m in manifest.get("models", []) if _plain(m).get("role") == "eval"]
    options = _plain(manifest.get("options"))
    return [m.get("target") for m in models], options.get("opset"), options.get("precision")


def _plain(value: Any) -> dict[str, Any]:
    return dict(cast(Mapping[str, Any], value)) if isinstance(value, Mapping) else {}


def _entries(
    name: str,
    there: Mapping[str, Any],
    here: Mapping[str, Any],
    keys: tuple[str, ...] | None = None,
) -> list[str]:
    keys = tuple(sorted({*there, *here})) if keys is None else keys
    return [
        f"{name}{'.' if name else ''}{k} is {there.get(k)!r} there and {here.get(k)!r} here"
        for k in keys
        if there.get(k) != here.get(k)
    ]
