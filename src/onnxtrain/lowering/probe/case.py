"""Probe cases: a single-node model with inputs and expected outputs, at any opset."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.simplify import remove_dead
from onnxtrain.lowering.opset_converters import NotConvertibleError, convert_operators
from onnxtrain.lowering.profile import LoweringTarget

# The types that both numpy and JavaScript support.
TYPES = {
    "float": np.dtype("<f4"),
    "double": np.dtype("<f8"),
    "float16": np.dtype("<f2"),
    "int8": np.dtype("i1"),
    "int16": np.dtype("<i2"),
    "int32": np.dtype("<i4"),
    "int64": np.dtype("<i8"),
    "uint8": np.dtype("u1"),
    "uint16": np.dtype("<u2"),
    "uint32": np.dtype("<u4"),
    "uint64": np.dtype("<u8"),
    "bool": np.dtype("?"),
}
NAMES = {v: k for k, v in TYPES.items()}


@dataclass(frozen=True)
class Case:
    """One node and its inputs, some fed and some stored in the model."""

    name: str
    op: str
    opset: int
    inputs: tuple[np.ndarray | None, ...]
    """By position; ``None`` is omitted."""
    outputs: tuple[np.ndarray | None, ...]
    attributes: dict[str, Any] = field(default_factory=dict)
    stored: frozenset[int] = frozenset()
    """Positions of the inputs that are initializers."""
    variant: str = ""

    @property
    def id(self) -> str:
        """Return the name with the variant, unique within an opset."""
        return f"{self.name}-{self.variant}" if self.variant else self.name

    @property
    def elements(self) -> int:
        """Return the number of input and output elements."""
        return sum(a.size for a in (*self.inputs, *self.outputs) if a is not None)

    @property
    def is_empty(self) -> bool:
        """Return whether a tensor is empty, which many runtimes do not support."""
        return any(a is not None and not a.size for a in (*self.inputs, *self.outputs))

    @property
    def main(self) -> np.ndarray | None:
        """Return the first input, if there is one."""
        return self.inputs[0] if self.inputs else None


def case_to_model(case: Case) -> ir.Model:
    """Return the case as a model of one node."""
    values: list[ir.Value | None] = []
    fed, stored = [], []
    for i, array in enumerate(case.inputs):
        if array is None:
            values.append(None)
            continue
        tensor = ir.Tensor(array, name=f"x{i}")
        value = ir.Value(
            name=f"x{i}", shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype)
        )
        if i in case.stored:
            value.const_value = tensor
            stored.append(value)
        else:
            fed.append(value)
        values.append(value)
    node = ir.Node(
        "",
        case.op,
        values,
        ir.convenience.convert_attributes(case.attributes),
        num_outputs=len(case.outputs),
        name="node",
        version=case.opset,
    )
    for i, (y, array) in enumerate(zip(node.outputs, case.outputs, strict=True)):
        y.name = "" if array is None else f"y{i}"
        if array is not None:
            y.shape = ir.Shape(array.shape)
            y.type = ir.TensorType(ir.DataType.from_numpy(array.dtype))
    outputs = [y for y in node.outputs if y.name]
    graph = ir.Graph(
        fed,
        outputs,
        nodes=[node],
        initializers=stored,
        opset_imports={"": case.opset},
        name="probe",
    )
    return ir.Model(graph, ir_version=10)


def reference_outputs(case: Case) -> tuple[np.ndarray | None, ...] | None:
    """Return the outputs of onnx's reference evaluator.

    ``None`` if the evaluator fails or an output has a type that ``TYPES`` lacks.
    """
    proto = ir.to_proto(case_to_model(case))
    feeds = {
        f"x{i}": a for i, a in enumerate(case.inputs) if a is not None and i not in case.stored
    }
    from onnx.reference import ReferenceEvaluator  # large, and not needed to train

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # overflows are expected
            outputs = iter(ReferenceEvaluator(proto).run(None, feeds))
    except Exception:  # whatever the evaluator raises, the case has no expected outputs
        return None
    result = tuple(None if y is None else np.asarray(next(outputs)) for y in case.outputs)
    known = all(a is None or a.dtype in NAMES for a in result)
    return result if known else None


def case_from_proto(
    name: str, model: onnx.ModelProto, inputs: list[Any], outputs: list[Any]
) -> Case | None:
    """Return an onnx node test as a case; ``None`` unless it is one node over plain tensors."""
    if len(model.graph.node) != 1 or model.graph.node[0].domain or model.graph.initializer:
        return None
    parsed = ir.from_proto(model)
    node = parsed.graph[0]
    feeds = dict(zip((x.name for x in parsed.graph.inputs), inputs, strict=False))
    expected = dict(zip((y.name for y in parsed.graph.outputs), outputs, strict=False))
    arrays = [None if x is None or not x.name else feeds.get(x.name) for x in node.inputs]
    results = [expected.get(y.name) if y.name else None for y in node.outputs]
    for value, array in zip([*node.inputs, *node.outputs], [*arrays, *results], strict=True):
        if value is not None and value.name and not _is_plain(array):
            return None
    if any(a.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for a in _attributes(node)):
        return None
    return Case(
        name.removeprefix("test_"),
        node.op_type,
        parsed.opset_imports[""],
        tuple(arrays),
        tuple(results),
        {a.name: S.python_value(a) for a in _attributes(node)},
    )


def _attributes(node: ir.Node) -> list[ir.Attr]:
    return list(node.attributes.values())


def _is_plain(array: Any) -> bool:
    return isinstance(array, np.ndarray | np.generic) and array.dtype in NAMES


_LAST = onnx.defs.onnx_opset_version()


def _since(op: str, opset: int) -> int:
    schema = S.schema_of(op, opset)
    return 0 if schema is None else schema.since_version


def versions(case: Case, opsets: list[int]) -> list[int]:
    """Return the opsets, newest first, at which the operator differs from the next one's."""
    oldest: dict[int, int] = {}
    for opset in sorted(opsets, reverse=True):
        schema = S.schema_of(case.op, min(opset, case.opset))
        if schema is not None and not schema.deprecated:
            oldest[schema.since_version] = opset  # the oldest opset of each version
    return list(oldest.values())


def case_at(case: Case, opset: int) -> onnx.ModelProto | None:
    """Return the model at an opset, ``None`` if that opset needs several nodes."""
    if case.op == "Dropout" and len(case.outputs) > 1 and opset < 12:
        return None  # before opset 12, the mask of an inactive Dropout is unspecified
    model = case_to_model(case)
    try:
        if _since(case.op, case.opset) == _since(case.op, opset):
            model.opset_imports[""] = opset
        elif opset < case.opset and _since(case.op, case.opset) == _since(case.op, _LAST):
            convert_operators(model, opset)  # it converts from the newest version only
        else:
            return None
    except (NotConvertibleError, AssertionError):
        return None
    remove_dead(model)
    if len(model.graph) != 1:
        return None
    target = LoweringTarget(opset, opset)
    model.ir_version = target.ir_version
    if target.initializers_as_inputs:
        inputs = set(model.graph.inputs)
        model.graph.inputs.extend(x for x in model.graph.initializers.values() if x not in inputs)
    proto = ir.to_proto(model)
    try:
        onnx.checker.check_model(proto, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError):
        return None
    return proto
