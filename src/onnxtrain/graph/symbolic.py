"""Shapes that onnx's inference gives up on: sizes known by name only.

Two tables, by operator: ``_SHAPES`` gives the dimensions of the first output, ``_VALUES`` follows the
elements of small integer tensors (the usual ``Shape -> Gather -> Concat -> Reshape`` arithmetic).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.graph import dims as D
from onnxtrain.graph import shapes as S
from onnxtrain.graph.dims import Dim
from onnxtrain.graph.equation import spell_out

_Attributes = dict[str, Any]
_Formula = Callable[[ir.Node, _Attributes], Sequence[Dim] | None]
_SHAPES: dict[str, _Formula] = {}
_VALUES: dict[str, _Formula] = {}


def refine(node: ir.Node, opset: int) -> None:
    """Improve the shapes and record the symbolic elements of a node's outputs."""
    if node.domain not in ("", "ai.onnx") or not node.outputs:
        return
    formula = _SHAPES.get(node.op_type)
    value = _VALUES.get(node.op_type)
    if formula is None and value is None:
        return
    attributes = S.attributes_of(node, opset)
    out = node.outputs[0]
    # onnx counts windows that start behind the input; no runtime does.
    overrule = bool(attributes.get("ceil_mode"))
    if formula is not None and (overrule or any(not S.is_static(o) for o in node.outputs)):
        dims = formula(node, attributes)
        if dims is not None:
            known = S.dims_of(out)
            if known is not None and len(known) == len(dims) and not overrule:
                dims = [k if isinstance(k, int) else d if d is not None else k for k, d in zip(known, dims, strict=True)]
            S.set_dims(out, dims)
    if value is not None and out.dtype in (ir.DataType.INT64, ir.DataType.INT32):
        S.set_symbolic(out, value(node, attributes))


def _shape(*ops: str):
    def register(f: _Formula) -> _Formula:
        _SHAPES.update(dict.fromkeys(ops, f))
        return f

    return register


def _value(*ops: str):
    def register(f: _Formula) -> _Formula:
        _VALUES.update(dict.fromkeys(ops, f))
        return f

    return register


def _input(node: ir.Node, i: int) -> ir.Value | None:
    return node.inputs[i] if i < len(node.inputs) else None


def _first(node: ir.Node) -> tuple[Dim, ...] | None:
    x = _input(node, 0)
    return None if x is None else S.dims_of(x)


# -- shapes ---------------------------------------------------------------------


@_shape("Reshape")
def _reshape(node, a):
    dims, shape = _first(node), _input(node, 1)
    target = S.symbolic_of(shape)
    if target is None:
        many = None if shape is None else S.dims_of(shape)
        known = many is not None and len(many) == 1 and isinstance(many[0], int)
        return [None] * many[0] if known else None
    out: list[Dim] = list(target)
    for i, t in enumerate(target):
        if t == 0 and not a["allowzero"]:
            out[i] = dims[i] if dims is not None and i < len(dims) else None
    if -1 in out:
        at = out.index(-1)
        if dims is None:
            out[at] = None
        else:
            # The total over the other sizes; it must come out whole, or it stays unknown.
            rest = D.product(d for i, d in enumerate(out) if i != at)
            out[at] = D.floordiv(D.product(dims), rest)
    return out


@_shape("Flatten")
def _flatten(node, a):
    dims = _first(node)
    if dims is None:
        return None
    axis = a["axis"] if a["axis"] >= 0 else a["axis"] + len(dims)
    return [D.product(dims[:axis]), D.product(dims[axis:])]


@_shape("Expand")
def _expand(node, a):
    dims, target = _first(node), S.symbolic_of(_input(node, 1))
    if dims is None or target is None:
        return None
    n = max(len(dims), len(target))
    left = [1] * (n - len(dims)) + list(dims)
    right = [1] * (n - len(target)) + list(target)
    return [D.broadcast(p, q) for p, q in zip(left, right, strict=True)]


@_shape("ConstantOfShape")
def _constant_of_shape(node, a):
    return S.symbolic_of(_input(node, 0))


@_shape("Tile")
def _tile(node, a):
    dims, repeats = _first(node), S.symbolic_of(_input(node, 1))
    if dims is None or repeats is None or len(dims) != len(repeats):
        return None
    return [D.mul(d, r) for d, r in zip(dims, repeats, strict=True)]


