"""Shape inference over a whole graph, keeping what the exporter knew.

Types and shapes of a node's outputs.

onnx's own inference gives dtype, rank and static sizes; :mod:`onnxtrain.graph.shapes.symbolic` adds
what it loses, sizes that are only known by name. Every unknown size gets a name of its own, so that
it can be followed through the rest of the graph.

Types and shapes of the commonest float operators, without a round trip through protobuf.

Only what is beyond doubt: wherever a type, rank or size is unknown or does not fit, ``infer``
answers ``False`` and onnx's inference decides, or complains.

Types and shapes of the outputs of If, Loop and Scan, from those of their bodies.

How many elements a node makes of constants, so that nothing huge is computed to be dropped.

Sizes below zero, which end the process if onnx's inference meets them in a Slice.
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
from onnxtrain.graph.shapes.values import (
    INVALID_NODE_ERRORS,
    constant_of,
    describe,
    dims_of,
    first_line,
    invalid_node_message,
    schema_of,
    set_dims,
    symbolic_of,
)

_ShapeFormula = Callable[[ir.Node], Sequence[Dim] | None]

_SAME_SHAPE = (
    *("Abs", "Ceil", "Clip", "Cos", "Elu", "Erf", "Exp", "Floor", "Gelu", "HardSwish", "LeakyRelu"),
    *("Log", "Mish", "Neg", "Reciprocal", "Relu", "Round", "Sigmoid", "Sign", "Sin", "Softplus"),
    *("Sqrt", "Tanh"),
)
_ARITHMETIC = ("Add", "Div", "Mul", "Pow", "Sub")
_COMPARISONS = ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual")


def infer_common_op(node: ir.Node) -> bool:
    """Set the type and shape of a node's output if they are certain; tell whether they are."""
    formula = _COMMON_FORMULAS.get(node.op_type)
    if formula is None or not is_standard(node) or len(node.outputs) != 1:
        return False
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
    dims, given = _shape_of_first(node), node.attributes.get("axis")
    axis = -1 if given is None else given.as_int()
    return dims if dims is not None and -len(dims) <= axis < len(dims) else None


def _broadcast_shape(node: ir.Node) -> Sequence[Dim] | None:
    numbers = node.inputs[1:] if node.op_type == "Where" else node.inputs
    if len({x.dtype for x in numbers if x is not None}) != 1:
        return None
    result: Sequence[Dim] | None = ()
    for x in node.inputs:
        dims = None if x is None else S.dims_of(x)
        if result is None or dims is None:
            return None
        result = _broadcast_dim(result, dims)
    return result


def _broadcast_dim(a: Sequence[Dim], b: Sequence[Dim]) -> list[Dim] | None:
    n = max(len(a), len(b))
    left, right = [1] * (n - len(a)) + list(a), [1] * (n - len(b)) + list(b)
    for p, q in zip(left, right, strict=True):
        if isinstance(p, int) and isinstance(q, int) and p != q and 1 not in (p, q):
            return None
    return [D.broadcast(p, q) for p, q in zip(left, right, strict=True)]


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
    batch = _broadcast_dim(a[:-2], b[:-2])
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
    """Set the outputs of If, Loop and Scan from their bodies; ``False`` for any other node."""
    infer = _BY_OPERATOR.get(node.op_type)
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


_BY_OPERATOR = {"If": _infer_if, "Loop": _infer_loop, "Scan": _infer_scan}


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
    """A state may leave as it came in, if there is no step, or as the body makes it."""
    before = None if start is None else S.dims_of(start)
    type_ = inner.type or (None if start is None else start.type)
    _adopt(out, type_, _merge_dims(before, S.dims_of(inner)))


def _merge_dims(a: Sequence[Dim] | None, b: Sequence[Dim] | None) -> list[Dim] | None:
    if a is None or b is None or len(a) != len(b):
        return None
    return [p if p == q else None for p, q in zip(a, b, strict=True)]


def _adopt(out: ir.Value, type_: ir.TypeProtocol | None, dims: Sequence[Dim] | None) -> None:
    out.type = type_ or out.type
    if dims is not None:
        S.set_dims(out, dims)


# Their outputs may be larger than all they read.
_EXPANDING_OPS = frozenset(
    (
        *("BlackmanWindow", "CenterCropPad", "Col2Im", "ConstantOfShape", "DFT", "Expand"),
        *("HammingWindow", "HannWindow", "MelWeightMatrix", "OneHot", "Pad", "Resize", "STFT"),
        *("Tile", "Upsample"),
    )
)


def output_fits(node: ir.Node, limit: int) -> bool:
    """Return whether a node whose inputs are constants makes no more than so many elements."""
    for y in node.outputs:
        sizes = D.static_sizes(S.dims_of(y))
        if sizes is not None and math.prod(sizes) > limit:
            return False
        if sizes is None and node.op_type in _EXPANDING_OPS:
            return False
    return node.op_type != "Range" or _range_length(node) <= limit


def _range_length(node: ir.Node) -> float:
    bounds = [S.constant_of(x) for x in node.inputs]
    numbers = [float(b.reshape(-1)[0]) for b in bounds if b is not None and b.size == 1]
    if len(numbers) < 3 or not numbers[2] or not np.all(np.isfinite(numbers)):
        return math.inf
    start, stop, step = numbers
    return (stop - start) / step


