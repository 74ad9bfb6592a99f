"""Single-node models, and profiles of runtimes that lack one operator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from onnx.reference import ReferenceEvaluator

from onnxtrain.lowering.profile import Profile

OPSETS = (7, 11, 13, 17, 20)


@dataclass(frozen=True)
class Const:
    """An input that is an initializer of the model."""

    array: np.ndarray


@dataclass(frozen=True)
class Case:
    """One node. Its inputs are arrays (fed), ``Const`` (stored) or ``None`` (omitted)."""

    op: str
    inputs: tuple[Any, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    id: str = ""
    outputs: int = 1
    dynamic: bool = True
    """Whether the node is also lowered with a symbolic first axis."""
    refused: tuple[int, ...] = ()
    """Opsets without an exact lowering, in a runtime that lacks the operator."""
    refused_symbolic: tuple[int, ...] = ()
    """The same with a symbolic first axis; among 7 and 13."""
    refused_plain: tuple[int, ...] = ()
    """Opsets without an exact lowering even with all their operators; among 7, 9 and 11."""
    tol: float = 1e-5
    since: int = 21
    """Opset of the node."""
    limits: Mapping[str, Mapping[str, Any]] | None = None
    """Profile entries of some operators; ``None``: the profile lacks this operator."""
    also_lacks: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.op}-{self.id}" if self.id else self.op


def model_of(case: Case, *, symbolic: bool = False) -> onnx.ModelProto:
    """Return a model of the node at its opset."""
    values, inputs, stored = [], [], []
    for i, x in enumerate(case.inputs):
        if x is None:
            values.append(None)
            continue
        array = x.array if isinstance(x, Const) else x
        dims: list[Any] = list(array.shape)
        if isinstance(x, Const):
            tensor = ir.Tensor(array, name=f"c{i}")
            value = ir.Value(
                name=f"c{i}",
                shape=ir.Shape(dims),
                type=ir.TensorType(tensor.dtype),
                const_value=tensor,
            )
            stored.append(value)
        else:
            if symbolic and dims:
                dims[0] = "n"
            value = ir.val(f"x{i}", ir.DataType.from_numpy(array.dtype), dims)
            inputs.append(value)
        values.append(value)
    attrs = {k: v() if callable(v) else v for k, v in case.attrs.items()}
    attributes = ir.convenience.convert_attributes(attrs)
    node = ir.Node("", case.op, values, attributes, num_outputs=case.outputs, name="node")
    for i, y in enumerate(node.outputs):
        y.name = f"y{i}"
    graph = ir.Graph(
        inputs,
        node.outputs,
        nodes=[node],
        initializers=stored,
        opset_imports={"": case.since},
        name="g",
    )
    proto = ir.to_proto(ir.Model(graph, ir_version=10))
    return onnx.shape_inference.infer_shapes(proto, data_prop=True)


def feeds_of(case: Case) -> dict[str, np.ndarray]:
    return {f"x{i}": x for i, x in enumerate(case.inputs) if isinstance(x, np.ndarray)}


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    batch_first = any(a.name == "layout" and a.i for n in model.graph.node for a in n.attribute)
    if batch_first:  # onnxruntime's kernels do not support layout=1
        return ReferenceEvaluator(model).run(None, feeds)
    try:
        session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
    except onnxruntime.capi.onnxruntime_pybind11_state.NotImplemented:  # no kernel for the type
        return ReferenceEvaluator(model).run(None, feeds)
    return session.run(None, feeds)


def everything_but(*op_types: str, **limits: Mapping[str, Any]) -> Profile:
    """Return the profile of a runtime with every operator except some, others with limits."""
    known = {s.name for s in onnx.defs.get_all_schemas_with_history() if s.domain == ""}
    return Profile(
        name=f"without {', '.join(op_types)}",
        ops={**{o: {} for o in known - set(op_types)}, **limits},
    )


def lacking(case: Case) -> Profile:
    """Return the profile of a runtime in which the case must be lowered."""
    lacks = (case.op,) if case.limits is None else ()
    return everything_but(*lacks, *case.also_lacks, **(case.limits or {}))


def only(*op_types: str) -> Profile:
    """Return the profile of a runtime with only these operators."""
    return Profile(name="tiny", ops={o: {} for o in op_types})


def op_types(model: onnx.ModelProto) -> set[str]:
    return {n.op_type for n in model.graph.node}
