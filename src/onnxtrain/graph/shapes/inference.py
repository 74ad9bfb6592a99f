"""Infer types and shapes of a whole graph, or of one node.

:func:`infer_shapes` walks a graph and reconciles inferred sizes with those the exporter declared.
:func:`infer_node` infers one node, from the first source that knows it:

1. formulas for the most frequent float operators (:func:`infer_common_op`), which avoid a round
   trip through protobuf;
2. the bodies of If, Loop and Scan (:func:`infer_control_flow`);
3. formulas for onnxruntime's operators (:mod:`onnxtrain.graph.shapes.contrib`);
4. onnx's inference for dtype, rank and static sizes, refined with symbolic sizes by
   :mod:`onnxtrain.graph.shapes.symbolic`.

Every size that stays unknown gets a fresh name, so that the rest of the graph can refer to it.

The last functions guard against constants that fold to huge tensors and against negative sizes.
onnx's inference aborts the process if a Slice meets a negative size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.errors import OnnxTrainError, PrepareError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.nodes import is_op, is_standard, subgraphs_of
from onnxtrain.graph.shapes import dims as D
from onnxtrain.graph.shapes.contrib import infer_contrib
from onnxtrain.graph.shapes.dims import Dim
from onnxtrain.graph.shapes.symbolic import refine

Rewrite = Callable[[ir.Node], bool]
"""Replaces a node with typed inputs by typed nodes; returns whether it did."""


def infer_shapes(graph: ir.Graph, opset: int, rewrite: Rewrite | None = None) -> None:
    """Set type and shape of every value; unify the exporter's symbols with inferred sizes.

    An exporter may call a size ``s7`` where inference finds ``2*batch``. The inferred form wins and
    replaces the exporter's name from there on. ``rewrite`` is called on each node before its
    inference, so that it can replace operators that have no shape inference.
    """
    _Inference(opset, rewrite).run(graph)


def is_generated_symbol(d: Dim) -> bool:
    """Return whether a size is a placeholder name that onnx's inference generated."""
    return isinstance(d, str) and d.startswith("unk__")


class _Inference:
    def __init__(self, opset: int, rewrite: Rewrite | None = None) -> None:
        self.opset = opset
        self.rewrite = rewrite
        self.alias: dict[str, Dim] = {}
        self.inputs: set[str] = set()

    def run(self, graph: ir.Graph) -> None:
        for x in graph.inputs:
            for d in S.dims_of(x) or ():
                self.inputs |= D.symbols(d)
        for x in graph.initializers.values():
            if x.const_value is not None and x.shape is None:
                x.shape = ir.Shape(x.const_value.shape.numpy())
                x.type = ir.TensorType(x.const_value.dtype)
        for node in list(graph):
            if self.rewrite is None or not self.rewrite(node):
                self._node(node)

    def _node(self, node: ir.Node) -> None:
        declared = [(y.type, S.dims_of(y)) for y in node.outputs]
        self._enter_bodies(node)
        S.infer_node(node, node.version or self.opset)
        for y, (type_, dims) in zip(node.outputs, declared, strict=True):
            if y.type is None:
                y.type = type_
            self._merge(y, dims)

    def _merge(self, y: ir.Value, declared: tuple[Dim, ...] | None) -> None:
        if declared is None:
            return
        declared = tuple(D.substitute(d, self.alias) for d in declared)
        inferred = S.dims_of(y)
        if inferred is None:
            S.set_dims(y, declared)
            return
        if len(inferred) != len(declared):
            return
        merged: list[Dim] = []
        for i, (a, b) in enumerate(zip(inferred, declared, strict=True)):
            # The inferred size is only a fresh name: the declared size says more.
            is_fresh = a == D.symbol(f"{y.name}.{i}") or is_generated_symbol(a)
            if is_fresh and b is not None:
                merged.append(b)
                continue
            merged.append(a)
            if isinstance(b, str) and b != a and b.isidentifier() and b not in self.inputs:
                self.alias.setdefault(b, a)
        S.set_dims(y, merged)

    def _enter_bodies(self, node: ir.Node) -> None:
        mark_branches(node)
        if is_op(node, "Loop", "Scan"):
            try:
                self._type_body_inputs(node)
            except S.INVALID_NODE_ERRORS as error:
                raise PrepareError(S.invalid_node_message(node, error)) from error
        if is_op(node, "Loop"):
            self._loop_body(node)
            return
        for body in subgraphs_of(node):
            self.run(body)

    def _loop_body(self, node: ir.Node) -> None:
        """Find which loop states keep their shape across iterations.

        Assume that all states do and infer the body. Withdraw the assumption for the states whose
        shape changed, and repeat until none changes.
        """
        body = node.attributes["body"].as_graph()
        if self.rewrite is not None:  # rewrite before assuming sizes that may turn out to change
            self.run(body)
        declared = [(y, y.shape) for n in body.all_nodes() for y in n.outputs]
        inner = body.inputs[2:]
        before = [x.shape for x in inner]
        for x, outer in zip(inner, node.inputs[2:], strict=False):
            dims = None if outer is None else S.dims_of(outer)
            known = S.dims_of(x)
            if dims is not None and (known is None or len(known) == len(dims)):
                S.set_dims(x, dims)
        for _ in range(len(inner) + 1):
            self.run(body)
            changing = [
                i
                for i, (x, y) in enumerate(zip(inner, body.outputs[1:], strict=False))
                if S.dims_of(x) != S.dims_of(y) and x.shape is not before[i]
            ]
            if not changing:
                return
            for y, shape in declared:
                y.shape = shape
            for i in changing:
                inner[i].shape = before[i]

    def _type_body_inputs(self, node: ir.Node) -> None:
        body = node.attributes["body"].as_graph()
        if node.op_type == "Loop":
            carried = zip(body.inputs[2:], node.inputs[2:], strict=False)
            dtypes = (ir.DataType.INT64, ir.DataType.BOOL)  # iteration number, condition
            for inner, dtype in zip(body.inputs[:2], dtypes, strict=True):
                inner.type = inner.type or ir.TensorType(dtype)
                if inner.shape is None:
                    inner.shape = ir.Shape([])
        else:
            scans = node.attributes["num_scan_inputs"].as_int()
            n = len(node.inputs) - scans
            carried = zip(body.inputs[:n], node.inputs[:n], strict=False)
            axes = _ints(node, "scan_input_axes") or [0] * scans
            for inner, outer, axis in zip(body.inputs[n:], node.inputs[n:], axes, strict=True):
                dims = None if outer is None else S.dims_of(outer)
                if outer is not None:
                    inner.type = outer.type or inner.type
                if dims is not None:
                    axis %= len(dims)
                    S.set_dims(inner, [d for i, d in enumerate(dims) if i != axis])
        for inner, outer in carried:
            if outer is None:
                continue
            inner.type = inner.type or outer.type
            if inner.shape is None and node.op_type == "Scan":
                inner.shape = outer.shape