_IN_BRANCH = "onnxtrain.branch"  # key in Graph.meta: perhaps it is never run


def mark_branches(node: ir.Node) -> None:
    """Note that the bodies of an If, and what is inside of them, may never be run."""
    inside = node.graph is not None and bool(node.graph.meta.get(_IN_BRANCH))
    if inside or node.op_type == "If":
        for body in subgraphs_of(node):
            body.meta[_IN_BRANCH] = True


def check_nonnegative_sizes(node: ir.Node) -> None:
    """Raise an error if an output of a node has a size below zero.

    In a branch that may never be run the size is taken for unknown: there are models that ask for
    the rank of an input, and have a branch for each.
    """
    for y in node.outputs:
        if y.shape is not None and any(isinstance(d, int) and d < 0 for d in y.shape):
            if node.graph is not None and node.graph.meta.get(_IN_BRANCH):
                known = S.dims_of(y) or ()
                S.set_dims(y, [None if isinstance(d, int) and d < 0 else d for d in known])
                continue
            raise PrepareError(
                f"node {node.name!r}: {S.describe(node)}: {S.describe_value(y)} has a size below "
                "zero\nhint: look at the constants and attributes of this node"
            )


def check_before_conversion(model: ir.Model) -> None:
    """Raise an error if some size comes out below zero, before onnx is given the whole model.

    What cannot be inferred at an old opset is left to those who come later.
    """
    if not any(_is_slice(n) for n in model.graph.all_nodes()):
        return  # nothing else aborts
    _check(model.clone().graph, model.opset_imports[""])


def _is_slice(node: ir.Node) -> bool:
    return node.op_type == "Slice" and is_standard(node)


def _check(graph: ir.Graph, opset: int) -> None:
    for node in graph:
        if not any(_is_slice(n) for body in subgraphs_of(node) for n in body.all_nodes()):
            mark_branches(node)
        for body in subgraphs_of(node):
            _check(body, opset)
        try:
            S.infer_node(node, opset)
        except (OnnxTrainError, RuntimeError, ValueError, TypeError, LookupError):
            check_nonnegative_sizes(node)


Rewrite = Callable[[ir.Node], bool]
"""Replaces a node whose inputs are typed by nodes that are typed too; tells whether it did."""


def infer_shapes(graph: ir.Graph, opset: int, rewrite: Rewrite | None = None) -> None:
    """Set type and shape of every value; unify the exporter's symbols with inferred sizes.

    An exporter may call a size ``s7`` where inference finds ``2*batch``: the inferred form wins,
    and the exporter's name is replaced by it from there on. ``rewrite`` is asked about each node
    in front of its inference, so that operators nobody can infer are replaced on the way.
    """
    _Inference(opset, rewrite).run(graph)


def is_generated_symbol(d: Dim) -> bool:
    """Return whether a size is a name that onnx gave it because it knew nothing."""
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
            # Inference knew nothing, and gave a name of ours or of onnx's.
            own = a == D.symbol(f"{y.name}.{i}") or is_generated_symbol(a)
            if own and b is not None:
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
        """Find which carried values keep their shape, by assuming it and looking at the result."""
        body = node.attributes["body"].as_graph()
        if self.rewrite is not None:  # before sizes are assumed that may turn out to change
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
            kinds = (ir.DataType.INT64, ir.DataType.BOOL)
            for inner, kind in zip(body.inputs[:2], kinds, strict=True):
                inner.type = inner.type or ir.TensorType(kind)
                if inner.shape is None:
                    inner.shape = ir.Shape([])
        else:
            scans = node.attributes["num_scan_inputs"].as_int()
            n = len(node.inputs) - scans
            carried = zip(body.inputs[:n], node.inputs[:n], strict=False)
            given = node.attributes.get("scan_input_axes")
            axes = list(given.as_ints()) if given is not None else [0] * scans
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


_MAX_KNOWN_ELEMENTS = 64  # elements that onnx's inference is shown
# onnx infers nothing for the first, and fails on the second without its attribute.
_TYPED_LIKE_FIRST = frozenset({"GroupNormalization", "MeanVarianceNormalization"})
_DATA_IN_FIRST_INPUT = frozenset({"ConstantOfShape", "Range", "Cast", "Expand", "Concat"})


def infer_node(node: ir.Node, opset: int) -> None:
    """Set type and shape of a node's outputs from its inputs.

    Sizes that stay unknown are named after the output, so equal names mean equal sizes.
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
    except INVALID_NODE_ERRORS as error:
        raise PrepareError(invalid_node_message(node, error)) from error
    check_nonnegative_sizes(node)
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
        if i == 0 and node.op_type not in _DATA_IN_FIRST_INPUT:
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
        raise PrepareError(_untyped_input_message(node, error)) from error
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


def _untyped_input_message(node: ir.Node, error: KeyError) -> str:
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
        return constant_of(x) if x.const_value.size <= _MAX_KNOWN_ELEMENTS else None
    elements, dims = symbolic_of(x), dims_of(x)
    if elements is None or dims is None or x.dtype is None or len(dims) > 1:
        return None
    if len(elements) > _MAX_KNOWN_ELEMENTS or not all(isinstance(e, int) for e in elements):
        return None
    return np.asarray(elements, x.dtype.numpy()).reshape(() if dims == () else (-1,))
