"""Scale and shift of a layer normalisation, moved into the linear layers that read it.

``(s xh + b) W + c = xh (s W) + (b W + c)``. With many more rows than columns ``s W`` costs little,
and so do the gradients of ``s`` and ``b``, which then come from the gradient of ``s W`` and need no
pass over the rows. The normalised ``xh`` is what the gradient of the normalisation wants, too.

Biases of wide linear layers as one more column of their weights.

onnxruntime's CPU kernel writes the bias into the result first, and then adds the product to it:
a pass over the result that costs 10 to 15 % of a product much wider than its input. ``x W + b`` is
``[x, 1] [W; b]``, where only the smaller input and the weight are copied.

Products with a transposed left operand, where transposing it first is quicker.

A weight's gradient is ``A^T B`` with the rows summed over. onnxruntime's CPU kernel reads a left
operand that is transposed up to 25 % slower than a plain one. Where one operand is much smaller
than the other it is transposed by itself: ``A^T`` in front of the product, or ``B^T`` and then the
result of ``B^T A``. onnxruntime would fuse a plain Transpose into the product again; one of three
axes it leaves alone.

Scales of rows, moved behind the matrix products that read the scaled matrix.

The gradient of a loss at the scores ``[rows, classes]`` is a matrix times one number for each row:
1 / count, or the weight of the label. Products commute with that: ``(e A) W = e (A W)`` and
``(e A)^T X = A^T (e X)``. With many classes ``A W`` and ``X`` are much smaller than ``A``, and a
pass over ``A`` is saved; a sum over the rows becomes the product ``e^T A``.

Products in bfloat16 read ``A`` rounded. It may be rounded before it is scaled, since that type has
the range of float32; the scales themselves are not rounded.

A bias added behind its product, not inside it: ``Gemm(a, b, c) = Gemm(a, b) + c``.

CUDA's product with a bias first spreads the bias over the whole result, by a kernel that takes as
long as half the product, and then reads it back. The addition alone is one quick pass. onnxruntime
joins a MatMul and the Add behind it to such a product by itself, unless a view lies between them.

A sum with a product of matrices inside the product.

``c + a b`` is one Gemm that starts from ``c``: a residual that is added behind a layer, or the
gradients of two layers that read one value. Nothing is written and read again in between.

A mean of rows and the number that is added to it as one product with a column.

With ``e`` a column of ``1 / n``: ``mean(q) + c = q e + c`` is one Gemm. That is the mean square of
a normalisation with its epsilon.

The runtime would pack a column that it knows for products with many columns, and multiply zeros.
So the column is spread to a size that only a run tells: 1, as the zeroth power of another.

The gradient of a normalisation by root mean squares, with the products that its weight's takes.

With ``n`` the normalised rows and ``g`` the gradient behind the weight ``w``, that of ``w`` sums
the products ``g n`` over the rows. The mean that the gradient of the input needs is one of the same
numbers: ``mean(g w n) = (g n) (w / m)`` for rows of ``m``. So one product with a column stands for
a pass over the matrix and a mean, and

    ``r + g w / s - n mean(g w n / s) = r + (g w - n c) / s``  with  ``c = (g n) (w / m)``.

Columns of all weights are made at once, in four nodes.
"""

from __future__ import annotations

import collections
import dataclasses
import math

import numpy as np
import onnx_ir as ir

from onnxtrain import thresholds as T
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder, replace_value
from onnxtrain.graph.nodes import is_op, nodes
from onnxtrain.graph.shapes import dims as D
from onnxtrain.importer import mark_constants


@dataclasses.dataclass(frozen=True)
class _Linear:
    """A product with a matrix ``[in, out]`` and the sum with a vector that follows."""

    product: ir.Node
    add: ir.Node
    bias: ir.Value
    width: int


def fold_norm_scale(model: ir.Model, op: OpBuilder) -> int:
    """Absorb where the normalised values feed linear layers only; return how often."""
    graph, known, folded = model.graph, set(model.graph.initializers), 0
    for node in nodes(graph, "LayerNormalization"):
        readers = _linear_readers(node)
        if readers:
            _fold_into_weights(OpBuilder(graph, "norm/", target=op.target), node, readers)
            folded += 1
    mark_constants(model, set(graph.initializers) - known)
    return folded


