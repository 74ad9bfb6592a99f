"""Shape formulas for symbolic sizes, which onnx's inference loses.

Three tables by operator, in this order: ``SHAPE_FORMULAS`` (reshaping, slicing, concatenation,
reduction), ``ELEMENT_FORMULAS`` and ``WINDOW_FORMULAS`` (convolution, pooling, Resize). Element
formulas follow the elements of small integer tensors of rank 0 or 1 as dimensions, through the
usual ``Shape -> Gather -> Concat -> Reshape`` arithmetic. :func:`refine` applies them to a node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.nodes import is_standard
from onnxtrain.graph.shapes import dims as D
from onnxtrain.graph.shapes.dims import Dim, expand_equation

Attributes = dict[str, Any]
"""Attributes of a node as Python values, defaults included."""

Formula = Callable[[ir.Node, Attributes], Sequence[Dim] | None]
"""Returns dimensions, or elements of a small integer tensor; ``None`` if nothing is known."""


def input_of(node: ir.Node, i: int) -> ir.Value | None:
    """Return an input by position, ``None`` if it is omitted."""
    return node.inputs[i] if i < len(node.inputs) else None


def dims_in(node: ir.Node, i: int = 0) -> tuple[Dim, ...] | None:
    """Return the dimensions of an input, ``None`` if it is omitted or of unknown rank."""
    x = input_of(node, i)
    return None if x is None else S.dims_of(x)


def elements_in(node: ir.Node, i: int) -> tuple[Dim, ...] | None:
    """Return the elements of a small integer input; unknown elements are ``None``."""
    return S.symbolic_of(input_of(node, i))


def vector_length(node: ir.Node, i: int) -> int | None:
    """Return the static length of a vector input, such as axes or a shape, else ``None``."""
    dims = dims_in(node, i)
    return dims[0] if dims is not None and len(dims) == 1 and isinstance(dims[0], int) else None


def slice_end(end: int, step: int) -> int | None:
    """Return the end of a Python slice; exporters write INT_MIN to slice backwards to the start."""
    return None if step < 0 and end <= -(2**31) else end


_Dims = Sequence[Dim] | None


def _reshape(node: ir.Node, a: Attributes) -> _Dims:
    dims, target = dims_in(node), elements_in(node, 1)
    if target is None:
        rank = vector_length(node, 1)
        return None if rank is None else [None] * rank
    out: list[Dim] = list(target)
    for i, t in enumerate(target):
        if t == 0 and not a.get("allowzero"):
            out[i] = dims[i] if dims is not None and i < len(dims) else None
    if -1 in out:
        inferred = out.index(-1)
        if dims is None:
            out[inferred] = None
        else:
            rest = D.product(d for i, d in enumerate(out) if i != inferred)
            out[inferred] = D.floordiv(D.product(dims), rest)
    return out


def _flatten(node: ir.Node, a: Attributes) -> _Dims:
    dims = dims_in(node)
    if dims is None:
        return None
    axis = a["axis"] if a["axis"] >= 0 else a["axis"] + len(dims)
    return [D.product(dims[:axis]), D.product(dims[axis:])]


def _expand(node: ir.Node, a: Attributes) -> _Dims:
    dims, target = dims_in(node), elements_in(node, 1)
    if dims is None or target is None:
        return None
    return D.broadcast_shapes(dims, target)


def _constant_of_shape_shape(node: ir.Node, a: Attributes) -> _Dims:
    return elements_in(node, 0)


def _tile(node: ir.Node, a: Attributes) -> _Dims:
    dims, repeats = dims_in(node), elements_in(node, 1)
    if dims is None or repeats is None or len(dims) != len(repeats):
        return None
    return [D.mul(d, r) for d, r in zip(dims, repeats, strict=True)]


def _concat_shape(node: ir.Node, a: Attributes) -> _Dims:
    parts: list[tuple[Dim, ...]] = []
    for x in node.inputs:
        dims = None if x is None else S.dims_of(x)
        if dims is not None:
            parts.append(dims)
        elif x is not None:
            return None
    if not parts:
        return None
    axis: int = a["axis"] % len(parts[0])
    # All parts agree on the other axes: prefer a static size to a symbolic one.
    out = [next((p[i] for p in parts if isinstance(p[i], int)), d) for i, d in enumerate(parts[0])]
    total: Dim = 0
    for part in parts:
        total = D.add(total, part[axis])
    out[axis] = total
    return out


def _pad(node: ir.Node, a: Attributes) -> _Dims:
    dims, pads = dims_in(node), elements_in(node, 1)
    if dims is None:
        return None
    axes = (
        list(range(len(dims)))
        if input_of(node, 3) is None
        else D.static_sizes(elements_in(node, 3))
    )
    if pads is None or axes is None:
        return [None] * len(dims)  # Pad preserves the rank
    axes = [i % len(dims) for i in axes]
    out = list(dims)
    for i, axis in enumerate(axes):
        out[axis] = D.add(D.add(dims[axis], pads[i]), pads[i + len(axes)])
    return out


def _slice_shape(node: ir.Node, a: Attributes) -> _Dims:
    dims = dims_in(node)
    if dims is None:
        return None
    starts, ends = elements_in(node, 1), elements_in(node, 2)
    if input_of(node, 3) is None and starts is not None:
        axes = list(range(len(starts)))
    else:
        axes = D.static_sizes(elements_in(node, 3))
    if axes is None:
        return [None] * len(dims)
    steps = (1,) * len(axes) if input_of(node, 4) is None else elements_in(node, 4)
    out = list(dims)
    for i, axis in enumerate(axes):
        axis %= len(dims)
        if starts is None or ends is None or steps is None:
            out[axis] = None
        else:
            out[axis] = _slice_length(dims[axis], starts[i], ends[i], steps[i])
    return out


def _slice_length(size: Dim, start: Dim, end: Dim, step: Dim) -> Dim:
    if size is None or not isinstance(start, int) or end is None or not isinstance(step, int):
        return None
    if isinstance(size, int) and isinstance(end, int):
        return len(range(*slice(start, slice_end(end, step), step).indices(size)))
    if step == 1 and (end == size or (isinstance(end, int) and end >= 2**31 - 1)):
        # With another start the length depends on whether the axis is shorter than the start.
        return size if start == 0 else None
    return None


def _split_shape(node: ir.Node, a: Attributes) -> _Dims:
    dims, parts = dims_in(node), elements_in(node, 1)
    if dims is None:
        return None
    axis: int = a["axis"] % len(dims)
    if parts is None and input_of(node, 1) is None:
        n = int(a.get("num_outputs") or len(node.outputs))
        size = D.floordiv(dims[axis], n)
        exact = D.mul(size, n) == dims[axis]
        parts = (size if exact else None,) * n
    if parts is None:
        parts = (None,) * len(node.outputs)
    for out, part in zip(node.outputs, parts, strict=False):
        if not S.is_static(out):
            S.set_dims(out, [part if i == axis else d for i, d in enumerate(dims)])
    return S.dims_of(node.outputs[0])


def _range_shape(node: ir.Node, a: Attributes) -> _Dims:
    start, limit, delta = (S.symbolic_of(x) for x in node.inputs)
    if start is None or limit is None or delta is None:
        return [None]
    if delta[0] == 1 and start[0] == 0:
        return [limit[0]]  # the limit of such a range is a size, which is not negative
    return [None]


def _reduce(node: ir.Node, a: Attributes) -> _Dims:
    """Return the rank of a reduction whose axes are computed; onnx handles constant axes."""
    dims, axes = dims_in(node), input_of(node, 1)
    if dims is None or axes is None or S.symbolic_of(axes) is not None:
        return None
    count = vector_length(node, 1)
    if count == 0:
        return dims if a.get("noop_with_empty_axes") else [1] * len(dims) if a["keepdims"] else []
    if a["keepdims"]:
        return [None] * len(dims)
    return None if count is None else [None] * (len(dims) - count)


def _unsqueeze(node: ir.Node, a: Attributes) -> _Dims:
    """Return the rank of an Unsqueeze whose axes are computed; onnx handles constant axes."""
    dims = dims_in(node)
    count = None if elements_in(node, 1) is not None else vector_length(node, 1)
    return None if dims is None or count is None else [None] * (len(dims) + count)


def _einsum(node: ir.Node, a: Attributes) -> _Dims:
    operands: list[tuple[Dim, ...]] = []
    for x in node.inputs:
        dims = None if x is None else S.dims_of(x)
        if dims is None:
            return None
        operands.append(dims)
    eq = expand_equation(a["equation"], [len(dims) for dims in operands])
    if eq is None:
        return None
    sizes: dict[str, Dim] = {}
    for term, dims in zip(eq.terms, operands, strict=True):
        for letter, d in zip(term, dims, strict=True):
            size = D.broadcast(sizes.get(letter, 1), d)
            # ONNX requires equal sizes for a letter, so keep the first; ellipsis axes broadcast.
            keep_first = size is None and letter not in eq.ellipsis
            sizes[letter] = sizes.get(letter) if keep_first else size
    name = node.outputs[0].name or node.name
    out = [sizes[letter] for letter in eq.output]
    return [D.symbol(f"{name}.{i}") if d is None else d for i, d in enumerate(out)]


def _depth_to_space(node: ir.Node, a: Attributes) -> _Dims:
    dims, b = dims_in(node), a["blocksize"]
    if dims is None:
        return None
    return [dims[0], D.floordiv(dims[1], b * b), D.mul(dims[2], b), D.mul(dims[3], b)]


def _space_to_depth(node: ir.Node, a: Attributes) -> _Dims:
    dims, b = dims_in(node), a["blocksize"]
    if dims is None:
        return None
    return [dims[0], D.mul(dims[1], b * b), D.floordiv(dims[2], b), D.floordiv(dims[3], b)]


_REDUCTIONS = (
    *("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2"),
    *("ReduceSumSquare", "ReduceLogSum", "ReduceLogSumExp"),
)

SHAPE_FORMULAS: dict[str, Formula] = {
    "Concat": _concat_shape,
    "ConstantOfShape": _constant_of_shape_shape,
    "DepthToSpace": _depth_to_space,
    "Einsum": _einsum,
    "Expand": _expand,
    "Flatten": _flatten,
    "Pad": _pad,
    "Range": _range_shape,
    **dict.fromkeys(_REDUCTIONS, _reduce),
    "Reshape": _reshape,
    "Slice": _slice_shape,
    "SpaceToDepth": _space_to_depth,
    "Split": _split_shape,
    "Tile": _tile,
    "Unsqueeze": _unsqueeze,
}


_MAX_ELEMENTS = 64  # longer vectors are not shapes
_ELEMENT_DTYPES = (ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL)

_Elements = tuple[Dim, ...] | None


def _constant_elements(node: ir.Node, a: Attributes) -> _Elements:
    """Read a Constant node; the importer makes initializers of them, a file as it is has nodes."""
    if "value" in node.attributes:
        tensor = node.attributes["value"].as_tensor()
        if tensor.size > _MAX_ELEMENTS or tensor.dtype not in (
            ir.DataType.INT32,
            ir.DataType.INT64,
        ):
            return None
        return tuple(int(n) for n in tensor.numpy().reshape(-1))
    ints = a.get("value_ints", a.get("value_int"))
    return (ints,) if isinstance(ints, int) else None if ints is None else tuple(ints)


def _shape_elements(node: ir.Node, a: Attributes) -> _Elements:
    dims = dims_in(node)
    return None if dims is None else dims[slice(a.get("start") or 0, a.get("end"))]


def _size_elements(node: ir.Node, a: Attributes) -> _Elements:
    dims = dims_in(node)
    return None if dims is None else (D.product(dims),)


def _same_elements(node: ir.Node, a: Attributes) -> _Elements:
    return elements_in(node, 0) if _is_small(node.outputs[0]) else None


def _is_small(x: ir.Value) -> bool:
    dims = S.dims_of(x)
    return dims is not None and len(dims) <= 1


def _concat_elements(node: ir.Node, a: Attributes) -> _Elements:
    out: list[Dim] = []
    for x in node.inputs:
        part = S.symbolic_of(x)
        if part is None:
            return None
        out += part
    return tuple(out)


def _gather_elements(node: ir.Node, a: Attributes) -> _Elements:
    data, indices = elements_in(node, 0), D.static_sizes(elements_in(node, 1))
    if data is None or indices is None or any(not -len(data) <= i < len(data) for i in indices):
        return None
    return tuple(data[i] for i in indices)


def _slice_elements(node: ir.Node, a: Attributes) -> _Elements:
    data, start, end = elements_in(node, 0), _scalar_element(node, 1), _scalar_element(node, 2)
    step = 1 if input_of(node, 4) is None else _scalar_element(node, 4)
    if data is None or start is None or end is None or step is None:
        return None
    return data[slice(start, slice_end(end, step), step)]


def _scalar_element(node: ir.Node, i: int) -> int | None:
    elements = D.static_sizes(elements_in(node, i))
    return elements[0] if elements is not None and len(elements) == 1 else None


def _split_elements(node: ir.Node, a: Attributes) -> _Elements:
    data, parts = elements_in(node, 0), elements_in(node, 1)
    if data is None:
        return None
    if parts is None:
        if input_of(node, 1) is not None:
            return None
        n = a.get("num_outputs") or len(node.outputs)
        size = -(-len(data) // n)
        parts = tuple(min(size, len(data) - i * size) for i in range(n))
    start = 0
    for out, part in zip(node.outputs, parts, strict=False):
        if not isinstance(part, int):
            return None
        S.set_symbolic(out, data[start : start + part])
        start += part
    return S.symbolic_of(node.outputs[0])


def _arithmetic_elements(f: Callable[[Dim, Dim], Dim]) -> Formula:
    def formula(node: ir.Node, a: Attributes) -> _Elements:
        left, right = elements_in(node, 0), elements_in(node, 1)
        if left is None or right is None or not _is_small(node.outputs[0]):
            return None
        n = max(len(left), len(right))
        if len(left) not in (1, n) or len(right) not in (1, n):
            return None
        return tuple(
            f(p, q)
            for p, q in zip(
                _broadcast_elements(n, left), _broadcast_elements(n, right), strict=True
            )
        )

    return formula


def _broadcast_elements(n: int, elements: tuple[Dim, ...]) -> tuple[Dim, ...]:
    return elements * n if len(elements) == 1 else elements


def _truncated_div(a: Dim, b: Dim) -> Dim:
    # Integer Div truncates toward zero. Sizes are not negative, but constants may be.
    if isinstance(a, int) and isinstance(b, int) and b:
        return int(a / b) if abs(a) < 2**50 else None
    quotient = D.floordiv(a, b)
    return quotient if D.mul(quotient, b) == a else None


def _modulo(a: Dim, b: Dim) -> Dim:
    # Like fmod, the sign of a remainder differs for negative numbers only.
    known = isinstance(a, int) and isinstance(b, int) and a >= 0 and b > 0
    return a % b if known else None  # type: ignore[operator]


def _equal(a: Dim, b: Dim) -> Dim:
    """Return 1 or 0; ``Equal(shape, -1)`` of torch's ``expand`` compares sizes with a number."""
    if isinstance(a, int) and isinstance(b, int):
        return int(a == b)
    number, size = (a, b) if isinstance(a, int) else (b, a)
    is_size = isinstance(size, str) and size.isidentifier()
    return 0 if is_size and isinstance(number, int) and number < 0 else None


