"""Local rewrites of finished graphs: what has no effect goes, neighbours are joined.

Each rewrite looks at one node and its inputs and gives the same numbers bit for bit, except that a
transposed product becomes the product in the other order, where kernels may round differently, and
that a negative zero may keep its sign. None touches a random operator, a parameter, or the name of
an input or output of the model.

Sums of pieces that lie side by side become one tensor put together from them.

The gradients of slices of one tensor are slices of its gradient, each padded with zeros to the
whole and added to the others. Where the pieces do not overlap, a Concat does the same in one pass.
"""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.nodes import is_standard


@dataclasses.dataclass(frozen=True)
class _Piece:
    """A tensor padded with zeros along one axis."""

    x: ir.Value
    axis: int
    before: int
    size: int
    after: int


def pads_to_concat(node: ir.Node) -> int:
    """Turn a sum of padded pieces that fill the whole into their Concat; give 1 if it did."""
    if node.op_type != "Add" or node.outputs[0].dtype not in S.FLOATS:
        return 0
    pieces = _pieces(node, node)
    if pieces is None:
        return _sum_before_view(node)
    pieces.sort(key=lambda p: p.before)
    end = 0
    for piece in pieces:
        if piece.axis != pieces[0].axis or piece.before != end:
            return 0
        end += piece.size
    if pieces[-1].after:
        return 0
    node.op_type = "Concat"
    node.attributes["axis"] = ir.AttrInt64("axis", pieces[0].axis)
    node.resize_inputs(len(pieces))
    for i, piece in enumerate(pieces):
        node.replace_input_with(i, piece.x)
    return 1


def _sum_before_view(node: ir.Node) -> int:
    """Add padded pieces of one shape before they are joined to another shape, not behind."""
    first, second = (_exclusive_producer_of(x, node, "Reshape") for x in node.inputs)
    if first is None or second is None or first is second:
        return 0
    a, b, sizes = first.inputs[0], second.inputs[0], second.inputs[1]
    if (
        _exclusive_producer_of(a, first, "Pad", "Concat") is None
        or _exclusive_producer_of(b, second, "Pad", "Concat") is None
    ):
        return 0
    assert a is not None
    assert b is not None
    if not S.same_shape(a, b) or not S.same_shape(first.outputs[0], second.outputs[0]):
        return 0
    graph = node.graph
    assert graph is not None
    graph.remove(second)  # it becomes the sum, and the sum becomes the view
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


def _exclusive_producer_of(x: ir.Value | None, node: ir.Node, *kinds: str) -> ir.Node | None:
    """Return what makes a value that only one node reads, if it is of some kind."""
    before = None if x is None else x.producer()
    if x is None or before is None or before.graph is not node.graph or not is_standard(before):
        return None
    return before if before.op_type in kinds and _is_private(x) else None


def _is_private(x: ir.Value) -> bool:
    return len(x.uses()) == 1 and not x.is_graph_output()


def _pieces(node: ir.Node, last: ir.Node) -> list[_Piece] | None:
    """Return the pieces that a tree of sums adds up, if all its terms are some."""
    pieces: list[_Piece] = []
    for x in node.inputs:
        before = None if x is None else x.producer()
        if x is None or before is None or before.graph is not last.graph:
            return None
        if len(x.uses()) != 1 or x.is_graph_output() or not is_standard(before):
            return None
        if before.op_type == "Add":
            more = _pieces(before, last)
            if more is None:
                return None
            pieces += more
        else:
            piece = _piece(x, before, last.outputs[0])
            if piece is None:
                return None
            pieces.append(piece)
    return pieces


def _piece(x: ir.Value, pad: ir.Node, whole: ir.Value) -> _Piece | None:
    """Return what a Pad of zeros along one axis makes."""
    mode = pad.attributes.get("mode")
    if pad.op_type != "Pad" or (mode is not None and mode.as_string() != "constant"):
        return None
    data, amounts, value, axes = (*pad.inputs, None, None)[:4]
    if axes is not None or data is None:
        return None
    if value is not None:
        number = S.constant_of(value)
        if number is None or number.any():
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
    return _Piece(data, axis, int(pads[axis]), size, int(pads[axis + len(dims)]))


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

    Nodes that nothing reads any more stay; they are dead, and removed as such.
    """
    changes = 0
    for node in graph:
        if not is_standard(node) or not node.inputs or len(node.outputs) != 1:
            continue
        y = node.outputs[0]
        stands = None if y.is_graph_output() or not y.uses() else _equivalent_input(node)
        if stands is not None:
            y.replace_all_uses_with(stands)
            changes += 1
        else:
            changes += _fuse_with_producer(node)
    return changes


def _equivalent_input(node: ir.Node) -> ir.Value | None:
    """Return the value that equals the node's output, if there is one."""
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
    """Return what was cast to a wider type and is cast back: that changes no number."""
    before = _producer(cast.inputs[0], cast)
    x = before.inputs[0] if before is not None and before.op_type == "Cast" else None
    if x is None or before is None or x.dtype != cast.outputs[0].dtype:
        return None
    wide = before.outputs[0].dtype
    narrow = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
    return x if x.dtype in narrow and wide in (ir.DataType.FLOAT, ir.DataType.DOUBLE) else None