_MAX_KNOWN_ELEMENTS = 64  # of constants passed to onnx's inference: shapes and axes are small
# onnx infers nothing for GroupNormalization and fails on MeanVarianceNormalization without axes.
_TYPED_LIKE_FIRST = frozenset({"GroupNormalization", "MeanVarianceNormalization"})
# Operators whose inference reads the elements of input 0; of others it reads later inputs only.
_DATA_IN_FIRST_INPUT = frozenset({"ConstantOfShape", "Range", "Cast", "Expand", "Concat"})


def infer_node(node: ir.Node, opset: int) -> None:
    """Set type and shape of a node's outputs from its inputs.

    Sizes that stay unknown are named after the output, so that equal names mean equal sizes.

    Raises:
        PrepareError: the inputs do not fit the operator, or a size is negative.
    """
    try:
        if infer_common_op(node):
            return
        if infer_control_flow(node) or infer_contrib(node):
            pass
        elif node.op_type in _TYPED_LIKE_FIRST and is_standard(node) and node.inputs[0] is not None:
            node.outputs[0].type, node.outputs[0].shape = node.inputs[0].type, node.inputs[0].shape
        else:
            _infer_by_onnx(node, opset)
            refine(node, opset)
    except OnnxTrainError:
        raise
    except S.INVALID_NODE_ERRORS as error:
        raise PrepareError(S.invalid_node_message(node, error)) from error
    check_nonnegative_sizes(node)
    for out in node.outputs:
        dims = S.dims_of(out)
        if isinstance(out.type, ir.SequenceType):
            # Elements of a sequence differ in their unknown sizes, so one name cannot stand for
            # all of them, nor can the name that a SequenceMap body gave to the size of one element.
            if dims is not None and node.op_type == "SequenceMap":
                S.set_dims(out, [d if isinstance(d, int) else None for d in dims])
            continue
        if dims is not None and None in dims:
            name = out.name or f"{node.name}"
            S.set_dims(
                out,
                [D.symbol(f"{name}.{i}") if d is None else d for i, d in enumerate(dims)],
            )


