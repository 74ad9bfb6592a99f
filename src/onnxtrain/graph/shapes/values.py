"""Read and set what is known about values: types, shapes, constants, symbolic elements."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.errors import ShapeError
from onnxtrain.graph.shapes import dims as D
from onnxtrain.graph.shapes.dims import Dim
from onnxtrain.graph.shapes.unknown import unknown_rank_message

_DATA_LIMIT = 1024  # elements: larger constants are never shapes, axes or pads
_GENERATED = "onnxtrain.own"  # key in Value.meta: a constant that the builder created
_SYMBOLIC = "onnxtrain.symbolic"  # key in Value.meta: the elements of the value, as dimensions

_ML_VERSIONS = (5, 4, 3)  # opsets of ai.onnx.ml, newest first; some operators were removed since

FLOATS = frozenset(
    {ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16}
)


@functools.cache
def schema_of(op_type: str, opset: int, domain: str = "") -> onnx.defs.OpSchema | None:
    """Return the schema of an operator, ``None`` if onnx does not define it.

    ``opset`` applies to the standard domain. For other domains, the newest schema that is not
    deprecated is returned.
    """
    if domain in ("", "ai.onnx"):
        return _schema(op_type, opset, domain)
    for version in _ML_VERSIONS:
        schema = _schema(op_type, version, domain)
        if schema is not None and not schema.deprecated:
            return schema
    return None


def _schema(op_type: str, opset: int, domain: str) -> onnx.defs.OpSchema | None:
    try:
        return onnx.defs.get_schema(op_type, opset, domain)
    except onnx.defs.SchemaError:
        return None


def is_float(x: ir.Value | None) -> bool:
    """Return whether gradients can flow through the value."""
    return x is not None and x.dtype in FLOATS and not isinstance(x.type, ir.SparseTensorType)


def dims_of(x: ir.Value) -> tuple[Dim, ...] | None:
    """Return the dimensions of a value, ``None`` if its rank is unknown."""
    if x.shape is None:
        return None
    return tuple(d if isinstance(d, int) else D.dim(d.value) for d in x.shape)


def set_dims(x: ir.Value, dims: Sequence[Dim] | None) -> None:
    """Record the dimensions of a value."""
    x.shape = None if dims is None else ir.Shape(list(dims))


def rank_of(x: ir.Value) -> int:
    """Return the rank of a value.

    Raises:
        ShapeError: the rank is unknown.
    """
    if x.shape is None:
        raise ShapeError(unknown_rank_message(x))
    return len(x.shape)


def same_shape(x: ir.Value, ref: ir.Value) -> bool:
    """Return whether two values provably have the same shape."""
    a, b = dims_of(x), dims_of(ref)
    return a is not None and a == b and None not in a


def is_static(x: ir.Value) -> bool:
    """Return whether the shape is static."""
    dims = dims_of(x)
    return dims is not None and all(isinstance(d, int) for d in dims)


def constant_of(x: ir.Value | None) -> np.ndarray | None:
    """Return the array of an initializer, ``None`` for a computed value or a graph input.

    A graph input with an initializer only has a default value; callers may override it.
    """
    if x is None or x.const_value is None or x.is_graph_input():
        return None
    return x.const_value.numpy()


def is_generated_constant(x: ir.Value) -> bool:
    """Return whether a value is a constant that onnxtrain added, not one of the user's model."""
    return x.meta.get(_GENERATED, False)


def mark_generated_constant(x: ir.Value) -> None:
    """Mark an initializer as added by onnxtrain: it is never trained, and passes may drop it."""
    x.meta[_GENERATED] = True


def symbolic_of(x: ir.Value | None) -> tuple[Dim, ...] | None:
    """Return the elements of a small integer tensor (rank 0 or 1) as dimensions, if known."""
    if x is None:
        return None
    known = x.meta.get(_SYMBOLIC)
    if known is not None:
        return known
    if x.dtype is None or x.dtype.is_floating_point() or x.const_value is None:
        return None
    if len(x.const_value.shape) > 1 or x.const_value.size > _DATA_LIMIT:
        return None
    try:
        array = constant_of(x)
    except FileNotFoundError:
        return None  # an in-memory model with external data but without a base directory
    if array is None or array.dtype.kind not in "iu":
        return None
    return tuple(int(v) for v in array.reshape(-1))


def set_symbolic(x: ir.Value, dims: Sequence[Dim] | None) -> None:
    """Record the elements of a small integer tensor."""
    if dims is not None and len(dims) <= _DATA_LIMIT:
        x.meta[_SYMBOLIC] = tuple(dims)


def attributes_of(node: ir.Node, opset: int) -> dict[str, Any]:
    """Return a node's attributes as Python values, with the schema's defaults."""
    schema = schema_of(node.op_type, opset, node.domain)
    values = {} if schema is None else dict(_defaults(schema.name, opset, schema.domain))
    for name, attr in node.attributes.items():
        values[name] = python_value(attr)
    return values


def python_value(attr: ir.Attr) -> Any:
    """Return an attribute's value; tuples become lists."""
    value = attr.value
    return list(value) if isinstance(value, tuple) else value


@functools.cache
def _defaults(op_type: str, opset: int, domain: str) -> tuple[tuple[str, Any], ...]:
    schema = schema_of(op_type, opset, domain)
    assert schema is not None
    defaults = []
    for name, formal in schema.attributes.items():
        proto = formal.default_value
        default = ir.serde.deserialize_attribute(proto) if proto.type else None
        defaults.append((name, None if default is None else python_value(default)))
    return tuple(defaults)


INVALID_NODE_ERRORS = (IndexError, MemoryError, ValueError, ZeroDivisionError)
"""Errors of code that relies on a node's schema, for a node that violates it or declares sizes
beyond memory.

Other error types indicate a bug in onnxtrain and must not be reported as an invalid file.
"""


def invalid_node_message(node: ir.Node, error: BaseException) -> str:
    """Return an error message for a node that violates the definition of its operator."""
    name = node.name or next((y.name for y in node.outputs if y.name), "")
    if isinstance(error, MemoryError):
        return (
            f"node {name!r}: {describe(node)} has sizes that do not fit into memory\n"
            f"  {first_line(error)}\n"
            "hint: export the model with smaller sizes, or name them and pass dims={'name': size}"
        )
    return (
        f"node {name!r}: {describe(node)} violates the definition of its operator\n"
        f"  {type(error).__name__}: {first_line(error)}\n"
        "hint: onnx.checker.check_model(model, full_check=True) may give the reason"
    )


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if the message is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def describe_value(x: ir.Value | None) -> str:
    """Return the name, dtype and shape of a value as text: ``w: FLOAT[4,N]``."""
    if x is None:
        return "-"
    dtype = x.dtype.name if x.dtype is not None else (str(x.type) if x.type else "?")
    dims = dims_of(x)
    shape = (
        "[?]" if dims is None else "[" + ",".join("?" if d is None else str(d) for d in dims) + "]"
    )
    return f"{x.name}: {dtype}{shape}"


def describe(node: ir.Node) -> str:
    """Return a node's operator and inputs as text: ``MatMul(x: FLOAT[N,4], w: FLOAT[4,2])``."""
    domain = f"{node.domain}::" if node.domain else ""
    return f"{domain}{node.op_type}({', '.join(describe_value(x) for x in node.inputs)})"