def _reduce_prod_elements(node: ir.Node, a: Attributes) -> _Elements:
    data = elements_in(node, 0)
    return None if data is None else (D.product(data),)


def _range_elements(node: ir.Node, a: Attributes) -> _Elements:
    bounds = [S.symbolic_of(x) for x in node.inputs]
    scalars = D.static_sizes([None if b is None else b[0] for b in bounds])
    if scalars is None:
        return None
    values = range(*scalars)
    return tuple(values) if len(values) <= _MAX_ELEMENTS else None


def _constant_of_shape_elements(node: ir.Node, a: Attributes) -> _Elements:
    dims = S.dims_of(node.outputs[0])
    if dims is None or len(dims) != 1 or not isinstance(dims[0], int) or dims[0] > _MAX_ELEMENTS:
        return None
    tensor = a.get("value")
    return (0 if tensor is None else int(tensor.numpy().reshape(-1)[0]),) * dims[0]


def _where_elements(node: ir.Node, a: Attributes) -> _Elements:
    condition = S.constant_of(input_of(node, 0))
    left, right = elements_in(node, 1), elements_in(node, 2)
    if left is None or right is None:
        return None
    known = D.static_sizes(elements_in(node, 0)) if condition is None else condition.reshape(-1)
    if known is None:
        return left if left == right else None
    flags: Sequence[bool] = [bool(c) for c in known]
    n = max(len(flags), len(left), len(right))
    if any(len(v) not in (1, n) for v in (flags, left, right)):
        return None
    flags = flags if len(flags) == n else flags * n
    pairs = zip(flags, _broadcast_elements(n, left), _broadcast_elements(n, right), strict=True)
    return tuple(p if flag else q for flag, p, q in pairs)