def _infer_by_onnx(node: ir.Node, opset: int) -> None:
    schema = S.schema_of(node.op_type, opset, node.domain)
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
        if i == 0 and node.op_type not in _DATA_IN_FIRST_INPUT:
            continue
        if node.op_type == "Range" and S.dims_of(v) != ():
            continue  # runtimes accept bounds of shape [1], onnx's inference rejects them
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
        raise PrepareError(_untyped_input_message(node, error)) from error
    except (
        onnx.shape_inference.InferenceError,
        onnx.checker.ValidationError,
        RuntimeError,
        ValueError,
    ) as error:
        raise PrepareError(
            f"incompatible shapes at node {node.name!r}: {S.describe(node)}\n"
            f"  {S.first_line(error)}"
        ) from error
    for v in node.outputs:
        if v.name and v.name in inferred:
            v.type = ir.serde.deserialize_type_proto_for_type(inferred[v.name]) or v.type
            shape = ir.serde.deserialize_type_proto_for_shape(inferred[v.name])
            if shape is not None:
                S.set_dims(v, [d if isinstance(d, int) else D.dim(d.value) for d in shape])


def _untyped_input_message(node: ir.Node, error: KeyError) -> str:
    """Return an error message for an input of unknown type: the operator that produces it."""
    untyped = next((x for x in node.inputs if x is not None and x.type is None), None)
    producer = None if untyped is None else untyped.producer()
    if untyped is None or producer is None:
        return (
            f"incompatible shapes at node {node.name!r}: {S.describe(node)}\n"
            f"  {S.first_line(error)}"
        )
    return (
        f"the type of value {untyped.name!r}, read by node {node.name!r} ({node.op_type}), is "
        f"unknown: neither ONNX nor onnxtrain defines "
        f"{producer.domain or 'ai.onnx'}::{producer.op_type} of node {producer.name!r}\n"
        "hint: add the value's type and shape to the model's value_info"
    )


def _known_array(x: ir.Value) -> np.ndarray | None:
    """Return a small constant, or a small integer tensor that follows from known sizes."""
    if x.const_value is not None:
        return S.constant_of(x) if x.const_value.size <= _MAX_KNOWN_ELEMENTS else None
    elements, dims = S.symbolic_of(x), S.dims_of(x)
    if elements is None or dims is None or x.dtype is None or len(dims) > 1:
        return None
    if len(elements) > _MAX_KNOWN_ELEMENTS or not all(isinstance(e, int) for e in elements):
        return None
    return np.asarray(elements, x.dtype.numpy()).reshape(() if dims == () else (-1,))


_ShapeFormula = Callable[[ir.Node], Sequence[Dim] | None]

_SAME_SHAPE = (
    *("Abs", "Ceil", "Clip", "Cos", "Elu", "Erf", "Exp", "Floor", "Gelu", "HardSwish", "LeakyRelu"),
    *("Log", "Mish", "Neg", "Reciprocal", "Relu", "Round", "Sigmoid", "Sign", "Sin", "Softplus"),
    *("Sqrt", "Tanh"),
)
_ARITHMETIC = ("Add", "Div", "Mul", "Pow", "Sub")
_COMPARISONS = ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual")


def infer_common_op(node: ir.Node) -> bool:
    """Infer a common float operator with known input shapes; return whether it succeeded.

    If a type, rank or size is unknown or inconsistent, the node is left to onnx's inference, which
    also reports errors.
    """
    formula = _COMMON_FORMULAS.get(node.op_type)
    if formula is None or not is_standard(node) or len(node.outputs) != 1:
        return False
    # The first input of Where is the condition.
    x = node.inputs[1] if node.op_type == "Where" and len(node.inputs) == 3 else node.inputs[0]
    if x is None or x.dtype not in S.FLOATS or not isinstance(x.type, ir.TensorType):
        return False
    dims = formula(node)
    if dims is None or None in dims:
        return False
    y = node.outputs[0]
    y.type = _BOOL if node.op_type in _COMPARISONS else x.type
    S.set_dims(y, dims)
    return True


def _shape_of_first(node: ir.Node) -> Sequence[Dim] | None:
    x = node.inputs[0]
    return None if x is None else S.dims_of(x)


def _softmax_shape(node: ir.Node) -> Sequence[Dim] | None:
    dims, attribute = _shape_of_first(node), node.attributes.get("axis")
    axis = -1 if attribute is None else attribute.as_int()
    return dims if dims is not None and -len(dims) <= axis < len(dims) else None