def _is_noop_pad_or_slice(node: ir.Node) -> bool:
    """Return whether a Pad adds nothing, or a Slice of all there is does not turn an axis round."""
    numbers = node.inputs[1] if node.op_type == "Pad" else (*node.inputs, *[None] * 4)[4]
    if node.op_type == "Slice" and numbers is None:
        return True
    array = S.constant_of(numbers)
    if array is None:
        return False
    return bool((array == 0).all() if node.op_type == "Pad" else (array > 0).all())


def _drop_identity_operand(node: ir.Node) -> ir.Value | None:
    """Return ``x`` for ``x * 1``, ``x / 1``, ``x + 0``, ``x - 0`` with constants of ours."""
    number = _IDENTITY_OPERANDS.get(node.op_type)
    if number is None or node.outputs[0].dtype not in S.FLOATS:
        return None
    for i in (1, 0) if node.op_type in ("Mul", "Add") else (1,):
        one, x = node.inputs[i], node.inputs[1 - i]
        if one is None or x is None or not S.is_generated_constant(one):
            continue
        array = S.constant_of(one)
        if array is not None and array.size == 1 and array.item() == number:
            return x if S.same_shape(x, node.outputs[0]) else None
    return None


def _fuse_with_producer(node: ir.Node) -> int:
    """Read past an input's producer where the node can do its work; give 1 if something changed."""
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
        dropped = _drop_expands(node) or _drop_leading_axes(node)
        return dropped or _merge_negations(node) or pads_to_concat(node)
    if node.op_type in ("Conv", "ConvTranspose"):
        return _drop_zero_bias(node)
    return _merge_gemm_transposes(node) if node.op_type == "Gemm" else 0


def _drop_zero_bias(node: ir.Node) -> int:
    """Exporters expand a zero to the bias of a convolution that has none; kernels would add it."""
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
    before, perm = _producer(node.inputs[0], node), _perm(node)
    first = None if before is None or before.op_type != "Transpose" else _perm(before)
    if before is None or first is None or perm is None:
        return 0
    node.replace_input_with(0, before.inputs[0])
    node.attributes["perm"] = ir.AttrInt64s("perm", [first[i] for i in perm])
    return 1


def _transpose_gemm(node: ir.Node) -> int:
    """``(A B)^T = B^T A^T``: the weight gradient of ``x W^T`` comes out as ``W`` lies."""
    before = _producer(node.inputs[0], node)
    if before is None or before.op_type != "Gemm" or _perm(node) != [1, 0]:
        return 0
    product = before.outputs[0]
    if len(product.uses()) > 1 or product.is_graph_output():
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
    """Turn a product and cast it then: what is turned can be made the other way round."""
    cast, y = _exclusive_producer(node.inputs[0], node), node.outputs[0]
    if cast is None or cast.op_type != "Cast" or _perm(node) != [1, 0]:
        return 0
    product = _exclusive_producer(cast.inputs[0], cast)
    if product is None or product.op_type != "Gemm":
        return 0
    middle, kind = cast.outputs[0], cast.attributes["to"]
    cast.op_type, node.op_type = "Transpose", "Cast"
    cast.attributes.clear()
    cast.attributes["perm"] = ir.AttrInt64s("perm", [1, 0])
    node.attributes.clear()
    node.attributes["to"] = kind
    middle.type, middle.shape = product.outputs[0].type, y.shape
    return 1