def _linear_readers(node: ir.Node) -> list[_Linear] | None:
    """Return the linear layers behind a normalisation of float32 rows that has scale and shift."""
    y, scale = node.outputs[0], node.inputs[1]
    x, dims = node.inputs[0], S.dims_of(y)
    if x is None or scale is None or dims is None or y.dtype != ir.DataType.FLOAT:
        return None
    if len(node.inputs) < 3 or node.inputs[2] is None or y.is_graph_output():
        return None
    if any(o.uses() or o.is_graph_output() for o in node.outputs[1:]):
        return None
    if not all(isinstance(d, int) for d in dims) or S.dims_of(scale) != dims[-1:]:
        return None
    if S.dims_of(node.inputs[2]) != dims[-1:]:
        return None
    readers = [_linear(use.node, use.idx, y) for use in y.uses()]
    if any(f is None for f in readers):
        return None
    layers = [f for f in readers if f is not None]
    rows = math.prod(d for d in dims[:-1] if isinstance(d, int))
    width = sum(f.width for f in layers)
    return layers if rows >= T.NORM_ROWS_PER_COLUMN * width else None


def _linear(node: ir.Node, index: int, y: ir.Value) -> _Linear | None:
    if not is_op(node, "MatMul") or index != 0 or node.graph is not y.graph:
        return None
    weight, product = node.inputs[1], node.outputs[0]
    dims = None if weight is None else S.dims_of(weight)
    if dims is None or len(dims) != 2 or not isinstance(dims[1], int):
        return None
    if len(product.uses()) != 1 or product.is_graph_output():
        return None
    ((add, at),) = product.uses()
    bias = add.inputs[1 - at] if is_op(add, "Add") and add.graph is y.graph else None
    if bias is None or S.dims_of(bias) != dims[1:]:
        return None
    return _Linear(node, add, bias, dims[1])


def _fold_into_weights(op: OpBuilder, node: ir.Node, layers: list[_Linear]) -> None:
    scale, shift = node.inputs[1:3]
    assert scale is not None
    assert shift is not None
    for layer in layers:
        op.position = layer.product
        weight = layer.product.inputs[1]
        assert weight is not None
        turn = weight.producer()
        if turn is not None and is_op(turn, "Transpose") and turn.graph is op.graph:
            stored = turn.inputs[0]  # [out, in]; the product then still reads a transposed matrix
            scaled = op.Transpose(op.Mul(stored, scale), perm=[1, 0])
            # With a vector onnxruntime takes 25 times as long as with a matrix of one column.
            moved = op.Squeeze(op.MatMul(stored, op.Unsqueeze(shift, [1])), [1])
        else:
            scaled = op.Mul(weight, op.Unsqueeze(scale, [1]))
            moved = op.MatMul(shift, weight)
        layer.product.replace_input_with(1, scaled)
        op.position = layer.add
        at = list(layer.add.inputs).index(layer.bias)
        layer.add.replace_input_with(at, op.Add(layer.bias, moved))
    width = op.static(scale)
    assert width is not None
    node.replace_input_with(1, op.const(np.ones(width, np.float32)))
    node.resize_inputs(2)


_MOST_ROWS = 1 << 24  # the column of ones is a constant of the model


@dataclasses.dataclass(frozen=True)
class _Layer:
    """``x W + b`` for ``x`` of ``lead`` rows; ``weight`` lies as ``[out, in]`` if ``turned``."""

    x: ir.Value
    weight: ir.Value
    bias: ir.Value
    turned: bool
    lead: tuple[int, ...]