def _broadcast_shape(node: ir.Node) -> Sequence[Dim] | None:
    operands = node.inputs[1:] if node.op_type == "Where" else node.inputs
    if len({x.dtype for x in operands if x is not None}) != 1:
        return None
    result: Sequence[Dim] | None = ()
    for x in node.inputs:
        dims = None if x is None else S.dims_of(x)
        if result is None or dims is None:
            return None
        result = _compatible_broadcast(result, dims)
    return result


def _compatible_broadcast(a: Sequence[Dim], b: Sequence[Dim]) -> list[Dim] | None:
    """Return the broadcast shape, ``None`` if static sizes are incompatible."""
    for p, q in zip(reversed(a), reversed(b), strict=False):
        if isinstance(p, int) and isinstance(q, int) and p != q and 1 not in (p, q):
            return None
    return D.broadcast_shapes(a, b)


def _transpose_shape(node: ir.Node) -> Sequence[Dim] | None:
    dims, perm = _shape_of_first(node), node.attributes.get("perm")
    if dims is None:
        return None
    order = list(range(len(dims)))[::-1] if perm is None else list(perm.as_ints())
    return [dims[i] for i in order] if sorted(order) == list(range(len(dims))) else None


def _matmul_shape(node: ir.Node) -> Sequence[Dim] | None:
    if len(node.inputs) != 2 or node.inputs[1] is None:
        return None
    a, b = _shape_of_first(node), S.dims_of(node.inputs[1])
    if a is None or b is None or len(a) < 2 or len(b) < 2:
        return None
    if a[-1] != b[-2] or node.inputs[0].dtype != node.inputs[1].dtype:  # pyright: ignore
        return None
    batch = _compatible_broadcast(a[:-2], b[:-2])
    return None if batch is None else [*batch, a[-2], b[-1]]


_BOOL = ir.TensorType(ir.DataType.BOOL)
_COMMON_FORMULAS: dict[str, _ShapeFormula] = {
    **dict.fromkeys(_SAME_SHAPE, _shape_of_first),
    **dict.fromkeys((*_ARITHMETIC, *_COMPARISONS, "Where"), _broadcast_shape),
    **dict.fromkeys(("Softmax", "LogSoftmax"), _softmax_shape),
    "Transpose": _transpose_shape,
    "MatMul": _matmul_shape,
}


def infer_control_flow(node: ir.Node) -> bool:
    """Infer If, Loop or Scan from the outputs of its bodies; return ``False`` for other nodes."""
    infer = _CONTROL_FLOW.get(node.op_type)
    if infer is None or not is_standard(node):
        return False
    infer(node)
    return True


def _infer_if(node: ir.Node) -> None:
    then = node.attributes["then_branch"].as_graph()
    other = node.attributes["else_branch"].as_graph()
    for out, a, b in zip(node.outputs, then.outputs, other.outputs, strict=False):
        _adopt(out, a.type or b.type, _merge_dims(S.dims_of(a), S.dims_of(b)))


def _infer_loop(node: ir.Node) -> None:
    body = node.attributes["body"].as_graph()
    carried = len(node.inputs) - 2
    for i, out in enumerate(node.outputs):
        inner = body.outputs[i + 1]
        if i < carried:
            _adopt_state(out, node.inputs[i + 2], inner)
        else:
            dims = S.dims_of(inner)
            _adopt(out, inner.type, None if dims is None else (None, *dims))


def _infer_scan(node: ir.Node) -> None:
    body = node.attributes["body"].as_graph()
    scans = node.attributes["num_scan_inputs"].as_int()
    carried = len(node.inputs) - scans
    axes_in = _ints(node, "scan_input_axes") or [0] * scans
    axes_out = _ints(node, "scan_output_axes") or [0] * (len(node.outputs) - carried)
    length = _scan_length(node.inputs[carried:], axes_in)
    for i, out in enumerate(node.outputs):
        inner = body.outputs[i]
        if i < carried:
            _adopt_state(out, node.inputs[i], inner)
            continue
        dims = S.dims_of(inner)
        if dims is None:
            _adopt(out, inner.type, None)
        else:
            axis = axes_out[i - carried] % (len(dims) + 1)
            _adopt(out, inner.type, (*dims[:axis], length, *dims[axis:]))


_CONTROL_FLOW = {"If": _infer_if, "Loop": _infer_loop, "Scan": _infer_scan}


def _scan_length(scanned: Sequence[ir.Value | None], axes: Sequence[int]) -> Dim:
    """Return the number of steps of a Scan, from the first input whose shape is known."""
    for x, axis in zip(scanned, axes, strict=True):
        dims = None if x is None else S.dims_of(x)
        if dims is not None:
            return dims[axis]
    return None


