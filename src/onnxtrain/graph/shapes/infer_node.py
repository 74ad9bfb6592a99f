"""Types and shapes of a node's outputs.

onnx's own inference gives dtype, rank and static sizes; :mod:`onnxtrain.graph.shapes.symbolic` adds
what it loses, sizes that are only known by name. Every unknown size gets a name of its own, so that
it can be followed through the rest of the graph.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.errors import OnnxTrainError, PrepareError
from onnxtrain.graph.nodes import is_standard
from onnxtrain.graph.shapes import dims as D
from onnxtrain.graph.shapes.contrib_shapes import infer_contrib
from onnxtrain.graph.shapes.control_flow_shapes import infer_control_flow
from onnxtrain.graph.shapes.fast_rules import infer as infer_fast
from onnxtrain.graph.shapes.negative_sizes import check_output_sizes
from onnxtrain.graph.shapes.symbolic import refine
from onnxtrain.graph.shapes.values import (
    UNFIT,
    constant_of,
    describe,
    dims_of,
    first_line,
    schema_of,
    set_dims,
    symbolic_of,
    unfit,
)

_SMALL_DATA = 64  # elements that onnx's inference is shown
# onnx infers nothing for the first, and fails on the second without its attribute.
_LIKE_FIRST = frozenset({"GroupNormalization", "MeanVarianceNormalization"})
_DATA_IN_FIRST = frozenset({"ConstantOfShape", "Range", "Cast", "Expand", "Concat"})


def infer_node(node: ir.Node, opset: int) -> None:
    """Set type and shape of a node's outputs from its inputs.

    Sizes that stay unknown are named after the output, so equal names mean equal sizes.
    """
    try:
        if infer_fast(node):
            return
        if infer_control_flow(node) or infer_contrib(node):
            pass
        elif node.op_type in _LIKE_FIRST and is_standard(node) and node.inputs[0] is not None:
            node.outputs[0].type, node.outputs[0].shape = node.inputs[0].type, node.inputs[0].shape
        else:
            _infer_by_onnx(node, opset)
            refine(node, opset)
    except OnnxTrainError:
        raise
    except UNFIT as error:
        raise PrepareError(unfit(node, error)) from error
    check_output_sizes(node)
    for out in node.outputs:
        dims = dims_of(out)
        if isinstance(out.type, ir.SequenceType):
            # Elements differ in the sizes that are unknown: no name fits all of them, nor does
            # one that a body gave to a size of its step.
            if dims is not None and node.op_type == "SequenceMap":
                set_dims(out, [d if isinstance(d, int) else None for d in dims])
            continue
        if dims is not None and None in dims:
            name = out.name or f"{node.name}"
            set_dims(
                out,
                [D.symbol(f"{name}.{i}") if d is None else d for i, d in enumerate(dims)],
            )


def _infer_by_onnx(node: ir.Node, opset: int) -> None:
    schema = schema_of(node.op_type, opset, node.domain)
    if schema is None:
        return
    types: dict[str, onnx.TypeProto] = {}
    data: dict[str, onnx.TensorProto] = {}
    for i, v in enumerate(node.inputs):
        if v is None or v.type is None:
            continue
        proto = ir.serde.serialize_type(v.type)
        if v.shape is not None:
            ir.serde.serialize_shape_into(proto, v.shape)
        types[v.name or ""] = proto
        if i == 0 and node.op_type not in _DATA_IN_FIRST:
            continue
        if node.op_type == "Range" and dims_of(v) != ():
            continue  # runtimes take bounds of shape [1] too, onnx's inference does not
        array = _known_array(v)
        if array is not None:
            data[v.name or ""] = ir.serde.serialize_tensor(ir.Tensor(array, name=v.name))
    try:
        inferred = onnx.shape_inference.infer_node_outputs(
            schema,
            ir.serde.serialize_node(node),
            types,
            data,
            opset_imports=[onnx.OperatorSetIdProto(domain=node.domain, version=opset)],
            ir_version=10,
        )
    except KeyError as error:
        raise PrepareError(_untyped(node, error)) from error
    except (
        onnx.shape_inference.InferenceError,
        onnx.checker.ValidationError,
        RuntimeError,
        ValueError,
    ) as error:
        raise PrepareError(
            f"shapes do not fit at node {node.name!r}: {describe(node)}\n  {first_line(error)}"
        ) from error
    for v in node.outputs:
        if v.name and v.name in inferred:
            v.type = ir.serde.deserialize_type_proto_for_type(inferred[v.name]) or v.type
            shape = ir.serde.deserialize_type_proto_for_shape(inferred[v.name])
            if shape is not None:
                set_dims(v, [d if isinstance(d, int) else D.dim(d.value) for d in shape])


def _untyped(node: ir.Node, error: KeyError) -> str:
    """Return a message on an input of unknown type, which names the operator that gives it."""
    missing = next((x for x in node.inputs if x is not None and x.type is None), None)
    maker = None if missing is None else missing.producer()
    if missing is None or maker is None:
        return f"shapes do not fit at node {node.name!r}: {describe(node)}\n  {first_line(error)}"
    return (
        f"the type of value {missing.name!r} is unknown, which node {node.name!r} "
        f"({node.op_type}) reads: neither ONNX nor this library defines "
        f"{maker.domain or 'ai.onnx'}::{maker.op_type} of node {maker.name!r}\n"
        "hint: add the value's type and shape to the model's value_info"
    )


def _known_array(x: ir.Value) -> np.ndarray | None:
    """Return a small constant, or integers that follow from constants and known sizes."""
    if x.const_value is not None:
        return constant_of(x) if x.const_value.size <= _SMALL_DATA else None
    elements, dims = symbolic_of(x), dims_of(x)
    if elements is None or dims is None or x.dtype is None or len(dims) > 1:
        return None
    if len(elements) > _SMALL_DATA or not all(isinstance(e, int) for e in elements):
        return None
    return np.asarray(elements, x.dtype.numpy()).reshape(() if dims == () else (-1,))
