"""Whether a run can be recorded once as a CUDA graph and replayed."""

from __future__ import annotations

import onnx

from onnxtrain.errors import OnnxTrainError
from onnxtrain.manifest import ModelSpec

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