def _ints(node: ir.Node, name: str) -> list[int] | None:
    attribute = node.attributes.get(name)
    return None if attribute is None else list(attribute.as_ints())


def _adopt_state(out: ir.Value, start: ir.Value | None, inner: ir.Value) -> None:
    """Set the final value of a loop state: the initial one after zero steps, else the body's."""
    initial = None if start is None else S.dims_of(start)
    type_ = inner.type or (None if start is None else start.type)
    _adopt(out, type_, _merge_dims(initial, S.dims_of(inner)))


def _merge_dims(a: Sequence[Dim] | None, b: Sequence[Dim] | None) -> list[Dim] | None:
    if a is None or b is None or len(a) != len(b):
        return None
    return [p if p == q else None for p, q in zip(a, b, strict=True)]


def _adopt(out: ir.Value, type_: ir.TypeProtocol | None, dims: Sequence[Dim] | None) -> None:
    out.type = type_ or out.type
    if dims is not None:
        S.set_dims(out, dims)


# Operators whose output may be larger than all inputs together.
_EXPANDING_OPS = frozenset(
    (
        *("BlackmanWindow", "CenterCropPad", "Col2Im", "ConstantOfShape", "DFT", "Expand"),
        *("HammingWindow", "HannWindow", "MelWeightMatrix", "OneHot", "Pad", "Resize", "STFT"),
        *("Tile", "Upsample"),
    )
)


def output_fits(node: ir.Node, limit: int) -> bool:
    """Return whether each output of a node with constant inputs has at most ``limit`` elements.

    Checked before folding, so that nothing huge is computed and dropped.
    """
    for y in node.outputs:
        sizes = D.static_sizes(S.dims_of(y))
        if sizes is not None and math.prod(sizes) > limit:
            return False
        if sizes is None and node.op_type in _EXPANDING_OPS:
            return False
    return node.op_type != "Range" or _range_length(node) <= limit


def _range_length(node: ir.Node) -> float:
    bounds = [S.constant_of(x) for x in node.inputs]
    scalars = [float(b.reshape(-1)[0]) for b in bounds if b is not None and b.size == 1]
    if len(scalars) < 3 or not scalars[2] or not np.all(np.isfinite(scalars)):
        return math.inf
    start, stop, step = scalars
    return (stop - start) / step


_IN_BRANCH = "onnxtrain.branch"  # key in Graph.meta: the graph is inside a branch of an If


def mark_branches(node: ir.Node) -> None:
    """Mark the bodies of an If, and all bodies inside them, as graphs that may never run."""
    nested = node.graph is not None and bool(node.graph.meta.get(_IN_BRANCH))
    if nested or node.op_type == "If":
        for body in subgraphs_of(node):
            body.meta[_IN_BRANCH] = True


def check_nonnegative_sizes(node: ir.Node) -> None:
    """Raise an error if an output of a node has a negative size.

    Inside a branch of an If the size becomes unknown instead. Exported models test the rank of an
    input and have a branch for each; the branches for other ranks never run.
    """
    for y in node.outputs:
        if y.shape is not None and any(isinstance(d, int) and d < 0 for d in y.shape):
            if node.graph is not None and node.graph.meta.get(_IN_BRANCH):
                known = S.dims_of(y) or ()
                S.set_dims(y, [None if isinstance(d, int) and d < 0 else d for d in known])
                continue
            raise PrepareError(
                f"node {node.name!r}: {S.describe(node)}: {S.describe_value(y)} has a negative "
                "size\nhint: check the constants and attributes of this node"
            )


def check_before_conversion(model: ir.Model) -> None:
    """Raise an error if a size is negative, before onnx's version converter sees the model.

    Nodes that cannot be inferred at the model's old opset are checked after the conversion.
    """
    if not any(_is_slice(n) for n in model.graph.all_nodes()):
        return  # only Slice aborts the process
    _check_sizes(model.clone().graph, model.opset_imports[""])


def _is_slice(node: ir.Node) -> bool:
    return node.op_type == "Slice" and is_standard(node)


def _check_sizes(graph: ir.Graph, opset: int) -> None:
    for node in graph:
        if not any(_is_slice(n) for body in subgraphs_of(node) for n in body.all_nodes()):
            mark_branches(node)
        for body in subgraphs_of(node):
            _check_sizes(body, opset)
        try:
            S.infer_node(node, opset)
        except (OnnxTrainError, RuntimeError, ValueError, TypeError, LookupError):
            check_nonnegative_sizes(node)
