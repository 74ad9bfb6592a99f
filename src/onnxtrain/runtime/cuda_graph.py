"""Whether a run can be recorded once as a CUDA graph and replayed."""

from __future__ import annotations

import warnings
from typing import Any

import onnx

from onnxtrain import thresholds as T
from onnxtrain.errors import OnnxTrainError
from onnxtrain.manifest import ModelSpec
from onnxtrain.runtime import session as runtime

_REFUSED = "graph capture feature"  # from onnxruntime's words where a node is on the CPU
_SHOWN = 5
_SIZES = ("Shape", "Size")  # of values whose sizes are known nothing is left of them
_GRAPHS = (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS)


def obstacle(model: onnx.ModelProto, spec: ModelSpec) -> str | None:
    """Return what stands against a recording, or ``None``.

    A replay repeats kernels and addresses: every size must be fixed, and nothing may branch.
    """
    for t in (*spec.inputs, *spec.outputs):
        free = [d for d in t.shape if not isinstance(d, int)]
        if free:
            return f"{t.name!r} has free sizes: {', '.join(map(str, free))}"
    for node in model.graph.node:
        if any(a.type in _GRAPHS for a in node.attribute):
            return f"{node.op_type} {node.name!r} has a body"
        if node.op_type in _SIZES:
            return f"{node.op_type} {node.name!r} computes a size that is not known before"
        if node.op_type == "Concat" and len(node.input) > T.CAPTURED_CONCAT_INPUTS:
            return f"Concat {node.name!r} joins more than {T.CAPTURED_CONCAT_INPUTS} tensors"
    return None


def can_capture(
    model: onnx.ModelProto | None, spec: ModelSpec | None, wanted: bool | None, *, device: str
) -> bool:
    """Return whether the steps of a run are to be recorded.

    Args:
        model: what is to be run at each step; ``None`` if gradients are accumulated in between.
        spec: describes it.
        wanted: ``None`` records where that can be done.
        device: where it runs.

    Raises:
        OnnxTrainError: if it was asked for and cannot be done, with the reason.
    """
    if wanted is False or (wanted is None and device != "cuda"):
        return False
    if device != "cuda":
        reason = f"the device is {device}"
    elif model is None or spec is None:
        reason = "gradients are accumulated, and the update is a model of its own"
    else:
        reason = obstacle(model, spec)
    if reason is not None and wanted:
        raise OnnxTrainError(
            f"a step cannot be captured: {reason}\n"
            "hint: build(..., dims={...}) fixes sizes; capture=None captures where it can"
        )
    return reason is None


def create_capturing(
    source: bytes | str, *, asked: bool | None, device: str, threads: int | None, rest: bool = False
) -> tuple[Any, bool]:
    """Return a session that records its runs if all nodes are on the device, and whether it does.

    Args:
        source: the model, which nothing in its graph keeps from being recorded.
        asked: ``None`` falls back to runs that are not recorded, with a warning that names nodes.
        device: where it runs.
        threads: of the session's pool.
        rest: see :func:`onnxtrain.runtime.session.create`.

    Raises:
        OnnxTrainError: if a recording was asked for, and nodes are on the CPU.
    """
    try:
        created = runtime.create(source, device=device, threads=threads, capture=True, rest=rest)
    except OnnxTrainError as error:
        if _REFUSED not in str(error):
            raise
    else:
        return created, True
    options = runtime.recording_options(threads)
    session = runtime.create(source, device=device, options=options, rest=rest)
    nodes = runtime.nodes_on_host(session)
    text = f"{len(nodes)} nodes run on the CPU: {', '.join(nodes[:_SHOWN])}"
    text += ", ..." if len(nodes) > _SHOWN else ""
    if asked:
        raise OnnxTrainError(
            f"a step cannot be captured: {text}\n"
            'hint: build(..., target="cuda") has forms for the device; capture=None runs without'
        )
    warnings.warn(f"steps are not captured as a CUDA graph: {text}", stacklevel=2)
    return session, False