ELEMENT_FORMULAS: dict[str, Formula] = {
    "Add": _arithmetic_elements(D.add),
    "Concat": _concat_elements,
    "Constant": _constant_elements,
    "ConstantOfShape": _constant_of_shape_elements,
    "Div": _arithmetic_elements(_truncated_div),
    "Equal": _arithmetic_elements(_equal),
    "Gather": _gather_elements,
    "Mod": _arithmetic_elements(_modulo),
    "Mul": _arithmetic_elements(D.mul),
    "Range": _range_elements,
    "ReduceProd": _reduce_prod_elements,
    "Shape": _shape_elements,
    "Size": _size_elements,
    "Slice": _slice_elements,
    "Split": _split_elements,
    "Sub": _arithmetic_elements(D.sub),
    "Where": _where_elements,
    **dict.fromkeys(
        ("Cast", "CastLike", "Identity", "Reshape", "Squeeze", "Unsqueeze"), _same_elements
    ),
}


def _conv(node: ir.Node, a: Attributes) -> Sequence[Dim] | None:
    dims, w = dims_in(node), dims_in(node, 1)
    kernel = a.get("kernel_shape") or (None if w is None else w[2:])
    if dims is None or kernel is None:
        return None
    return [dims[0], None if w is None else w[0], *_window_counts(dims[2:], kernel, a)]


