"""Models of one node, and runtimes that lack one operator."""

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
    """One node: its inputs are arrays (fed), ``Const`` (stored) or ``None`` (left out)."""

    op: str
    inputs: tuple[Any, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    id: str = ""
    outputs: int = 1
    dynamic: bool = True
    """Whether the first axis of the inputs also is lowered as a symbol."""
    refused: tuple[int, ...] = ()
    """Opsets at which no lowering is exact, in a runtime that lacks the operator."""
    refused_symbolic: tuple[int, ...] = ()
    """The same where the first axis is a symbol; of 7 and 13."""
    refused_plain: tuple[int, ...] = ()
    """Opsets that cannot say the same with all that they have; of 7, 9 and 11."""
    tol: float = 1e-5
    since: int = 21
    """The opset that the node is written in."""
    limits: Mapping[str, Mapping[str, Any]] | None = None
    """What the runtime's profile says of some operators; ``None``: it lacks this one."""
    also_lacks: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.op}-{self.id}" if self.id else self.op


def model_of(case: Case, *, symbolic: bool = False) -> onnx.ModelProto:
    """The node as a model at its opset."""
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
    given = {k: v() if callable(v) else v for k, v in case.attrs.items()}
    attributes = ir.convenience.convert_attributes(given)
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
    if batch_first:  # onnxruntime has it in its schema only
        return ReferenceEvaluator(model).run(None, feeds)
    try:
        session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
    except onnxruntime.capi.onnxruntime_pybind11_state.NotImplemented:  # no kernel for the type
        return ReferenceEvaluator(model).run(None, feeds)
    return session.run(None, feeds)


def everything_but(*op_types: str, **limits: Mapping[str, Any]) -> Profile:
    """A runtime that has every operator except some, others with limits."""
    every = {s.name for s in onnx.defs.get_all_schemas_with_history() if s.domain == ""}
    return Profile(
        name=f"without {', '.join(op_types)}",
        ops={**{o: {} for o in every - set(op_types)}, **limits},
    )


def lacking(case: Case) -> Profile:
    """The runtime in which a case has to be lowered."""
    own = (case.op,) if case.limits is None else ()
    return everything_but(*own, *case.also_lacks, **(case.limits or {}))


def only(*op_types: str) -> Profile:
    """A runtime that has some operators only."""
    return Profile(name="tiny", ops={o: {} for o in op_types})


def op_types(model: onnx.ModelProto) -> set[str]:
    return {n.op_type for n in model.graph.node}
