"""Output shapes of operators that move, cut, join or reduce."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.shapes import dims as D
from onnxtrain.graph.shapes.dims import Dim
from onnxtrain.graph.shapes.equation import expand_equation
from onnxtrain.graph.shapes.formulas import (
    Attributes,
    Formula,
    count_in,
    dims_in,
    elements_in,
    input_of,
    slice_end,
)

_Dims = Sequence[Dim] | None


def _reshape(node: ir.Node, a: Attributes) -> _Dims:
    dims, target = dims_in(node), elements_in(node, 1)
    if target is None:
        rank = count_in(node, 1)
        return None if rank is None else [None] * rank
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
    n = max(len(dims), len(target))
    left = [1] * (n - len(dims)) + list(dims)
    right = [1] * (n - len(target)) + list(target)
    return [D.broadcast(p, q) for p, q in zip(left, right, strict=True)]


def _constant_of_shape(node: ir.Node, a: Attributes) -> _Dims:
    return elements_in(node, 0)


def _tile(node: ir.Node, a: Attributes) -> _Dims:
    dims, repeats = dims_in(node), elements_in(node, 1)
    if dims is None or repeats is None or len(dims) != len(repeats):
        return None
    return [D.mul(d, r) for d, r in zip(dims, repeats, strict=True)]


def _concat(node: ir.Node, a: Attributes) -> _Dims:
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
    given = list(range(len(dims))) if input_of(node, 3) is None else D.numbers(elements_in(node, 3))
    if pads is None or given is None:
        return [None] * len(dims)  # the rank stays
    axes = [i % len(dims) for i in given]
    out = list(dims)
    for i, axis in enumerate(axes):
        out[axis] = D.add(D.add(dims[axis], pads[i]), pads[i + len(axes)])
    return out


def _slice(node: ir.Node, a: Attributes) -> _Dims:
    dims = dims_in(node)
    if dims is None:
        return None
    starts, ends = elements_in(node, 1), elements_in(node, 2)
    if input_of(node, 3) is None and starts is not None:
        axes = list(range(len(starts)))
    else:
        axes = D.numbers(elements_in(node, 3))
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
        # Sizes are at least as large as the offsets real graphs cut; a shorter axis would
        # give an empty slice, whose dimension is then not this one: only start 0 is certain.
        return size if start == 0 else None
    return None


def _split(node: ir.Node, a: Attributes) -> _Dims:
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


def _range(node: ir.Node, a: Attributes) -> _Dims:
    start, limit, delta = (S.symbolic_of(x) for x in node.inputs)
    if start is None or limit is None or delta is None:
        return [None]
    if delta[0] == 1 and start[0] == 0:
        return [limit[0]]  # a negative limit gives an empty range, but sizes are not negative
    return [None]


def _reduce(node: ir.Node, a: Attributes) -> _Dims:
    """The rank, where axes are only known at run time."""
    dims, axes = dims_in(node), input_of(node, 1)
    if dims is None or axes is None or S.symbolic_of(axes) is not None:
        return None
    many = count_in(node, 1)
    if many == 0:
        return dims if a["noop_with_empty_axes"] else [1] * len(dims) if a["keepdims"] else []
    if a["keepdims"]:
        return [None] * len(dims)
    return None if many is None else [None] * (len(dims) - many)


def _unsqueeze(node: ir.Node, a: Attributes) -> _Dims:
    """The rank, where axes are only known at run time."""
    dims = dims_in(node)
    many = None if elements_in(node, 1) is not None else count_in(node, 1)
    return None if dims is None or many is None else [None] * (len(dims) + many)


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
            met = D.broadcast(sizes.get(letter, 1), d)
            # The axes of a letter are equal by the standard; those of the ellipsis broadcast.
            sizes[letter] = sizes.get(letter) if met is None and letter not in eq.ellipsis else met
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

FORMULAS: dict[str, Formula] = {
    "Concat": _concat,
    "ConstantOfShape": _constant_of_shape,
    "DepthToSpace": _depth_to_space,
    "Einsum": _einsum,
    "Expand": _expand,
    "Flatten": _flatten,
    "Pad": _pad,
    "Range": _range,
    **dict.fromkeys(_REDUCTIONS, _reduce),
    "Reshape": _reshape,
    "Slice": _slice,
    "SpaceToDepth": _space_to_depth,
    "Split": _split,
    "Tile": _tile,
    "Unsqueeze": _unsqueeze,
}