def _transpose_batched_matmul(node: ir.Node) -> int:
    """``(A^T B)^T = B^T A`` in the last two axes: as many transposes in front, and none behind."""
    before, perm = _producer(node.inputs[0], node), _perm(node)
    if before is None or before.op_type != "MatMul" or perm is None or len(perm) < 3:
        return 0
    product, swap = before.outputs[0], [*range(len(perm) - 2), len(perm) - 1, len(perm) - 2]
    turned = _producer(before.inputs[0], before)
    if perm != swap or turned is None or turned.op_type != "Transpose" or _perm(turned) != swap:
        return 0
    a, b = turned.inputs[0], before.inputs[1]
    if len(product.uses()) > 1 or product.is_graph_output() or len(turned.outputs[0].uses()) > 1:
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
    before, shape = _producer(node.inputs[0], node), S.symbolic_of(node.inputs[1])
    if before is None or before.op_type not in VIEWS or shape is None:
        return 0
    if any(not isinstance(s, int) or s == 0 for s in shape):
        return 0  # a zero stands for the size that the middle one has
    node.replace_input_with(0, before.inputs[0])
    return 1


def _unfold_transpose(node: ir.Node) -> int:
    """Swap the last two axes as they are, if leading axes are joined for that and split again."""
    swap = _producer(node.inputs[0], node)
    fold = None if swap is None or swap.op_type != "Transpose" else _producer(swap.inputs[0], swap)
    if swap is None or fold is None or fold.op_type != "Reshape" or _perm(swap) != [0, 2, 1]:
        return 0
    x, middle = fold.inputs[0], S.dims_of(fold.outputs[0])
    before = None if x is None else S.dims_of(x)
    after = S.dims_of(node.outputs[0])
    if before is None or middle is None or after is None or len(before) < 4:
        return 0
    if None in before or list(middle[1:]) != list(before[-2:]):
        return 0
    if list(after) != [*before[:-2], before[-1], before[-2]]:
        return 0
    rank = len(before)
    node.op_type = "Transpose"
    node.resize_inputs(1)
    node.replace_input_with(0, x)
    node.attributes.clear()
    perm = [*range(rank - 2), rank - 1, rank - 2]
    node.attributes["perm"] = ir.AttrInt64s("perm", perm)
    return 1


def _drop_expands(node: ir.Node) -> int:
    """Leave broadcasting to the node, if another input has the whole shape."""
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
    """Leave leading axes of size 1 to the node, if another input has as many axes."""
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
    """``a + (-b) = a - b``, ``a - (-b) = a + b``, and the same where ``-b`` is multiplied first."""
    if node.op_type not in ("Add", "Sub") or node.outputs[0].dtype not in S.FLOATS:
        return 0
    for i in (1, 0) if node.op_type == "Add" else (1,):
        maker = _exclusive_producer(node.inputs[i], node)
        if maker is None:
            continue
        a, b = node.inputs[1 - i], node.inputs[i]
        if maker.op_type == "Neg":
            b = maker.inputs[0]
        elif maker.op_type != "Mul" or not _drop_negation(maker):
            continue
        node.replace_input_with(0, a)
        node.replace_input_with(1, b)
        node.op_type = "Sub" if node.op_type == "Add" else "Add"
        return 1
    return 0


def _drop_negation(product: ir.Node) -> bool:
    """Let one factor be what it is the negative of; return whether there was such a factor."""
    for i, x in enumerate(product.inputs):
        maker = _exclusive_producer(x, product)
        if maker is not None and maker.op_type == "Neg":
            product.replace_input_with(i, maker.inputs[0])
            return True
    return False


def _exclusive_producer(x: ir.Value | None, node: ir.Node) -> ir.Node | None:
    """Return what makes a value that nobody else reads."""
    maker = _producer(x, node)
    if maker is None or len(maker.outputs[0].uses()) > 1 or maker.outputs[0].is_graph_output():
        return None
    return maker


def _merge_gemm_transposes(node: ir.Node) -> int:
    changed = 0
    for i, flag in enumerate(("transA", "transB")):
        before = _producer(node.inputs[i], node)
        if before is None or before.op_type != "Transpose" or _perm(before) != [1, 0]:
            continue
        given = node.attributes.get(flag)
        value = 0 if given is None else given.as_int()
        node.replace_input_with(i, before.inputs[0])
        node.attributes[flag] = ir.AttrInt64(flag, 1 - value)
        changed = 1
    return changed


def _perm(node: ir.Node) -> list[int] | None:
    given, x = node.attributes.get("perm"), node.inputs[0]
    if given is not None:
        return list(given.as_ints())
    dims = None if x is None else S.dims_of(x)
    return None if dims is None else list(range(len(dims)))[::-1]


def _producer(x: ir.Value | None, node: ir.Node) -> ir.Node | None:
    """Return the node that makes ``x``, if it is a standard one of the same graph."""
    before = None if x is None else x.producer()
    if before is None or before.graph is not node.graph or not is_standard(before):
        return None
    return before if before.inputs and before.inputs[0] is not None else None
