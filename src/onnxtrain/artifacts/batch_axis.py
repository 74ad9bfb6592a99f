"""Free the batch axis of a file that was exported with a fixed batch size, such as torch's default.

An exporter that traces one example writes its sizes into the graph: Reshape to ``[1, 64]``, a class
token expanded to ``[1, 1, 768]``. :func:`free_batch_axis` gives the axis a name and rewrites these
constants:

    before:  x [1, 4, 4, 4] -> Reshape [1, 64] -> y [1, 64]
    after:   x [batch, 4, 4, 4] -> Reshape [0, 64] -> y [batch, 64]

A batch inside a merged axis (``[sequence, batch*heads, size]`` of attention) is followed by its
place in memory. Where a constant allows several readings, one is chosen: the result is always
compared with the file, two and three examples at once against each example alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.errors import MissingExtraError, OnnxTrainError, PrepareError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.nodes import is_op
from onnxtrain.graph.shapes import dims as D
from onnxtrain.graph.shapes.dims import Dim
from onnxtrain.graph.shapes.inference import infer_shapes
from onnxtrain.runtime.compare import Runner, difference, random_feeds, runner
from onnxtrain.runtime.devices import import_onnxruntime

BATCH = "batch"
_AUTOMATIC_LIMIT = 1 << 28  # bytes of weights: the comparison holds the model four times
_COMPARED_SIZES = (2, 3)


def free_batch_axes(
    model: ir.Model, dims: Mapping[str, int | str], *, automatic: bool
) -> tuple[ir.Model, dict[str, int], list[str]]:
    """Free the axes that ``dims`` names, or the batch axis of all inputs if that is safe.

    Args:
        model: a loaded model; the argument must not be used any more.
        dims: sizes to fix; ``{"x[0]": "batch"}`` frees an axis, and so does another fixed size.
        automatic: whether to free a batch size of 1 that ``dims`` does not mention.

    Returns:
        The model, the sizes that are left to fix, and lines for the report.

    Raises:
        PrepareError: an axis that ``dims`` names cannot be freed.
    """
    graph = model.graph
    names: dict[str, dict[str, int]] = {}  # axis of each input, by the new name of the size
    sizes: dict[str, int] = {}
    for position, size in dims.items():
        x, axis = _input_axis(graph, position)
        fixed = None if x is None else (S.dims_of(x) or ())[axis]
        kept = isinstance(size, int) and (size == fixed or axis)  # only batches change their size
        if not isinstance(fixed, int) or kept:
            if isinstance(size, str):
                raise PrepareError(_not_fixed(graph, position, size))
            sizes[position] = size
            continue
        assert x is not None
        name = size if isinstance(size, str) else _unused(graph, BATCH)
        names.setdefault(name, {})[x.name or ""] = axis
        if isinstance(size, int):
            sizes[name] = size
    repairs: list[str] = []
    for name, axes in names.items():
        try:
            model = free_batch_axis(model, axes, name)
        except OnnxTrainError as error:
            listing = ", ".join(f"{x}[{axis}]" for x, axis in axes.items())
            raise PrepareError(
                f"the size of {listing} cannot be freed: {error}\n"
                "hint: export the model with a symbolic batch size (torch: dynamic_shapes=, or "
                "dynamic_axes= of the older exporter)"
            ) from error
        repairs.append(_repair(axes, name))
    if not names and automatic:
        axes = _batches_of_one(graph, dims)
        name = _unused(graph, BATCH)
        if axes:
            try:
                model = free_batch_axis(model, axes, name)
            except OnnxTrainError:
                return model, sizes, []  # the file stays as it is
            repairs.append(_repair(axes, name))
    return model, sizes, repairs


def free_batch_axis(model: ir.Model, axes: Mapping[str, int], symbol: str) -> ir.Model:
    """Return a copy of a model whose inputs have a symbolic size along these axes.

    Raises:
        OnnxTrainError: the examples of a batch depend on each other, or a node fixes their number.
    """
    if model.functions:
        raise PrepareError("the file has local functions")
    freed = model.clone()
    inputs = {x.name or "": x for x in freed.graph.inputs}
    sizes = {(S.dims_of(inputs[name]) or ())[axis] for name, axis in axes.items()}
    (size,) = sizes if len(sizes) == 1 else (None,)
    if not isinstance(size, int):
        raise PrepareError(f"the sizes differ: {', '.join(map(str, sorted(sizes, key=str)))}")
    opset = freed.opset_imports.get("", freed.opset_imports.get("ai.onnx", 1))
    with_constants = [node for node in freed.graph.all_nodes() if is_op(node, "Constant")]
    for node in with_constants:
        node.outputs[0].const_value = _constant(node)
    infer_shapes(freed.graph, opset)
    fixed = {y.name or "": S.dims_of(y) for node in freed.graph for y in node.outputs}
    for node in freed.graph.all_nodes():
        for y in node.outputs:
            y.shape = None
            y.meta.clear()  # what was inferred of its elements
    for name, axis in axes.items():
        S.set_dims(inputs[name], _replaced(S.dims_of(inputs[name]) or (), axis, symbol))
    freed.graph.opset_imports.setdefault("", opset)
    infer_shapes(freed.graph, opset, _Release(freed.graph, symbol, size, fixed))
    for node in with_constants:
        node.outputs[0].const_value = None
    _verify(model, freed, axes, symbol, size)
    return freed


class _Release:
    """Rewrites the constants of a node whose inputs have a symbolic batch, before its inference."""

    def __init__(
        self,
        graph: ir.Graph,
        symbol: str,
        size: int,
        fixed: Mapping[str, tuple[Dim, ...] | None],
    ) -> None:
        self.graph, self.symbol, self.size, self.fixed = graph, symbol, size, fixed
        self.builder = OpBuilder(graph, prefix="batch/")
        self.slower: dict[ir.Value, int] = {}
        """Of a merged axis: the product of what varies slower than the batch in it."""

    def __call__(self, node: ir.Node) -> bool:
        if node.graph is not self.graph:
            return False
        batched = [x for x in node.inputs if x is not None and self.axis(x) is not None]
        inherited = max((self.slower.get(x, 1) for x in batched), default=1)
        if inherited > 1:
            self.slower.update(dict.fromkeys(node.outputs, inherited))
        if not batched:
            return False
        if is_op(node, "Reshape"):
            self._reshape(node)
        elif is_op(node, "Concat"):
            self._concat(node, batched[0])
        elif is_op(node, "LSTM", "GRU", "RNN"):
            axis = 0 if node.attributes.get_int("layout", 0) else 1
            for i in (5, 6):
                self._expand(node, i, axis, batched[0])
        elif is_op(node, "GridSample"):
            for i in (0, 1):
                self._expand(node, i, 0, batched[0])
        elif is_op(node, "Resize"):
            self._resize(node)
        elif is_op(node, "Expand"):
            self._shape_of_expand(node)
        return False

    def axis(self, x: ir.Value) -> int | None:
        """Return the axis of a value that contains the batch."""
        for axis, d in enumerate(S.dims_of(x) or ()):
            if self.symbol in D.symbols(d):
                return axis
        return None

    def _reshape(self, node: ir.Node) -> None:
        x, y = node.inputs[0], node.outputs[0]
        target, want = _integers(node.inputs[1]), self.fixed.get(y.name or "")
        axis = None if x is None else self.axis(x)
        if x is None or axis is None or target is None or want is None:
            return
        have = S.dims_of(x) or ()
        within = 1 if have[axis] == self.symbol else self.slower.get(x, 1)
        before = D.static_sizes(have[:axis])
        found = None
        if before is not None:
            found = batch_position(have, want, math.prod(before) * within, self.size)
        if found is None:
            return
        at, slower = found
        own = list(target)
        same = at < len(have) and have[at] == self.symbol and want[at] == self.size
        if same and not node.attributes.get_int("allowzero", 0):
            own[at] = 0
        else:
            rest = D.static_sizes(_replaced(want, at, 1))
            if rest is None:
                return
            own = [-1 if i == at else d for i, d in enumerate(rest)]
        self.slower[y] = slower
        node.replace_input_with(1, self.builder.const(own))

    def _concat(self, node: ir.Node, source: ir.Value) -> None:
        axis = self.axis(source)
        rank = len(S.dims_of(source) or ())
        assert axis is not None
        if node.attributes["axis"].as_int() % rank != axis:
            for i in range(len(node.inputs)):
                self._expand(node, i, axis, source)

    def _expand(self, node: ir.Node, i: int, axis: int, source: ir.Value) -> None:
        """Repeat an input of batch size 1 along an axis as often as ``source`` has examples."""
        x = node.inputs[i] if i < len(node.inputs) else None
        dims = None if x is None else S.dims_of(x)
        if x is None or dims is None or axis >= len(dims) or dims[axis] != 1 or self.size != 1:
            return
        op = OpBuilder(self.graph, prefix="batch/", before=node, parent=self.builder)
        parts: list[ir.Value] = [op.const([1] * axis)] if axis else []
        parts.append(self._count(op, source))
        parts += [op.const([1] * (len(dims) - axis - 1))] if axis < len(dims) - 1 else []
        shape = op.Concat(*parts, axis=0) if len(parts) > 1 else parts[0]
        node.replace_input_with(i, op.Expand(x, shape))

    def _count(self, op: OpBuilder, source: ir.Value) -> ir.Value:
        """Emit the number of examples, a tensor of one element."""
        axis = self.axis(source)
        if axis is None or (S.dims_of(source) or ())[axis] != self.symbol:
            raise PrepareError(f"value {source.name!r} has the batch within a larger axis")
        return op.Gather(op.Shape(source), op.const([axis]), axis=0)

    def _resize(self, node: ir.Node) -> None:
        x, sizes = node.inputs[0], node.inputs[3] if len(node.inputs) > 3 else None
        constant = _integers(sizes)
        dims = None if x is None else S.dims_of(x)
        if x is None or dims is None or constant is None or len(constant) != len(dims):
            return
        if dims[0] == self.symbol and constant[0] == self.size:
            op = OpBuilder(self.graph, prefix="batch/", before=node, parent=self.builder)
            rest = op.const(constant[1:])
            node.replace_input_with(3, op.Concat(self._count(op, x), rest, axis=0))

    def _shape_of_expand(self, node: ir.Node) -> None:
        x, shape = node.inputs[0], _integers(node.inputs[1])
        axis = None if x is None else self.axis(x)
        if x is None or axis is None or shape is None:
            return
        at = axis + len(shape) - len(S.dims_of(x) or ())
        if at >= 0 and shape[at] == self.size:
            own = [1 if i == at else v for i, v in enumerate(shape)]
            node.replace_input_with(1, self.builder.const(own))


def batch_position(
    have: Sequence[Dim], want: Sequence[Dim], slower: int, size: int
) -> tuple[int, int] | None:
    """Return the axis of a Reshape's result that holds the batch, and what varies slower within it.

    Elements keep their order, so the product of the sizes before the batch stays the same. Several
    axes may fit if the batch size is 1: an axis of its own comes first, then whole merged axes
    (``[sequence*batch, features]``) if axes are merged, else the smallest split.

    Args:
        have: sizes of the input, one of them with the batch.
        want: sizes of the result at the fixed batch size.
        slower: product of the sizes that vary slower than the batch.
        size: the fixed batch size.

    >>> batch_position(["n", 4, 4], [1, 16], 1, 1), batch_position([5, "n", 8], [5, 2, 4], 5, 1)
    ((0, 1), (1, 1))
    >>> batch_position([5, "n", 8], [5, 8], 5, 1), batch_position(["5*n", 8], [5, 1, 8], 5, 1)
    ((0, 5), (1, 1))
    """
    found: list[tuple[bool, tuple[int, int], int, int]] = []
    before = 1
    for axis, d in enumerate(want):
        if not isinstance(d, int) or slower % before:
            break
        within = slower // before
        if d and d % (within * size) == 0:
            faster = d // (within * size)
            shrinks = len(want) < len(have)
            order = (int(faster > 1), within) if shrinks else (within, faster)
            found.append((within * faster > 1, order, axis, within))
        before *= d
        if not before:
            break
    if not found:
        return None
    _, _, axis, within = min(found)
    return axis, within


def _replaced(dims: Sequence[Dim], axis: int, size: Dim) -> list[Dim]:
    return [size if i == axis else d for i, d in enumerate(dims)]


def _integers(x: ir.Value | None) -> list[int] | None:
    """Return the elements of a small integer tensor if all are known."""
    return D.static_sizes(S.symbolic_of(x))


def _constant(node: ir.Node) -> ir.TensorProtocol | None:
    for name, attribute in node.attributes.items():
        if name == "value":
            return attribute.as_tensor()
        if name in ("value_int", "value_ints"):
            return ir.Tensor(np.array(attribute.value, np.int64))
        if name in ("value_float", "value_floats"):
            return ir.Tensor(np.array(attribute.value, np.float32))
    return None


def _input_axis(graph: ir.Graph, position: str) -> tuple[ir.Value | None, int]:
    """Return the input and the axis of ``x[0]``; ``None`` if it does not exist."""
    name, _, rest = position.rpartition("[")
    x = next((x for x in graph.inputs if x.name == name), None)
    axis = rest.removesuffix("]")
    if x is None or not axis.isdecimal() or int(axis) >= len(S.dims_of(x) or ()):
        return None, 0
    return x, int(axis)


def _not_fixed(graph: ir.Graph, position: str, size: str) -> str:
    axes = [
        f"{x.name}[{axis}]"
        for x in graph.inputs
        for axis, d in enumerate(S.dims_of(x) or ())
        if isinstance(d, int)
    ]
    return (
        f"dims={{{position!r}: {size!r}}} does not name a fixed axis\n"
        f"hint: the fixed sizes are {', '.join(axes) or 'none: all are symbolic'}"
    )


def _batches_of_one(graph: ir.Graph, dims: Mapping[str, int | str]) -> dict[str, int]:
    """Return the first axis of every input if all of them are 1 and ``dims`` keeps none of them."""
    shapes = {x.name or "": S.dims_of(x) for x in graph.inputs}
    weights = sum(
        x.const_value.nbytes for x in graph.initializers.values() if x.const_value is not None
    )
    one = all(d is not None and len(d) > 1 and d[0] == 1 for d in shapes.values())
    outputs = [S.dims_of(y) for y in graph.outputs]
    one &= all(d is None or (len(d) > 0 and d[0] in (1, None)) for d in outputs)
    kept = any(dims.get(f"{name}[0]") is not None for name in shapes)
    if not shapes or not one or kept or weights > _AUTOMATIC_LIMIT:
        return {}
    try:
        import_onnxruntime()
    except MissingExtraError:
        return {}  # the comparison would take minutes
    return dict.fromkeys(shapes, 0)


def _unused(graph: ir.Graph, name: str) -> str:
    taken = {s for x in graph.inputs for d in S.dims_of(x) or () for s in D.symbols(d)}
    while name in taken:
        name += "_"
    return name


def _repair(axes: Mapping[str, int], name: str) -> str:
    listing = ", ".join(f"{x}[{axis}]" for x, axis in axes.items())
    return f"the size of {listing} was fixed, it is {name!r} now: same results for each example"


def _verify(
    model: ir.Model, freed: ir.Model, axes: Mapping[str, int], symbol: str, size: int
) -> None:
    """Compare several batches at once with the same batches one by one."""
    batched = {y.name or "": (S.dims_of(y) or ()).index(symbol) for y in _with(freed, symbol)}
    missing = [y.name or "" for y in freed.graph.outputs if y.name not in batched]
    if missing:
        raise PrepareError(f"output {missing[0]!r} does not have one result per example")
    original, changed = ir.to_proto(model), ir.to_proto(freed)
    one, many = _runner(original), _runner(changed)
    for count in _COMPARED_SIZES:
        feeds = next(iter(random_feeds(changed, {symbol: count * size})))
        parts = [
            one({n: _part(a, axes.get(n), i * size, size) for n, a in feeds.items()})
            for i in range(count)
        ]
        for y, together, *apart in zip(freed.graph.outputs, many(feeds), *parts, strict=True):
            expected = np.concatenate(apart, axis=batched[y.name or ""])
            if why := difference(expected, together):
                raise PrepareError(
                    f"the examples of a batch depend on each other: output {y.name!r} {why}"
                )


def _with(model: ir.Model, symbol: str) -> list[ir.Value]:
    return [y for y in model.graph.outputs if symbol in (S.dims_of(y) or ())]


def _runner(model: onnx.ModelProto) -> Runner:
    run, why, _ = runner(model, fall_back=True)
    if run is None:
        raise PrepareError(f"it does not run: {why}")
    return run


def _part(array: np.ndarray, axis: int | None, start: int, size: int) -> np.ndarray:
    return array if axis is None else np.take(array, range(start, start + size), axis)