def _pool(node: ir.Node, a: Attributes) -> Sequence[Dim] | None:
    dims, kernel = dims_in(node), a.get("kernel_shape")
    if dims is None or kernel is None:
        return None
    out = [*dims[:2], *_window_counts(dims[2:], kernel, a)]
    if a.get("ceil_mode") and len(node.outputs) > 1:
        S.set_dims(node.outputs[1], out)
    return out


def _window_counts(sizes: Sequence[Dim], kernel: Sequence[Dim], a: Attributes) -> list[Dim]:
    """Return the number of windows along each axis."""
    n = len(sizes)
    strides, dilations = a.get("strides") or [1] * n, a.get("dilations") or [1] * n
    pads, auto = a.get("pads") or [0] * 2 * n, a.get("auto_pad") or "NOTSET"
    out: list[Dim] = []
    for i, (size, stride) in enumerate(zip(sizes, strides, strict=True)):
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
            # Runtimes drop a last window that starts in the padding after the input.
            out.append(count - 1 if (count - 1) * stride >= size + before else count)
        else:
            out.append(None)
    return out


def _conv_transpose(node: ir.Node, a: Attributes) -> Sequence[Dim] | None:
    dims, w = dims_in(node), dims_in(node, 1)
    if dims is None or w is None or a.get("output_shape"):
        return None
    if (a.get("auto_pad") or "NOTSET") != "NOTSET":
        return None
    n = len(dims) - 2
    kernel = a.get("kernel_shape") or w[2:]
    strides, dilations = a.get("strides") or [1] * n, a.get("dilations") or [1] * n
    pads, extra = a.get("pads") or [0] * 2 * n, a.get("output_padding") or [0] * n
    out: list[Dim] = [dims[0], D.mul(w[1], a["group"])]
    for i in range(n):
        size = D.mul(strides[i], D.sub(dims[2 + i], 1))
        size = D.add(D.add(size, extra[i]), D.add(D.mul(D.sub(kernel[i], 1), dilations[i]), 1))
        out.append(D.sub(size, pads[i] + pads[i + n]))
    return out