def bias_as_weight_column(model: ir.Model, op: OpBuilder) -> int:
    """Put biases into the weights where that saves time; return how many."""
    changed = 0
    for node in nodes(op.graph, "Gemm", "Add"):
        layer = _layer(node)
        if layer is None:
            continue
        y = node.outputs[0]
        uses = list(y.uses())
        op.position = node
        one = op.const(np.ones((*layer.lead, 1), np.float32))
        x = op.Concat(layer.x, one, axis=len(layer.lead))
        if layer.turned:
            bias = op.Unsqueeze(layer.bias, [1])
            weight = op.Transpose(op.Concat(layer.weight, bias, axis=1), perm=[1, 0])
        else:
            weight = op.Concat(layer.weight, op.Unsqueeze(layer.bias, [0]), axis=0)
        replace_value(y, op.MatMul(x, weight), uses)
        changed += 1
    return changed


def _layer(node: ir.Node) -> _Layer | None:
    layer = None
    if is_op(node, "Gemm"):
        layer = _gemm(node)
    elif is_op(node, "Add"):
        layer = _sum(node, 0) or _sum(node, 1)
    if layer is None or layer.x.dtype != ir.DataType.FLOAT:
        return None
    x, weight = S.dims_of(layer.x), S.dims_of(layer.weight)
    if x is None or weight is None or len(weight) != 2 or not all(isinstance(d, int) for d in x):
        return None
    lead = tuple(d for d in x[:-1] if isinstance(d, int))
    if math.prod(lead) > _MOST_ROWS:
        return None
    width, out = (weight[1], weight[0]) if layer.turned else weight
    if not isinstance(width, int) or not isinstance(out, int) or S.dims_of(layer.bias) != (out,):
        return None
    rows = math.prod(lead)
    if rows < T.BIAS_COLUMN_ROWS or rows * out < T.BIAS_COLUMN_ELEMENTS:
        return None
    if out < T.BIAS_COLUMN_RATIO * width:
        return None
    return dataclasses.replace(layer, lead=lead)


def _gemm(node: ir.Node) -> _Layer | None:
    x, weight, bias = (*node.inputs, None)[:3]
    options = S.attributes_of(node, node.version or 21)
    if x is None or weight is None or bias is None or options["transA"]:
        return None
    if options["alpha"] != 1.0 or options["beta"] != 1.0:
        return None
    return _Layer(x, weight, bias, bool(options["transB"]), ())


def _sum(node: ir.Node, at: int) -> _Layer | None:
    """Return the layer if input ``at`` is a product that nothing else reads."""
    z, bias = node.inputs[at], node.inputs[1 - at]
    product = None if z is None else z.producer()
    if z is None or bias is None or product is None or not is_op(product, "MatMul"):
        return None
    if product.graph is not node.graph or len(z.uses()) > 1 or z.is_graph_output():
        return None
    x, weight = product.inputs
    if x is None or weight is None:
        return None
    turn = weight.producer()
    if turn is not None and is_op(turn, "Transpose") and turn.graph is node.graph:
        stored = turn.inputs[0]
        if stored is not None and len(S.dims_of(stored) or ()) == 2:
            return _Layer(x, stored, bias, True, ())
    return _Layer(x, weight, bias, False, ())


def gemm_without_trans_a(model: ir.Model, op: OpBuilder) -> int:
    """Spell transposed products of float32 matrices without ``transA``; return how many."""
    turned = 0
    for node in nodes(op.graph, "Gemm"):
        turned += _turn(op, node)
    return turned


def _turn(op: OpBuilder, node: ir.Node) -> int:
    y = node.outputs[0]
    a, b = node.inputs[:2]
    options = S.attributes_of(node, op.opset)
    if a is None or b is None or y.dtype != ir.DataType.FLOAT:
        return 0
    if len(node.inputs) > 2 and node.inputs[2] is not None:
        return 0
    if not options["transA"] or options["transB"] or options["alpha"] != 1.0:
        return 0
    left, right = S.dims_of(a), S.dims_of(b)
    if left is None or right is None:
        return 0
    rows, m, n = left[0], left[1], right[1]
    if not isinstance(m, int) or not isinstance(n, int) or min(m, n) < 2:
        return 0
    op.position = node
    if T.TRANSPOSED_COLUMNS_RATIO * m <= n:
        if m * n < T.TRANSPOSED_WEIGHT_ELEMENTS:
            return 0
        result = op.MatMul(transposed(op, a, m), b)
    else:
        if m < max(T.TRANSPOSED_COLUMNS_RATIO * n, T.TRANSPOSED_RESULT_ROWS):
            return 0
        if not isinstance(rows, int) or rows < T.TRANSPOSED_RESULT_OPERAND_ROWS:
            return 0
        result = op.Transpose(op.MatMul(transposed(op, b, n), a), perm=[1, 0])
    replace_value(y, result, list(y.uses()))
    return 1


