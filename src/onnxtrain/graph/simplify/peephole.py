"""Peephole rewrites: remove nodes without effect and merge a node with its producer.

:func:`rewrite` applies them to each node of a graph. Results stay the same bit for bit, with two
exceptions: a transposed matmul becomes the matmul of the transposed operands, for which kernels may
round differently, and a negative zero may keep its sign. No rewrite touches a random operator, a
parameter, or the name of an input or output of the model.

The last section, :func:`pads_to_concat`, merges the gradients of slices of one tensor. Each is a
slice padded with zeros to full size, and all of them are added. If the slices do not overlap, one
Concat computes the sum.
"""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.nodes import is_standard

VIEWS = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Flatten"})
_BROADCASTING = frozenset(
    {
        *("Add", "And", "Div", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max"),
        *("Mean", "Min", "Mul", "Or", "Pow", "Sub", "Sum", "Where", "Xor"),
    }
)
_IDENTITY_OPERANDS = {"Mul": 1.0, "Div": 1.0, "Add": 0.0, "Sub": 0.0}


def rewrite(graph: ir.Graph) -> int:
    """Apply the rewrites to the nodes of one graph; return the number of changes.

    Nodes that became unused stay in the graph for dead code elimination.
    """
    changes = 0
    for node in graph:
        if not is_standard(node) or not node.inputs or len(node.outputs) != 1:
            continue
        y = node.outputs[0]
        equivalent = None if y.is_graph_output() or not y.uses() else _equivalent_input(node)
        if equivalent is not None:
            y.replace_all_uses_with(equivalent)
            changes += 1
        else:
            changes += _fuse_with_producer(node)
    return changes


def _equivalent_input(node: ir.Node) -> ir.Value | None:
    """Return an earlier value that equals the node's output, if there is one."""
    x, y = node.inputs[0], node.outputs[0]
    if x is None:
        return None
    if node.op_type in VIEWS or node.op_type == "Expand":
        if S.same_shape(x, y):
            return x
        before = _producer(x, node)
        if before is not None and before.op_type in VIEWS and node.op_type in VIEWS:
            source = before.inputs[0]
            return source if source is not None and S.same_shape(source, y) else None
        return None
    if node.op_type == "Cast":
        return x if x.dtype is not None and x.dtype == y.dtype else _drop_cast_round_trip(node)
    if node.op_type == "Transpose":
        perm = _perm(node)
        before = _producer(x, node)
        if perm is not None and before is not None and before.op_type == "Transpose":
            first = _perm(before)
            if first is not None and [first[i] for i in perm] == sorted(perm):
                return before.inputs[0]
        return x if perm == sorted(perm or [-1]) else None
    if node.op_type in ("Pad", "Slice"):
        return x if S.same_shape(x, y) and _is_noop_pad_or_slice(node) else None
    if node.op_type in ("Concat", "Sum", "Max", "Min", "Mean"):
        return x if len(node.inputs) == 1 else None
    if node.op_type == "Neg":
        before = _producer(x, node)
        return before.inputs[0] if before is not None and before.op_type == "Neg" else None
    return _drop_identity_operand(node)


def _drop_cast_round_trip(cast: ir.Node) -> ir.Value | None:
    """Return ``x`` for ``Cast(Cast(x, wide), narrow)``: a round trip through float32 is exact."""
    before = _producer(cast.inputs[0], cast)
    x = before.inputs[0] if before is not None and before.op_type == "Cast" else None
    if x is None or before is None or x.dtype != cast.outputs[0].dtype:
        return None
    wide = before.outputs[0].dtype
    narrow = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
    return x if x.dtype in narrow and wide in (ir.DataType.FLOAT, ir.DataType.DOUBLE) else None


def _is_noop_pad_or_slice(node: ir.Node) -> bool:
    """Return whether a Pad or Slice that keeps the shape changes nothing.

    A Pad must add nothing (amounts may cancel), a Slice must not reverse an axis.
    """
    parameter = node.inputs[1] if node.op_type == "Pad" else (*node.inputs, *[None] * 4)[4]
    if node.op_type == "Slice" and parameter is None:
        return True
    array = S.constant_of(parameter)
    if array is None:
        return False
    return bool((array == 0).all() if node.op_type == "Pad" else (array > 0).all())


def _drop_identity_operand(node: ir.Node) -> ir.Value | None:
    """Return ``x`` for ``x * 1``, ``x / 1``, ``x + 0``, ``x - 0`` with a generated constant.

    A constant of the user's file stays, because it may be a parameter.
    """
    neutral = _IDENTITY_OPERANDS.get(node.op_type)
    if neutral is None or node.outputs[0].dtype not in S.FLOATS:
        return None
    for i in (1, 0) if node.op_type in ("Mul", "Add") else (1,):
        constant, x = node.inputs[i], node.inputs[1 - i]
        if constant is None or x is None or not S.is_generated_constant(constant):
            continue
        array = S.constant_of(constant)
        if array is not None and array.size == 1 and array.item() == neutral:
            return x if S.same_shape(x, node.outputs[0]) else None
    return None


def _fuse_with_producer(node: ir.Node) -> int:
    """Merge a node with the producer of one of its inputs; return 1 if something changed."""
    if node.op_type == "Transpose":
        return (
            _merge_transposes(node)
            or _transpose_gemm(node)
            or _transpose_batched_matmul(node)
            or _transpose_before_cast(node)
        )
    if node.op_type == "Reshape":
        return _merge_reshapes(node) or _unfold_transpose(node)
    if node.op_type in _BROADCASTING:
        return (
            _drop_expands(node)
            or _drop_leading_axes(node)
            or _merge_negations(node)
            or pads_to_concat(node)
        )
    if node.op_type in ("Conv", "ConvTranspose"):
        return _drop_zero_bias(node)
    return _merge_gemm_transposes(node) if node.op_type == "Gemm" else 0


def _drop_zero_bias(node: ir.Node) -> int:
    """Drop a bias that is an expanded zero, which exporters write for convolutions without bias."""
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    before = _producer(bias, node)
    if before is not None and before.op_type == "Cast":
        before = _producer(before.inputs[0], node)
    if before is None or before.op_type != "Expand":
        return 0
    zero = S.constant_of(before.inputs[0])
    if zero is None or zero.size != 1 or zero.item() != 0:
        return 0
    node.resize_inputs(2)
    return 1


def _merge_transposes(node: ir.Node) -> int:
    """Replace ``Transpose(Transpose(x))`` by one Transpose."""
    before, perm = _producer(node.inputs[0], node), _perm(node)
    first = None if before is None or before.op_type != "Transpose" else _perm(before)
    if before is None or first is None or perm is None:
        return 0
    node.replace_input_with(0, before.inputs[0])
    node.attributes["perm"] = ir.AttrInt64s("perm", [first[i] for i in perm])
    return 1


def _transpose_gemm(node: ir.Node) -> int:
    """Replace ``Transpose(Gemm(A, B))`` by ``Gemm(B^T, A^T)``, as ``(A B)^T = B^T A^T``.

    The weight gradient of ``x W^T`` then has the layout of ``W``.
    """
    before = _exclusive_producer(node.inputs[0], node, "Gemm")
    if before is None or _perm(node) != [1, 0]:
        return 0
    if len(before.inputs) > 2 and before.inputs[2] is not None:
        return 0
    a, b = before.inputs[:2]
    flags = [before.attributes.get(f) for f in ("transA", "transB")]
    first, second = (0 if f is None else f.as_int() for f in flags)
    alpha = before.attributes.get("alpha")
    node.op_type = "Gemm"
    node.resize_inputs(2)
    node.replace_input_with(0, b)
    node.replace_input_with(1, a)
    node.attributes.clear()
    node.attributes["transA"] = ir.AttrInt64("transA", 1 - second)
    node.attributes["transB"] = ir.AttrInt64("transB", 1 - first)
    if alpha is not None:
        node.attributes["alpha"] = alpha
    return 1


def _transpose_before_cast(node: ir.Node) -> int:
    """Replace ``Transpose(Cast(Gemm))`` by ``Cast(Transpose(Gemm))``.

    :func:`_transpose_gemm` then merges the Transpose into the Gemm.
    """
    cast, y = _exclusive_producer(node.inputs[0], node, "Cast"), node.outputs[0]
    if cast is None or _perm(node) != [1, 0]:
        return 0
    gemm = _exclusive_producer(cast.inputs[0], cast, "Gemm")
    if gemm is None:
        return 0
    middle, to = cast.outputs[0], cast.attributes["to"]
    cast.op_type, node.op_type = "Transpose", "Cast"
    cast.attributes.clear()
    cast.attributes["perm"] = ir.AttrInt64s("perm", [1, 0])
    node.attributes.clear()
    node.attributes["to"] = to
    middle.type, middle.shape = gemm.outputs[0].type, y.shape
    return 1


def _transpose_batched_matmul(node: ir.Node) -> int:
    """Replace ``Transpose(MatMul(A^T, B))`` by ``MatMul(B^T, A)`` in the last two axes.

    This saves the Transpose of the result; the number of transposed operands stays the same.
    """
    before, perm = _producer(node.inputs[0], node), _perm(node)
    if before is None or before.op_type != "MatMul" or perm is None or len(perm) < 3:
        return 0
    product, swap = before.outputs[0], [*range(len(perm) - 2), len(perm) - 1, len(perm) - 2]
    left = _producer(before.inputs[0], before)
    if perm != swap or left is None or left.op_type != "Transpose" or _perm(left) != swap:
        return 0
    a, b = left.inputs[0], before.inputs[1]
    if len(product.uses()) > 1 or product.is_graph_output() or len(left.outputs[0].uses()) > 1:
        return 0
    dims = None if b is None else S.dims_of(b)
    if dims is None or len(dims) != len(perm):
        return 0
    before.op_type, node.op_type = "Transpose", "MatMul"
    before.resize_inputs(1)
    before.replace_input_with(0, b)
    before.attributes["perm"] = ir.AttrInt64s("perm", swap)
    S.set_dims(product, [dims[i] for i in swap])
    node.resize_inputs(2)
    node.replace_input_with(1, a)
    node.attributes.clear()
    return 1


def _merge_reshapes(node: ir.Node) -> int:
    """Let a Reshape read past another view."""
    before, shape = _producer(node.inputs[0], node), S.symbolic_of(node.inputs[1])
    if before is None or before.op_type not in VIEWS or shape is None:
        return 0
    if any(not isinstance(s, int) or s == 0 for s in shape):
        return 0  # a zero copies a size of the view in between
    node.replace_input_with(0, before.inputs[0])
    return 1


def _unfold_transpose(node: ir.Node) -> int:
    """Swap the last two axes directly, without merging the leading axes and splitting them again.

    before:  Reshape(Transpose(Reshape(x, [-1, m, n]), perm=[0, 2, 1]), [..., n, m])
    after:   Transpose(x, perm=[..., -1, -2])
    """
    swap = _producer(node.inputs[0], node)
    fold = None if swap is None or swap.op_type != "Transpose" else _producer(swap.inputs[0], swap)
    if swap is None or fold is None or fold.op_type != "Reshape" or _perm(swap) != [0, 2, 1]:
        return 0
    x, folded = fold.inputs[0], S.dims_of(fold.outputs[0])
    dims = None if x is None else S.dims_of(x)
    swapped = S.dims_of(node.outputs[0])
    if dims is None or folded is None or swapped is None or len(dims) < 4:
        return 0
    if None in dims or list(folded[1:]) != list(dims[-2:]):
        return 0
    if list(swapped) != [*dims[:-2], dims[-1], dims[-2]]:
        return 0
    rank = len(dims)
    node.op_type = "Transpose"
    node.resize_inputs(1)
    node.replace_input_with(0, x)
    node.attributes.clear()
    perm = [*range(rank - 2), rank - 1, rank - 2]
    node.attributes["perm"] = ir.AttrInt64s("perm", perm)
    return 1


def _drop_expands(node: ir.Node) -> int:
    """Read past Expand where the node broadcasts itself: another input has the output's shape."""
    y, changed = node.outputs[0], 0
    for i, x in enumerate(node.inputs):
        before = _producer(x, node)
        if before is None or before.op_type != "Expand":
            continue
        others = [z for j, z in enumerate(node.inputs) if j != i and z is not None]
        if any(S.same_shape(z, y) for z in others):
            node.replace_input_with(i, before.inputs[0])
            changed = 1
    return changed


def _drop_leading_axes(node: ir.Node) -> int:
    """Read past Unsqueeze of leading axes, which broadcasting adds if another input has them."""
    changed = 0
    for i, x in enumerate(node.inputs):
        before = _producer(x, node)
        if x is None or before is None or before.op_type != "Unsqueeze" or x.shape is None:
            continue
        axes = S.constant_of(before.inputs[1])
        others = [z.shape for j, z in enumerate(node.inputs) if j != i and z is not None]
        ranks = [len(shape) for shape in others if shape is not None]
        if axes is None or max(ranks, default=0) < len(x.shape):
            continue
        if sorted(int(a) % len(x.shape) for a in axes) == list(range(axes.size)):
            node.replace_input_with(i, before.inputs[0])
            changed = 1
    return changed


def _merge_negations(node: ir.Node) -> int:
    """Replace ``a + (-b)`` by ``a - b`` and ``a - (-b)`` by ``a + b``, also for ``(-b) * c``."""
    if node.op_type not in ("Add", "Sub") or node.outputs[0].dtype not in S.FLOATS:
        return 0
    for i in (1, 0) if node.op_type == "Add" else (1,):
        before = _exclusive_producer(node.inputs[i], node, "Neg", "Mul")
        if before is None:
            continue
        a, b = node.inputs[1 - i], node.inputs[i]
        if before.op_type == "Neg":
            b = before.inputs[0]
        elif not _drop_negation(before):
            continue
        node.replace_input_with(0, a)
        node.replace_input_with(1, b)
        node.op_type = "Sub" if node.op_type == "Add" else "Add"
        return 1
    return 0


def _drop_negation(product: ir.Node) -> bool:
    """Remove the Neg of one factor of a Mul; return whether there was one."""
    for i, x in enumerate(product.inputs):
        negation = _exclusive_producer(x, product, "Neg")
        if negation is not None:
            product.replace_input_with(i, negation.inputs[0])
            return True
    return False


def _merge_gemm_transposes(node: ir.Node) -> int:
    """Replace transposed operands of a Gemm by its transA and transB attributes."""
    changed = 0
    for i, flag in enumerate(("transA", "transB")):
        before = _producer(node.inputs[i], node)
        if before is None or before.op_type != "Transpose" or _perm(before) != [1, 0]:
            continue
        attribute = node.attributes.get(flag)
        transposed = 0 if attribute is None else attribute.as_int()
        node.replace_input_with(i, before.inputs[0])
        node.attributes[flag] = ir.AttrInt64(flag, 1 - transposed)
        changed = 1
    return changed


@dataclasses.dataclass(frozen=True)
class _Padded:
    """A tensor padded with zeros along one axis."""

    x: ir.Value
    axis: int
    before: int
    size: int
    after: int


def pads_to_concat(node: ir.Node) -> int:
    """Replace a sum of padded tensors that tile the result by their Concat; return 1 if it applies.

    before:  Add(Pad(a, [0, n]), Pad(b, [m, 0]))
    after:   Concat(a, b)
    """
    if node.op_type != "Add" or node.outputs[0].dtype not in S.FLOATS:
        return 0
    parts = _padded_terms(node, node)
    if parts is None:
        return _add_before_reshape(node)
    parts.sort(key=lambda p: p.before)
    end = 0
    for part in parts:
        if part.axis != parts[0].axis or part.before != end:
            return 0
        end += part.size
    if parts[-1].after:
        return 0
    node.op_type = "Concat"
    node.attributes["axis"] = ir.AttrInt64("axis", parts[0].axis)
    node.resize_inputs(len(parts))
    for i, part in enumerate(parts):
        node.replace_input_with(i, part.x)
    return 1


def _add_before_reshape(node: ir.Node) -> int:
    """Move an Add of reshaped Pads or Concats before the Reshape; return 1 if it applies.

    before:  Add(Reshape(Pad(a)), Reshape(Pad(b)))
    after:   Reshape(Add(Pad(a), Pad(b)))
    """
    first, second = (_exclusive_producer(x, node, "Reshape") for x in node.inputs)
    if first is None or second is None or first is second:
        return 0
    a, b, sizes = first.inputs[0], second.inputs[0], second.inputs[1]
    if (
        _exclusive_producer(a, first, "Pad", "Concat") is None
        or _exclusive_producer(b, second, "Pad", "Concat") is None
    ):
        return 0
    assert a is not None
    assert b is not None
    if not S.same_shape(a, b) or not S.same_shape(first.outputs[0], second.outputs[0]):
        return 0
    graph = node.graph
    assert graph is not None
    # The second Reshape becomes the Add, and the Add becomes the Reshape.
    graph.remove(second)
    node.op_type, second.op_type = "Reshape", "Add"
    node.attributes.update(second.attributes)
    second.attributes.clear()
    second.replace_input_with(0, a)
    second.replace_input_with(1, b)
    graph.insert_before(node, second)
    node.replace_input_with(0, second.outputs[0])
    node.replace_input_with(1, sizes)
    S.set_dims(second.outputs[0], S.dims_of(a))
    return 1


def _padded_terms(node: ir.Node, root: ir.Node) -> list[_Padded] | None:
    """Return the terms of a tree of Adds if all of them are padded tensors, else ``None``."""
    parts: list[_Padded] = []
    for x in node.inputs:
        before = _exclusive_producer(x, root)
        if x is None or before is None:
            return None
        if before.op_type == "Add":
            nested = _padded_terms(before, root)
            if nested is None:
                return None
            parts += nested
        else:
            part = _padded(x, before, root.outputs[0])
            if part is None:
                return None
            parts.append(part)
    return parts


def _padded(x: ir.Value, pad: ir.Node, whole: ir.Value) -> _Padded | None:
    """Return the input of a Pad with zeros along one axis to the shape of ``whole``."""
    mode = pad.attributes.get("mode")
    if pad.op_type != "Pad" or (mode is not None and mode.as_string() != "constant"):
        return None
    data, amounts, value, axes = (*pad.inputs, None, None)[:4]
    if axes is not None or data is None:
        return None
    if value is not None:
        fill = S.constant_of(value)
        if fill is None or fill.any():
            return None
    pads, dims = S.constant_of(amounts), S.dims_of(data)
    if pads is None or dims is None or len(pads) != 2 * len(dims) or (pads < 0).any():
        return None
    padded = [i for i in range(len(dims)) if pads[i] or pads[i + len(dims)]]
    if len(padded) != 1 or not S.same_shape(x, whole):
        return None
    axis = padded[0]
    size = dims[axis]
    if not isinstance(size, int):
        return None
    return _Padded(data, axis, int(pads[axis]), size, int(pads[axis + len(dims)]))


def _perm(node: ir.Node) -> list[int] | None:
    attribute, x = node.attributes.get("perm"), node.inputs[0]
    if attribute is not None:
        return list(attribute.as_ints())
    dims = None if x is None else S.dims_of(x)
    return None if dims is None else list(range(len(dims)))[::-1]


def _producer(x: ir.Value | None, node: ir.Node) -> ir.Node | None:
    """Return the producer of ``x`` if it is a standard operator in the graph of ``node``."""
    before = None if x is None else x.producer()
    if before is None or before.graph is not node.graph or not is_standard(before):
        return None
    return before if before.inputs and before.inputs[0] is not None else None


def _exclusive_producer(x: ir.Value | None, node: ir.Node, *op_types: str) -> ir.Node | None:
    """Return the producer of a value with one use, if it is one of ``op_types`` (default: any)."""
    before = _producer(x, node)
    if x is None or before is None or len(x.uses()) > 1 or x.is_graph_output():
        return None
    return before if not op_types or before.op_type in op_types else None
