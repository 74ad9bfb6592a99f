"""Which nodes of a graph run on the CPU although the session is on a GPU.

Where a GPU provider has no kernel for a node, onnxruntime runs it on the CPU and copies its inputs
and outputs. Nothing is run here. The answer comes from the target's profile and, for WebGPU, from
the element types of its kernels, as far as they matter for training graphs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import onnx
import onnx_ir as ir

from onnxtrain.errors import LoweringError, expected_one_of
from onnxtrain.graph import shapes as S
from onnxtrain.graph.nodes import subgraphs_of
from onnxtrain.graph.shapes.inference import infer_shapes
from onnxtrain.lowering import profile as profiles
from onnxtrain.lowering.opset_converters import Draft
from onnxtrain.lowering.profile import Profile
from onnxtrain.targets import TARGETS

GPUS = tuple(t.name for t in TARGETS.values() if t.gpu)
"""Targets with a GPU."""
_CONTROL = frozenset({"If", "Loop", "Scan"})
_ON_HOST = frozenset({"Shape", "Size"})  # computed on the CPU without a copy
_CPU_ONLY_MODES = {"Dropout": "training_mode", "BatchNormalization": "training_mode"}
# Inputs of any integer type: indices, sizes, axes.
_INDICES = {
    **dict.fromkeys(("Gather", "GatherND", "GatherElements", "ScatterND", "ScatterElements"), (1,)),
    **dict.fromkeys(("Reshape", "Expand", "Tile", "Pad", "Unsqueeze", "Squeeze", "Split"), (1, 3)),
    **dict.fromkeys(("TopK", "CumSum", "Trilu", "Resize"), (1, 2, 3)),
    "Slice": (1, 2, 3, 4),
}
_BOOL_KERNELS = frozenset(
    {
        *("Cast", "Equal", "Expand", "Flatten", "Greater", "GreaterOrEqual", "Identity", "Less"),
        *("LessOrEqual", "Not", "Reshape", "Squeeze", "Unsqueeze", "Where"),
    }
)


@dataclasses.dataclass(frozen=True)
class NodeOffGpu:
    """A node that runs on the CPU."""

    node: str
    op_type: str
    why: str
    moved: tuple[str, ...]
    """Float tensors of rank 1 or more that it reads or writes; others are shape arithmetic."""

    def __str__(self) -> str:
        tail = f"; moves {', '.join(self.moved)}" if self.moved else "; moves no float tensor"
        return f"{self.node}: {self.op_type}: {self.why}{tail}"


def nodes_off_gpu(model: onnx.ModelProto | ir.Model, target: str = "webgpu") -> list[NodeOffGpu]:
    """Return the nodes that run on the CPU, in graph order.

    Args:
        model: the model that the runtime loads; it is not changed.
        target: ``"webgpu"`` or ``"cuda"``.

    Raises:
        LoweringError: if the target has no GPU.
    """
    chosen = TARGETS.get(target)
    if chosen is None or not chosen.gpu or chosen.profile is None:
        raise LoweringError(f"target {target!r} has no GPU {expected_one_of(target, GPUS)}")
    profile = profiles.find(chosen.profile)
    copied = ir.from_proto(model) if isinstance(model, onnx.ModelProto) else model.clone()
    opset = copied.opset_imports[""]
    infer_shapes(copied.graph, opset)
    reports = (_report(node, _reason(node, profile, opset)) for node in _nodes(copied.graph))
    return [r for r in reports if r is not None]


def _nodes(graph: ir.Graph) -> Iterator[ir.Node]:
    for node in graph:
        yield node
        for body in subgraphs_of(node):
            yield from _nodes(body)


def _report(node: ir.Node, why: str | None) -> NodeOffGpu | None:
    if why is None:
        return None
    values = [x for x in (*node.inputs, *node.outputs) if x is not None and x.name]
    moved = dict.fromkeys(x.name or "" for x in values if S.is_float(x) and S.dims_of(x) != ())
    return NodeOffGpu(node.name or node.outputs[0].name or "", node.op_type, why, tuple(moved))


def _reason(node: ir.Node, profile: Profile, opset: int) -> str | None:
    op = node.op_type
    given = [x for x in node.inputs if x is not None and x.name]
    folded = bool(given) and all(x.const_value is not None for x in given)
    if op in _ON_HOST or folded:  # constants are folded when the model is loaded
        return None
    if op in _CONTROL:
        if op in profile.control_flow and profile.name == "ort-cuda":
            return None
        return "control flow runs on the CPU; the inputs of its body are copied"
    draft = Draft(op, list(node.inputs), dict(node.attributes), node, opset)
    why = profiles.unsupported_reason(profile, draft, opset)
    if why is None and profile.name == "ort-cuda":
        return _asymmetric(node)
    if why is not None:
        return why
    if op == "MaxPool" and len(node.outputs) > 1 and node.outputs[1].name:
        return "WebGPU does not support MaxPool with Indices"
    if op in _CPU_ONLY_MODES and node.attributes.get_int(_CPU_ONLY_MODES[op], 0):
        return f"WebGPU does not support {op} in training mode"
    return _types(node)


def _asymmetric(node: ir.Node) -> str | None:
    """Return the reason if a ConvTranspose has asymmetric pads, which CUDA does not support."""
    pads = node.attributes.get("pads")
    if node.op_type != "ConvTranspose" or pads is None:
        return None
    sizes = list(pads.as_ints())
    half = len(sizes) // 2
    return (
        None if sizes[:half] == sizes[half:] else "CUDA has no ConvTranspose with asymmetric pads"
    )


def _types(node: ir.Node) -> str | None:
    """Return the reason if no WebGPU kernel takes the element types of a node."""
    op, free = node.op_type, _INDICES.get(node.op_type, ())
    if op.startswith("Reduce"):
        free = (1,)
    for i, x in enumerate(node.inputs):
        if x is None or i in free or not x.name:
            continue
        if x.dtype is None:
            continue
        if x.dtype in (ir.DataType.INT64, ir.DataType.UINT8, ir.DataType.INT8):
            return f"WebGPU has no {x.dtype.name.lower()} in {op}"
        if x.dtype == ir.DataType.BOOL and op not in _BOOL_KERNELS:
            return f"WebGPU has no bool in {op}"
        if x.dtype == ir.DataType.DOUBLE:
            return "WebGPU has no double"
    return None


__all__ = ["GPUS", "NodeOffGpu", "nodes_off_gpu"]