def transposed(op: OpBuilder, x: ir.Value, width: int) -> ir.Value:
    """Return ``x^T`` of a matrix so that no runtime makes it part of a product."""
    turned = op.Transpose(op.Reshape(x, [1, -1, width]), perm=[0, 2, 1])
    return op.Reshape(turned, [width, -1])


def scale_after_matmul(model: ir.Model, op: OpBuilder) -> int:
    """Move scales of the rows of wide matrices behind products; return how many moved."""
    order = list(op.graph)
    following = dict(zip(order, [*order[1:], None], strict=True))
    moved = 0
    for node in nodes(op.graph, "Mul"):
        scaled = _scaled(node)
        readers = None if scaled is None else _scaled_readers(scaled, node.outputs[0], op.graph)
        if scaled is None or not readers:
            continue
        node.outputs[0].replace_all_uses_with(scaled.x)
        for reader, index in readers:
            _compensate(op, scaled, reader, index, following[reader])
        moved += 1
    return moved


@dataclasses.dataclass(frozen=True)
class _Scaled:
    """A matrix ``x`` of this width and one number for each of its rows, ``[rows, 1]``."""

    x: ir.Value
    rows: ir.Value
    width: int


def _scaled(node: ir.Node) -> _Scaled | None:
    if node.outputs[0].dtype not in S.FLOATS:
        return None
    a, b = node.inputs
    for x, e in ((a, b), (b, a)):
        if x is None or e is None:
            return None
        dims, each = S.dims_of(x), S.dims_of(e)
        if dims is None or each is None or len(dims) != 2 or len(each) != 2 or each[1] != 1:
            continue
        rows, width = dims
        if not isinstance(width, int) or width < T.SCALED_COLUMNS:
            continue
        if rows is not None and each[0] == rows:
            return _Scaled(x, e, width)
    return None


def _scaled_readers(
    scaled: _Scaled, y: ir.Value, graph: ir.Graph
) -> list[tuple[ir.Node, int]] | None:
    """Return the products and sums that read ``y`` or a view of it; ``None`` if others do."""
    if y.is_graph_output():
        return None
    readers: list[tuple[ir.Node, int]] = []
    for node, index in y.uses():
        if node.graph is not graph:
            return None
        if _is_view(node, y) and index == 0:
            dims = S.dims_of(node.outputs[0])
            if dims is None or len(dims) < 2 or dims[-1] != scaled.width:
                return None
            inner = _scaled_readers(scaled, node.outputs[0], graph)
            if inner is None:
                return None
            readers += inner
        elif _fits(scaled, node, index):
            readers.append((node, index))
        else:
            return None
    return readers


def _is_view(node: ir.Node, y: ir.Value) -> bool:
    """Return whether a node gives the same numbers, if rounded: in another shape or type."""
    to = node.outputs[0].dtype
    rounded = y.dtype == ir.DataType.FLOAT and to == ir.DataType.BFLOAT16
    return is_op(node, "Reshape") or (is_op(node, "Cast") and rounded)


def _fits(scaled: _Scaled, node: ir.Node, index: int) -> bool:
    if is_op(node, "ReduceSum"):
        return index == 0 and _over_rows(node)
    if not is_op(node, "MatMul", "Gemm") or index > 1:
        return False
    if len(node.inputs) > 2 and node.inputs[2] is not None:
        return False
    other = node.inputs[1 - index]
    dims = None if other is None else S.dims_of(other)
    if dims is None or len(dims) != 2:
        return False
    turned = _is_transposed(node)
    if _sums_rows(node, index):  # [rows, k]
        return turned[0] and not turned[1] and _less(dims[1], scaled)
    return index == 0 and not turned[0] and _less(dims[0 if turned[1] else 1], scaled)