def _resize(node: ir.Node, a: Attributes) -> Sequence[Dim] | None:
    dims = dims_in(node)
    if dims is None or (a.get("keep_aspect_ratio_policy") or "stretch") != "stretch":
        return None
    axes = [i % len(dims) for i in (a.get("axes") or range(len(dims)))]
    out = list(dims)
    sizes = elements_in(node, 3) if node.op_type == "Resize" else None
    if sizes is not None:
        for axis, size in zip(axes, sizes, strict=True):
            out[axis] = size
        return out
    scales = S.constant_of(input_of(node, 1 if node.op_type == "Upsample" else 2))
    if scales is None or len(scales) != len(axes):
        return None
    for axis, scale in zip(axes, scales, strict=True):
        out[axis] = _scaled_size(dims[axis], scale)
    return out


def _scaled_size(size: Dim, scale: float) -> Dim:
    if float(scale).is_integer():
        return D.mul(size, int(scale))
    # Runtimes multiply in float32.
    return int(np.floor(size * np.float32(scale))) if isinstance(size, int) else None


def _stft(node: ir.Node, a: Attributes) -> Sequence[Dim] | None:
    """Return the shape that runtimes compute; onnx's inference is wrong (see `refine`)."""
    dims, window = dims_in(node), dims_in(node, 2)
    step, length = elements_in(node, 1), elements_in(node, 3)
    size = length[0] if length else window[0] if window else None
    if dims is None:
        return None
    frames = D.add(D.floordiv(D.sub(dims[1], size), step[0] if step else None), 1)
    bins = D.add(D.floordiv(size, 2), 1) if a.get("onesided", 1) else size
    return [dims[0], frames, bins, 2]