@_shape("Concat")
def _concat(node, a):
    all_dims = [S.dims_of(x) for x in node.inputs if x is not None]
    if not all_dims or any(d is None for d in all_dims):
        return None
    axis = a["axis"] % len(all_dims[0])
    out = [next((e[i] for e in all_dims if isinstance(e[i], int)), d) for i, d in enumerate(all_dims[0])]
    total: Dim = 0
    for d in all_dims:
        total = D.add(total, d[axis])
    out[axis] = total
    return out


@_shape("Pad")
def _pad(node, a):
    dims, pads = _first(node), S.symbolic_of(_input(node, 1))
    if dims is None:
        return None
    given = S.symbolic_of(_input(node, 3))
    if pads is None or (given is None and _input(node, 3) is not None):
        return [None] * len(dims)  # the rank stays
    axes = list(range(len(dims))) if given is None else [int(i) % len(dims) for i in given]
    out = list(dims)
    for i, axis in enumerate(axes):
        out[axis] = D.add(D.add(dims[axis], pads[i]), pads[i + len(axes)])
    return out


@_shape("Slice")
def _slice(node, a):
    dims = _first(node)
    if dims is None:
        return None
    starts, ends = S.symbolic_of(_input(node, 1)), S.symbolic_of(_input(node, 2))
    axes_in, steps_in = _input(node, 3), _input(node, 4)
    axes = S.symbolic_of(axes_in)
    out = list(dims)
    if axes_in is None and starts is not None:
        axes = tuple(range(len(starts)))
    if axes is None:
        return [None] * len(dims)
    steps = (1,) * len(axes) if steps_in is None else S.symbolic_of(steps_in)
    for i, axis in enumerate(axes):
        axis = int(axis) % len(dims)
        if starts is None or ends is None or steps is None:
            out[axis] = None
        else:
            out[axis] = _slice_length(dims[axis], starts[i], ends[i], steps[i])
    return out


def _slice_length(size: Dim, start: Dim, end: Dim, step: Dim) -> Dim:
    if size is None or start is None or end is None or step is None:
        return None
    if isinstance(size, int) and isinstance(start, int) and isinstance(end, int) and isinstance(step, int):
        return len(range(*slice(start, _slice_end(end, step), step).indices(size)))
    if step != 1 or not isinstance(start, int):
        return None
    if end == size or (isinstance(end, int) and end >= 2**31 - 1):
        # Sizes are at least as large as the offsets real graphs cut; a shorter axis would
        # give an empty slice, whose dimension is then not this one: only start 0 is certain.
        return size if start == 0 else None
    return None


def _slice_end(end: int, step: int) -> int | None:
    return None if step < 0 and end <= -(2**31) else end


@_shape("Split")
def _split(node, a):
    dims, parts = _first(node), S.symbolic_of(_input(node, 1))
    if dims is None:
        return None
    axis = a["axis"] % len(dims)
    if parts is None and _input(node, 1) is None:
        n = a.get("num_outputs") or len(node.outputs)
        size = D.floordiv(dims[axis], n)
        exact = D.mul(size, n) == dims[axis]
        parts = (size if exact else None,) * n
    if parts is None:
        parts = (None,) * len(node.outputs)
    for out, part in zip(node.outputs, parts, strict=False):
        if not S.is_static(out):
            S.set_dims(out, [part if i == axis else d for i, d in enumerate(dims)])
    return S.dims_of(node.outputs[0])


@_shape("Range")
def _range(node, a):
    start, limit, delta = (S.symbolic_of(x) for x in node.inputs)
    if start is None or limit is None or delta is None:
        return [None]
    if delta[0] == 1 and start[0] == 0:
        return [limit[0]]  # a negative limit gives an empty range, but sizes are not negative
    return [None]


@_shape(
    *("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2"),
    *("ReduceSumSquare", "ReduceLogSum", "ReduceLogSumExp"),
)
def _reduce(node, a):
    """The rank, where axes are only known at run time."""
    dims, axes = _first(node), _input(node, 1)
    if dims is None or axes is None or S.symbolic_of(axes) is not None:
        return None
    many = S.dims_of(axes)
    if many == (0,):
        return dims if a["noop_with_empty_axes"] else [1] * len(dims) if a["keepdims"] else []
    if a["keepdims"]:
        return [None] * len(dims)
    return [None] * (len(dims) - many[0]) if many is not None and isinstance(many[0], int) else None