def _less(size: object, scaled: _Scaled) -> bool:
    return isinstance(size, int) and T.SCALED_COLUMNS_PER_RESULT * size <= scaled.width


def _is_transposed(node: ir.Node) -> list[bool]:
    flags = [node.attributes.get(f) for f in ("transA", "transB")]
    return [f is not None and f.as_int() == 1 for f in flags]


def _sums_rows(node: ir.Node, index: int) -> bool:
    """Return whether the product's inner axis is that of the rows of input ``index``."""
    turned = _is_transposed(node)
    return turned[0] if index == 0 else not turned[1]


def _over_rows(node: ir.Node) -> bool:
    """Return whether a sum leaves nothing but the columns."""
    x, axes = node.inputs[0], S.constant_of((*node.inputs, None)[1])
    dims, keep = None if x is None else S.dims_of(x), node.attributes.get("keepdims")
    if dims is None or axes is None or keep is None or keep.as_int():
        return False
    return sorted(int(a) % len(dims) for a in axes) == list(range(len(dims) - 1))


def _compensate(
    op: OpBuilder, scaled: _Scaled, node: ir.Node, index: int, following: ir.Node | None
) -> None:
    """Scale elsewhere what a reader of the plain matrix computes."""
    y = node.outputs[0]
    uses = list(y.uses())
    op.position = node
    if is_op(node, "ReduceSum"):
        total = op.MatMul(op.Reshape(scaled.rows, [1, -1]), scaled.x)
        replace_value(y, op.Reshape(total, [scaled.width]), uses)
    elif _sums_rows(node, index):
        other = node.inputs[1 - index]
        assert other is not None
        node.replace_input_with(1 - index, _times(op, other, scaled.rows))
    else:
        op.position = following
        sizes = [op.size(y, axis) for axis in range(op.rank(y) - 1)]
        rows = scaled.rows if len(sizes) == 1 else op.reshape(scaled.rows, [*sizes, 1])
        replace_value(y, _times(op, y, rows), uses)


def _times(op: OpBuilder, x: ir.Value, rows: ir.Value) -> ir.Value:
    """Return scaled rows of ``x`` in its type, multiplied in that of the scales."""
    if x.dtype == rows.dtype:
        return op.Mul(x, rows)
    return op.Cast(op.Mul(op.Cast(x, to=rows.dtype), rows), to=x.dtype)


def unfuse_gemm_bias(model: ir.Model, op: OpBuilder) -> int:
    """Take biases out of large products, in place; return how many."""
    count = sum(_out_of_gemm(op, node) for node in nodes(op.graph, "Gemm"))
    return count + sum(_behind_view(op, node) for node in nodes(op.graph, "Add"))


def _out_of_gemm(op: OpBuilder, node: ir.Node) -> int:
    a, b, bias = (*node.inputs, None)[:3]
    y = node.outputs[0]
    attributes = S.attributes_of(node, op.opset)
    if a is None or b is None or bias is None or attributes["beta"] != 1.0:
        return 0
    if _large(y) is None or not _is_row(bias, y):
        return 0
    uses = list(y.uses())
    op.position = node
    turns = {key: attributes[key] for key in ("alpha", "transA", "transB")}
    replace_value(y, op.Add(op.Gemm(a, b, **turns), bias), uses)
    return 1


def _behind_view(op: OpBuilder, node: ir.Node) -> int:
    y = node.outputs[0]
    sizes = _large(y)
    for product, bias in (tuple(node.inputs), tuple(reversed(node.inputs))):
        made = None if product is None else product.producer()
        if product is None or bias is None or made is None or not is_op(made, "MatMul"):
            continue
        if sizes is None or not S.same_shape(product, y) or not _is_row(bias, y):
            continue
        uses = list(y.uses())
        op.position = node
        view = [1, *sizes] if len(sizes) == 2 else [-1, sizes[-1]]
        total = op.Add(op.Reshape(product, view), bias)
        replace_value(y, op.Reshape(total, sizes), uses)
        return 1
    return 0


