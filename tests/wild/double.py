"""A file in float64, run by ONNX's reference implementation: differences without rounding."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from onnx.reference.ops import op_average_pool, op_max_pool

from onnxtrain.autodiff.gradients import load_normalized
from onnxtrain.errors import OnnxTrainError
from tests.wild.original import graphs

NARROW, DOUBLE = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16), onnx.TensorProto.DOUBLE
STANDARD = {"", "ai.onnx"}


_erf = np.vectorize(math.erf, otypes=[np.float64])


class Erf(OpRun):
    """The error function in float64: the reference rounds it to float32."""

    op_domain = ""

    def _run(self, x: np.ndarray) -> tuple[np.ndarray]:  # type: ignore[override]
        return (_erf(x).astype(x.dtype),)


class Gelu(OpRun):
    """GELU in float64: the reference takes its own error function for it."""

    op_domain = ""

    def _run(self, x: np.ndarray, approximate: str | None = None) -> tuple[np.ndarray]:  # type: ignore[override]
        if approximate == "tanh":
            inner = np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
        else:
            inner = _erf(x / math.sqrt(2)).astype(x.dtype)
        return (x * (1 + inner) / 2,)


class MaxPool(op_max_pool.MaxPool):
    """Pooling that has one window where the kernel is larger than the input, as onnxruntime has."""

    op_domain = ""

    def _run(self, x: np.ndarray, **attributes: Any) -> Any:  # type: ignore[override]
        return super()._run(x, **_with_a_window(x, attributes))


class AveragePool(op_average_pool.AveragePool_19):
    """The same for means."""

    op_domain = ""

    def _run(self, x: np.ndarray, **attributes: Any) -> Any:  # type: ignore[override]
        return super()._run(x, **_with_a_window(x, attributes))


def _with_a_window(x: np.ndarray, attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return attributes whose pads make room for the kernel."""
    sizes, kernel = x.shape[2:], attributes["kernel_shape"]
    pads = list(attributes.get("pads") or [0] * 2 * len(sizes))
    for i, (size, width) in enumerate(zip(sizes, kernel, strict=True)):
        pads[len(sizes) + i] += max(0, width - size - pads[i] - pads[len(sizes) + i])
    return {**attributes, "pads": pads}


class Double:
    """Runs a file of standard operators with all floats as wide as they get."""

    def __init__(self, proto: onnx.ModelProto) -> None:
        model = onnx.ModelProto()
        model.CopyFrom(proto)
        for graph in graphs(model.graph):
            _widen(graph)
        self.evaluator: Any = ReferenceEvaluator(model, new_ops=[Erf, Gelu, MaxPool, AveragePool])

    def run(self, names: Sequence[str], feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Return outputs, as a session of the runtime does."""
        wide = {n: a.astype(np.float64) if a.dtype.kind == "f" else a for n, a in feeds.items()}
        outputs = self.evaluator.run(list(names), wide)
        if any(y.dtype.kind == "f" and not np.isfinite(y).all() for y in outputs):
            raise FloatingPointError("the reference gives no finite numbers")
        return outputs


def widened(proto: onnx.ModelProto) -> Double | None:
    """Return the file in float64, if all its operators are standard ones."""
    kinds = {n.domain for graph in graphs(proto.graph) for n in graph.node}
    return Double(proto) if kinds <= STANDARD and not proto.functions else None


def written_out(path: Path) -> Double | None:
    """Return the file in float64 with fused operators written out, if that is possible."""
    try:
        proto = ir.to_proto(load_normalized(path, "portable").model)
    except OnnxTrainError:
        return None
    return widened(proto)


def _widen(graph: onnx.GraphProto) -> None:
    del graph.value_info[:]
    for value in (*graph.input, *graph.output):
        if value.type.tensor_type.elem_type in NARROW:
            value.type.tensor_type.elem_type = DOUBLE
    for tensor in graph.initializer:
        _widen_tensor(tensor)
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.name in ("to", "dtype") and attribute.i in NARROW:
                attribute.i = DOUBLE
            elif attribute.HasField("t"):
                _widen_tensor(attribute.t)
            elif node.op_type == "Constant" and attribute.name in ("value_float", "value_floats"):
                floats = attribute.f if attribute.name == "value_float" else list(attribute.floats)
                wide = ir.tensor(np.asarray(floats, np.float64))
                node.attribute[0].CopyFrom(
                    ir.serde.serialize_attribute(ir.AttrTensor("value", wide))
                )


def _widen_tensor(tensor: onnx.TensorProto) -> None:
    if tensor.data_type not in NARROW:
        return
    array = ir.serde.deserialize_tensor(tensor).numpy().astype(np.float64)
    name = tensor.name
    tensor.CopyFrom(ir.serde.serialize_tensor(ir.Tensor(array, name=name)))