@_shape("Unsqueeze")
def _unsqueeze(node, a):
    """The rank, where axes are only known at run time."""
    dims, axes = _first(node), _input(node, 1)
    many = None if axes is None or S.symbolic_of(axes) is not None else S.dims_of(axes)
    if dims is None or many is None or not isinstance(many[0], int):
        return None
    return [None] * (len(dims) + many[0])


@_shape("Conv", "MaxPool", "AveragePool", "LpPool")
def _windowed(node, a):
    dims = _first(node)
    if dims is None:
        return None
    n = len(dims) - 2
    w = _input(node, 1) if node.op_type == "Conv" else None
    kernel = a.get("kernel_shape")
    if kernel is None:
        if w is None or S.dims_of(w) is None:
            return None
        kernel = S.dims_of(w)[2:]
    strides, dilations = a.get("strides") or [1] * n, a.get("dilations") or [1] * n
    pads, auto = a.get("pads") or [0] * 2 * n, a.get("auto_pad") or "NOTSET"
    channels = dims[1] if node.op_type != "Conv" else (S.dims_of(w) or (None,))[0]
    out: list[Dim] = [dims[0], channels]
    for i in range(n):
        size, stride = dims[2 + i], strides[i]
        if auto in ("SAME_UPPER", "SAME_LOWER"):
            out.append(D.floordiv(D.add(size, stride - 1), stride))
            continue
        extent = D.add(D.mul(dilations[i], D.sub(kernel[i], 1)), 1)
        before, after = (0, 0) if auto == "VALID" else (pads[i], pads[i + n])
        room = D.sub(D.add(size, before + after), extent)
        if not a.get("ceil_mode"):
            out.append(D.add(D.floordiv(room, stride), 1))
        elif isinstance(size, int) and isinstance(room, int):
            count = -(-room // stride) + 1
            out.append(count - 1 if (count - 1) * stride >= size + before else count)
        else:
            out.append(None)
    if a.get("ceil_mode") and len(node.outputs) > 1:
        S.set_dims(node.outputs[1], out)
    return out


@_shape("ConvTranspose")
def _conv_transpose(node, a):
    dims, w = _first(node), _input(node, 1)
    wd = None if w is None else S.dims_of(w)
    if dims is None or wd is None or a.get("output_shape") or (a.get("auto_pad") or "NOTSET") != "NOTSET":
        return None
    n = len(dims) - 2
    kernel = a.get("kernel_shape") or wd[2:]
    strides, dilations = a.get("strides") or [1] * n, a.get("dilations") or [1] * n
    pads, extra = a.get("pads") or [0] * 2 * n, a.get("output_padding") or [0] * n
    out: list[Dim] = [dims[0], D.mul(wd[1], a["group"])]
    for i in range(n):
        size = D.mul(strides[i], D.sub(dims[2 + i], 1))
        size = D.add(D.add(size, extra[i]), D.add(D.mul(D.sub(kernel[i], 1), dilations[i]), 1))
        out.append(D.sub(size, pads[i] + pads[i + n]))
    return out


@_shape("Einsum")
def _einsum(node, a):
    operands = [None if x is None else S.dims_of(x) for x in node.inputs]
    if any(dims is None for dims in operands):
        return None
    eq = spell_out(a["equation"], [len(dims) for dims in operands])
    if eq is None:
        return None
    found: dict[str, Dim] = {}
    for term, dims in zip(eq.terms, operands, strict=True):
        for letter, d in zip(term, dims, strict=True):
            met = D.broadcast(found.get(letter, 1), d)
            # The axes of a letter are equal by the standard; those of the ellipsis broadcast.
            found[letter] = found.get(letter) if met is None and letter not in eq.ellipsis else met
    name = node.outputs[0].name or node.name
    out = [found[letter] for letter in eq.output]
    return [D.symbol(f"{name}.{i}") if d is None else d for i, d in enumerate(out)]


@_shape("Resize", "Upsample")
def _resize(node, a):
    dims = _first(node)
    if dims is None:
        return None
    scales_in = _input(node, 1 if node.op_type == "Upsample" else 2)
    sizes = S.symbolic_of(_input(node, 3)) if node.op_type == "Resize" else None
    axes = [i % len(dims) for i in (a.get("axes") or range(len(dims)))]
    if (a.get("keep_aspect_ratio_policy") or "stretch") != "stretch":
        return None
    out = list(dims)
    if sizes is not None:
        for axis, size in zip(axes, sizes, strict=True):
            out[axis] = size
        return out
    scales = S.constant_of(scales_in)
    if scales is None or len(scales) != len(axes):
        return None
    for axis, scale in zip(axes, scales, strict=True):
        if float(scale).is_integer():
            out[axis] = D.mul(dims[axis], int(scale))
        elif not isinstance(dims[axis], int):
            out[axis] = None
        else:
            out[axis] = int(np.floor(dims[axis] * np.float32(scale)))
    return out


@_shape("DepthToSpace")
def _depth_to_space(node, a):
    dims, b = _first(node), a["blocksize"]
    return None if dims is None else [dims[0], D.floordiv(dims[1], b * b), D.mul(dims[2], b), D.mul(dims[3], b)]


@_shape("SpaceToDepth")
def _space_to_depth(node, a):
    dims, b = _first(node), a["blocksize"]
    return None if dims is None else [dims[0], D.mul(dims[1], b * b), D.floordiv(dims[2], b), D.floordiv(dims[3], b)]


# -- small integer tensors --------------------------------------------------------


@_value("Shape")
def _shape_value(node, a):
    dims = _first(node)
    return None if dims is None else dims[slice(a.get("start") or 0, a.get("end"))]


@_value("Size")
def _size_value(node, a):
    dims = _first(node)
    return None if dims is None else (D.product(dims),)


@_value("Identity", "Cast", "Squeeze", "Unsqueeze", "CastLike")
def _same_value(node, a):
    out = S.dims_of(node.outputs[0])
    return S.symbolic_of(_input(node, 0)) if out is not None and len(out) <= 1 else None


@_value("Reshape")
def _reshape_value(node, a):
    out = S.dims_of(node.outputs[0])
    return S.symbolic_of(_input(node, 0)) if out is not None and len(out) <= 1 else None


@_value("Concat")
def _concat_value(node, a):
    parts = [S.symbolic_of(x) for x in node.inputs]
    if any(p is None for p in parts):
        return None
    return tuple(d for p in parts if p is not None for d in p)


@_value("Gather")
def _gather_value(node, a):
    data, at = S.symbolic_of(_input(node, 0)), S.symbolic_of(_input(node, 1))
    if data is None or at is None or any(not isinstance(i, int) for i in at):
        return None
    if any(not -len(data) <= i < len(data) for i in at):
        return None
    return tuple(data[i] for i in at)


@_value("Slice")
def _slice_value(node, a):
    data = S.symbolic_of(_input(node, 0))
    bounds = [S.symbolic_of(_input(node, i)) for i in (1, 2)]
    step_in = _input(node, 4)
    step = (1,) if step_in is None else S.symbolic_of(step_in)
    if data is None or step is None or any(b is None or len(b) != 1 for b in bounds):
        return None
    (start,), (end,) = bounds[0], bounds[1]
    if not all(isinstance(v, int) for v in (start, end, step[0])):
        return None
    return data[slice(start, _slice_end(end, step[0]), step[0])]


@_value("Split")
def _split_value(node, a):
    data, parts = S.symbolic_of(_input(node, 0)), S.symbolic_of(_input(node, 1))
    if data is None:
        return None
    if parts is None:
        if _input(node, 1) is not None:
            return None
        n = a.get("num_outputs") or len(node.outputs)
        size = -(-len(data) // n)
        parts = tuple(min(size, len(data) - i * size) for i in range(n))
    at = 0
    for out, part in zip(node.outputs, parts, strict=False):
        if not isinstance(part, int):
            return None
        S.set_symbolic(out, data[at : at + part])
        at += part
    return S.symbolic_of(node.outputs[0])


def _arithmetic(op_type: str, f: Callable[[Dim, Dim], Dim]) -> None:
    def formula(node, a):
        left, right = S.symbolic_of(_input(node, 0)), S.symbolic_of(_input(node, 1))
        out = S.dims_of(node.outputs[0])
        if left is None or right is None or out is None or len(out) > 1:
            return None
        n = max(len(left), len(right))
        if len(left) not in (1, n) or len(right) not in (1, n):
            return None
        left, right = left * (n // len(left) if len(left) == 1 else 1), right * (n if len(right) == 1 else 1)
        return tuple(f(p, q) for p, q in zip(left, right, strict=False))

    _VALUES[op_type] = formula


def _divide(a: Dim, b: Dim) -> Dim:
    # Integer Div truncates; sizes are not negative, a number may be.
    if isinstance(a, int) and isinstance(b, int) and b:
        return int(a / b) if abs(a) < 2**50 else None
    quotient = D.floordiv(a, b)
    return quotient if D.mul(quotient, b) == a else None


_arithmetic("Add", D.add)
_arithmetic("Sub", D.sub)
_arithmetic("Mul", D.mul)
_arithmetic("Div", _divide)


@_value("ReduceProd")
def _reduce_prod_value(node, a):
    data = S.symbolic_of(_input(node, 0))
    return None if data is None else (D.product(data),)


@_value("Range")
def _range_value(node, a):
    bounds = [S.symbolic_of(x) for x in node.inputs]
    if any(b is None or not isinstance(b[0], int) for b in bounds):
        return None
    values = range(*(b[0] for b in bounds if b is not None))
    return tuple(values) if len(values) <= 64 else None


@_value("ConstantOfShape")
def _constant_of_shape_value(node, a):
    dims = S.dims_of(node.outputs[0])
    if dims is None or len(dims) != 1 or not isinstance(dims[0], int) or dims[0] > 64:
        return None
    tensor = a.get("value")
    return (0 if tensor is None else int(tensor.numpy().reshape(-1)[0]),) * dims[0]


@_value("Where")
def _where_value(node, a):
    condition = S.constant_of(_input(node, 0))
    left, right = S.symbolic_of(_input(node, 1)), S.symbolic_of(_input(node, 2))
    if left is None or right is None:
        return None
    if condition is None:
        return left if left == right else None
    flags = [bool(c) for c in condition.reshape(-1)]
    n = max(len(flags), len(left), len(right))
    if any(len(v) not in (1, n) for v in (flags, left, right)):
        return None
    pick = [v if len(v) == n else list(v) * n for v in (flags, left, right)]
    return tuple(p if c else q for c, p, q in zip(*pick, strict=True))


# -- control flow -----------------------------------------------------------------


def infer_control_flow(node: ir.Node) -> bool:
    """Set the outputs of If, Loop and Scan from their bodies; ``False`` for any other node."""
    if node.domain not in ("", "ai.onnx"):
        return False
    if node.op_type == "If":
        then, other = node.attributes["then_branch"].as_graph(), node.attributes["else_branch"].as_graph()
        for out, a, b in zip(node.outputs, then.outputs, other.outputs, strict=False):
            _adopt(out, a.type or b.type, _join(S.dims_of(a), S.dims_of(b)))
        return True
    if node.op_type == "Loop":
        body = node.attributes["body"].as_graph()
        carried = len(node.inputs) - 2
        for i, out in enumerate(node.outputs):
            inner = body.outputs[i + 1]
            if i < carried:
                start = node.inputs[i + 2]
                dims = _join(None if start is None else S.dims_of(start), S.dims_of(inner))
                _adopt(out, inner.type or (start.type if start is not None else None), dims)
            else:
                dims = S.dims_of(inner)
                _adopt(out, inner.type, None if dims is None else (None, *dims))
        return True
    if node.op_type == "Scan":
        body = node.attributes["body"].as_graph()
        scans = node.attributes["num_scan_inputs"].as_int()
        carried = len(node.inputs) - scans
        axes_in = _ints(node, "scan_input_axes") or [0] * scans
        axes_out = _ints(node, "scan_output_axes") or [0] * (len(node.outputs) - carried)
        length: Dim = None
        for x, axis in zip(node.inputs[carried:], axes_in, strict=True):
            dims = None if x is None else S.dims_of(x)
            if dims is not None:
                length = dims[axis]
                break
        for i, out in enumerate(node.outputs):
            inner = body.outputs[i]
            dims = S.dims_of(inner)
            if i < carried:
                start = node.inputs[i]
                _adopt(out, inner.type or (start.type if start is not None else None), _join(None if start is None else S.dims_of(start), dims))
            elif dims is None:
                _adopt(out, inner.type, None)
            else:
                full = list(dims)
                axis = axes_out[i - carried] % (len(dims) + 1)
                full.insert(axis, length)
                _adopt(out, inner.type, full)
        return True
    return False


def _ints(node: ir.Node, name: str) -> list[int] | None:
    attribute = node.attributes.get(name)
    return None if attribute is None else list(attribute.as_ints())


def _join(a: Sequence[Dim] | None, b: Sequence[Dim] | None) -> list[Dim] | None:
    if a is None or b is None or len(a) != len(b):
        return None
    return [p if p == q else None for p, q in zip(a, b, strict=True)]


def _adopt(out: ir.Value, type_: Any, dims: Sequence[Dim] | None) -> None:
    out.type = type_ or out.type
    if dims is not None:
        S.set_dims(out, dims)