def _large(y: ir.Value) -> list[int] | None:
    """Return the sizes of a large result, if they are known."""
    sizes = D.static_sizes(S.dims_of(y) or (None,))
    many = sizes is not None and len(sizes) > 1 and math.prod(sizes) >= T.MEMORY_BOUND_ELEMENTS
    return sizes if many else None


def _is_row(bias: ir.Value, y: ir.Value) -> bool:
    """Return whether a bias has one number for each column."""
    dims = S.dims_of(bias)
    return dims is not None and dims == (S.dims_of(y) or ())[-1:]


_TYPES = frozenset({ir.DataType.FLOAT, ir.DataType.DOUBLE})


def fuse_matmul_add(model: ir.Model, op: OpBuilder) -> int:
    """Let products of matrices start from what is added to them; return how many do."""
    order = {node: i for i, node in enumerate(model.graph)}
    changed = 0
    for node in nodes(model.graph, "Add"):
        products = [i for i, x in enumerate(node.inputs) if _product(x, node) is not None]
        if not products or node.outputs[0].dtype not in _TYPES:
            continue
        last = max(products, key=lambda i: _place(order, node.inputs[i]))
        start = node.inputs[1 - last]
        product = _product(node.inputs[last], node)
        if start is None or product is None or not S.same_shape(start, node.outputs[0]):
            continue
        op.position = node
        y = node.outputs[0]
        settings = {n: a.value for n, a in product.attributes.items() if n != "beta"}
        new = op.Gemm(*product.inputs[:2], start, **settings)
        replace_value(y, new, list(y.uses()))
        changed += 1
    return changed


def _product(x: ir.Value | None, reader: ir.Node) -> ir.Node | None:
    """Return the product of two matrices that a value is, if only ``reader`` reads it."""
    node = None if x is None else x.producer()
    if x is None or node is None or len(x.uses()) != 1 or x.is_graph_output():
        return None
    if node.graph is not reader.graph or not S.same_shape(x, reader.outputs[0]):
        return None
    if is_op(node, "Gemm"):
        return node if len(node.inputs) == 2 or node.inputs[2] is None else None
    ranks = [None if v is None or v.shape is None else len(v.shape) for v in node.inputs]
    return node if is_op(node, "MatMul") and ranks == [2, 2] else None


def _place(order: dict[ir.Node, int], x: ir.Value | None) -> int:
    producer = None if x is None else x.producer()
    return -1 if producer is None else order.get(producer, -1)


_AVERAGES = "column of means"
_FEWEST = 3
"""Means from which on a column, two or three nodes, is paid for."""


def fuse_mean_add(model: ir.Model, op: OpBuilder) -> int:
    """Let products take means of the rows of matrices and what is added; return how many."""
    means = [(node, way) for node in nodes(model.graph, "Add") if (way := _shifted(node))]
    columns = _MeanColumns(op)
    if len(means) < _FEWEST:
        return 0
    means = [m for m in means if columns.possible(m[1][0])]
    for node, (q, number) in means:
        y, column = node.outputs[0], columns.of(q)
        op.position = node
        replace_value(y, op.Gemm(q, column, number), list(y.uses()))
    return len(means)


class _MeanColumns:
    """Columns of one number each, made in front of all that reads them."""

    def __init__(self, op: OpBuilder) -> None:
        self._op = op
        self._known: dict[int, ir.Value] = {}
        self._told = next(
            (
                (x, axis)
                for x in op.graph.inputs
                for axis, d in enumerate(S.dims_of(x) or ())
                if isinstance(d, str)
            ),
            None,
        )

    def possible(self, q: ir.Value) -> bool:
        """Return whether there is a column, or a size that only a run tells."""
        width = width_of(q)
        if width is not None and width not in self._known:
            made = _column_of_means(self._op.graph, width)
            if made is not None:
                self._known[width] = made
        return width in self._known or self._told is not None

    def of(self, q: ir.Value) -> ir.Value:
        """Return ``1 / n`` as ``[n, 1]`` for a matrix of width ``n``."""
        op, width = self._op, width_of(q)
        assert width is not None
        if width not in self._known:
            assert self._told is not None
            op.position = next(iter(op.graph))
            x, axis = self._told
            one = op.Pow(op.Shape(x, start=axis, end=axis + 1), op.const([0]))
            # Of a size that nobody is told, so that nothing finds it to be the constant.
            self._known[width] = op.Expand(op.const([[1.0 / width]] * width, q.dtype), one)
        return self._known[width]


