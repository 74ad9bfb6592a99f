"""Where onnxruntime really puts the nodes of a model."""

from __future__ import annotations

import dataclasses

import onnx
import onnx_ir as ir

from onnxtrain.errors import OnnxTrainError
from onnxtrain.runtime import session as runtime

_FLOATS = ("FLOAT", "DOUBLE", "FLOAT16", "BFLOAT16")


@dataclasses.dataclass(frozen=True)
class Placement:
    """The nodes of a model by execution provider."""

    counts: dict[str, int]
    """Number of nodes of each provider, after onnxruntime's own simplifications."""
    left: tuple[str, ...]
    """Nodes that leave the device with a float tensor of rank 1 or more: operator and name."""

    @property
    def clean(self) -> bool:
        """Whether no such tensor leaves the device."""
        return not self.left


def placement(source: bytes | str, *, device: str = "cuda") -> Placement:
    """Return where the nodes of a model run; shape arithmetic on the CPU is left out of ``left``.

    Args:
        source: serialised model, or a path.
        device: as in :class:`~onnxtrain.Trainer`.
    """
    runtime.check_device(device)
    old = OnnxTrainError("onnxruntime tells no placement\nhint: onnxruntime 1.24 or later")
    options = runtime.recording_options(None)
    session = runtime.create(source, device=device, options=options)
    proto = onnx.load(source) if isinstance(source, str) else onnx.load_from_string(source)
    heavy = _float_nodes(proto)
    counts: dict[str, int] = {}
    left: list[str] = []
    if not hasattr(session, "get_provider_graph_assignment_info"):
        raise old
    for part in session.get_provider_graph_assignment_info():
        nodes = part.get_nodes()
        counts[part.ep_name] = counts.get(part.ep_name, 0) + len(nodes)
        if device == "cpu" or part.ep_name != "CPUExecutionProvider":
            continue
        # A node that onnxruntime made itself has no known tensors: it counts.
        left += [f"{n.op_type} {n.name!r}" for n in nodes if heavy.get(n.name, True)]
    if not counts:
        raise old
    return Placement(counts, tuple(left))


def _float_nodes(model: onnx.ModelProto) -> dict[str, bool]:
    """Return for each node whether it reads or writes a float tensor of rank 1 or more."""
    inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
    graph = ir.from_proto(inferred).graph
    return {
        node.name or "": any(_is_float_tensor(x) for x in (*node.inputs, *node.outputs))
        for node in graph
    }


def _is_float_tensor(x: ir.Value | None) -> bool:
    if x is None or x.dtype is None:
        return False
    return x.dtype.name in _FLOATS and (x.shape is None or len(x.shape) > 0)