WINDOW_FORMULAS: dict[str, Formula] = {
    "STFT": _stft,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    **dict.fromkeys(("AveragePool", "LpPool", "MaxPool"), _pool),
    **dict.fromkeys(("Resize", "Upsample"), _resize),
}


_ALL_SHAPE_FORMULAS: dict[str, Formula] = {**SHAPE_FORMULAS, **WINDOW_FORMULAS}


def refine(node: ir.Node, opset: int) -> None:
    """Improve the shapes and record the symbolic elements of a node's outputs."""
    if not is_standard(node) or not node.outputs:
        return
    formula = _ALL_SHAPE_FORMULAS.get(node.op_type)
    element_formula = ELEMENT_FORMULAS.get(node.op_type)
    if formula is None and element_formula is None:
        return
    attributes = S.attributes_of(node, opset)
    out = node.outputs[0]
    # onnx's inference is wrong in two cases. With ceil_mode it counts windows that start after the
    # input. For STFT without frame_length it returns the two-sided spectrum. No runtime does so.
    override = bool(attributes.get("ceil_mode")) or node.op_type == "STFT"
    if formula is not None and (override or any(not S.is_static(o) for o in node.outputs)):
        dims = formula(node, attributes)
        if dims is not None:
            known = S.dims_of(out)
            if known is not None and len(known) == len(dims) and not override:
                dims = [
                    k if isinstance(k, int) or d is None else d
                    for k, d in zip(known, dims, strict=True)
                ]
            S.set_dims(out, dims)
    if element_formula is not None and out.dtype in _ELEMENT_DTYPES:
        S.set_symbolic(out, element_formula(node, attributes))