def _shifted(node: ir.Node) -> tuple[ir.Value, ir.Value] | None:
    """Return ``q`` and the number of ``mean(q) + number``."""
    for x, number in (tuple(node.inputs), tuple(reversed(node.inputs))):
        q = mean_operand(x)
        if q is None or number is None or not S.is_generated_constant(number):
            continue
        array = S.constant_of(number)
        if array is not None and array.size == 1 and array.ndim <= 1:
            return q, number
    return None


def mean_operand(x: ir.Value | None) -> ir.Value | None:
    """Return the matrix that ``x`` has the means of rows of, if only one node reads them."""
    node = own_producer(x, "ReduceMean")
    if x is None or node is None or x.dtype != ir.DataType.FLOAT:
        return None
    q, axes = (*node.inputs, None)[:2]
    sizes, keep = S.constant_of(axes), node.attributes.get("keepdims")
    if width_of(q) is None or sizes is None or sizes.size != 1 or int(sizes.item()) not in (-1, 1):
        return None
    return q if keep is None or keep.as_int() == 1 else None


def width_of(q: ir.Value | None) -> int | None:
    """Return the width of a matrix, if it is known and not nothing."""
    dims = () if q is None else S.dims_of(q) or ()
    return dims[1] if len(dims) == 2 and isinstance(dims[1], int) and dims[1] > 0 else None


def own_producer(x: ir.Value | None, kind: str) -> ir.Node | None:
    """Return the node of a kind that makes a value which only one other reads."""
    node = None if x is None else x.producer()
    if x is None or node is None or not is_op(node, kind):
        return None
    return node if len(x.uses()) == 1 and not x.is_graph_output() else None


def scaled_weight_columns(op: OpBuilder, weights: list[ir.Value], width: int) -> list[ir.Value]:
    """Return ``w / n`` as ``[n, 1]`` for vectors of one width ``n`` that inputs of the graph are.

    They are made together in front of everything, and ``1 / n`` as a further column with them.
    """
    op.position = next(iter(op.graph))
    ones = op.const([1.0] * width, weights[0].dtype)
    shares = op.Mul(op.Concat(*weights, ones, axis=0), 1.0 / width)
    sizes = [width] * (len(weights) + 1)
    *columns, last = op.Split(op.Reshape(shares, [-1, 1]), sizes, axis=0, _outputs=len(sizes))
    last.meta[_AVERAGES] = True
    return columns


def _column_of_means(graph: ir.Graph, width: int) -> ir.Value | None:
    """Return the column of ``1 / n`` that :func:`shares_of_weights` has made."""
    for node in graph:
        y = node.outputs[-1] if node.outputs else None
        if y is not None and y.meta.get(_AVERAGES) and S.dims_of(y) == (width, 1):
            return y
    return None


"""Normalisations of one width from which on their columns, four nodes, are paid for.

One of the columns stands for the two nodes that means in the forward pass would take.
"""


@dataclasses.dataclass(frozen=True)
class _RMSNormGrad:
    """``root = rest + d / s - n mean(d / s n)`` where ``d = g w`` and ``products = g n``."""

    root: ir.Node
    rest: ir.Value | None
    d: ir.Value
    s: ir.Value
    n: ir.Value
    g: ir.Value
    w: ir.Value
    products: ir.Node


def fuse_rms_norm_grad(model: ir.Model, op: OpBuilder) -> int:
    """Write gradients of normalisations with one product each; return how many."""
    by_width: dict[int, list[_RMSNormGrad]] = collections.defaultdict(list)
    for node in nodes(model.graph, "Sub"):
        slope = _find_rms_norm_grad(node)
        if slope is not None:
            by_width[width_of(slope.n) or 0].append(slope)
    changed = 0
    for width, slopes in by_width.items():
        if len(slopes) < _FEWEST:
            continue
        weights = list(dict.fromkeys(s.w for s in slopes))
        columns = scaled_weight_columns(op, weights, width)
        order = {node: i for i, node in enumerate(model.graph)}
        for root in [s.root for s in slopes]:
            slope = _find_rms_norm_grad(root)  # what is added may itself have been written anew
            if slope is not None:
                _rewrite(op, slope, columns[weights.index(slope.w)], order)
                changed += 1
    return changed


def _rewrite(
    op: OpBuilder, slope: _RMSNormGrad, column: ir.Value, order: dict[ir.Node, int]
) -> None:
    op.position = slope.root
    products = slope.products.outputs[0]
    if order[slope.products] > order[slope.root]:
        early = op.Mul(slope.g, slope.n)
        replace_value(products, early, list(products.uses()))
        products = early
    share = op.Gemm(products, column)
    y = slope.root.outputs[0]
    new = op.Div(op.Sub(slope.d, op.Mul(slope.n, share)), slope.s)
    new = new if slope.rest is None else op.Add(slope.rest, new)
    replace_value(y, new, list(y.uses()))


def _find_rms_norm_grad(root: ir.Node) -> _RMSNormGrad | None:
    start, end = root.inputs
    product = own_producer(end, "Mul")
    if start is None or product is None:
        return None
    for mean, n in _orders(product):
        spread = mean_operand(mean)
        factors = own_producer(spread, "Mul")
        if n is None or factors is None or not S.same_shape(n, root.outputs[0]):
            continue
        for e, other in _orders(factors):
            if other is n and e is not None and e is not n:
                return _with_weight(root, start, e, n, factors)
    return None


def _with_weight(
    root: ir.Node, start: ir.Value, e: ir.Value, n: ir.Value, factors: ir.Node
) -> _RMSNormGrad | None:
    """Return the parts where ``e = g w / s`` and ``n = x / s``, and ``g n`` is there already."""
    divided, normal = e.producer(), n.producer()
    if divided is None or normal is None or not is_op(divided, "Div") or not is_op(normal, "Div"):
        return None
    d, s = divided.inputs
    if s is None or s is not normal.inputs[1] or (S.dims_of(s) or ())[1:] != (1,):
        return None
    rest = _rest(root, start, e)
    readers = {factors, root if rest is None else start.producer()}
    if (rest is None and start is not e) or e.is_graph_output():
        return None
    weighted = own_producer(d, "Mul")
    if weighted is None or d is None or {use.node for use in e.uses()} != readers:
        return None
    for g, w in _orders(weighted):
        if g is None or w is None or not _is_graph_input(w, width_of(n)) or not S.same_shape(g, n):
            continue
        for node, _ in g.uses():
            if is_op(node, "Mul") and set(node.inputs) == {g, n} and node.graph is root.graph:
                return _RMSNormGrad(root, rest, d, s, n, g, w, node)
    return None


def _rest(root: ir.Node, start: ir.Value, e: ir.Value) -> ir.Value | None:
    """Return what is added to ``e``, where it is of the same shape."""
    added = own_producer(start, "Add")
    if added is None or e not in added.inputs:
        return None
    rest = added.inputs[1] if added.inputs[0] is e else added.inputs[0]
    same = rest is not None and rest is not e and S.same_shape(rest, root.outputs[0])
    return rest if same else None


def _is_graph_input(w: ir.Value, width: int | None) -> bool:
    """Return whether a vector comes into the graph: of what it knows, a runtime packs columns."""
    return w.is_graph_input() and S.constant_of(w) is None and S.dims_of(w) == (width,)


def _orders(node: ir.Node) -> tuple[tuple[ir.Value | None, ir.Value | None], ...]:
    a, b = node.inputs
    return (a, b), (b, a)
