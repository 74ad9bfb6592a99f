"""Emit ONNX nodes by calling them: ``op.MatMul(a, b)``.

CamelCase attributes of :class:`OpBuilder` are ONNX operators and emit exactly one node. snake_case
methods are helpers: they may fold to a constant, emit several nodes, or none. So the capital
letters in a gradient rule show its cost. :class:`ShapeOps` holds the helpers that deal with shapes.
They return Python values where a shape is static and emit nodes where it is not.

Below the builder: arithmetic on sizes (:func:`plus` ...), and edits of existing graphs
(:func:`replace_value`, :func:`copy_nodes`).

>>> import onnx_ir as ir
>>> x = ir.val("x", ir.DataType.FLOAT, ["n", 4])
>>> graph = ir.Graph([x], [], nodes=[], opset_imports={"": 21}, name="g")
>>> op = OpBuilder(graph)
>>> y = op.Mul(x, 0.5)
>>> y.name, y.dtype.name, op.dims(y)
('Mul', 'FLOAT', ('n', 4))
>>> op.Transpose(x, prem=[1, 0])
Traceback (most recent call last):
TypeError: Transpose has no attribute prem; it has perm
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.nodes import STOP_GRADIENT, is_op, subgraphs_of
from onnxtrain.graph.shapes import dims as D
from onnxtrain.graph.shapes.dims import Dim
from onnxtrain.targets import Target, find

Size = int | ir.Value
"""A size in a gradient rule: an ``int`` if it is static, else an int64 value of shape [1]."""
_MAX_CONSTANT_ELEMENTS = 1 << 24  # of tables that a graph computes if they have more


class ShapeOps:
    """Shape helpers, a mixin of :class:`OpBuilder`."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def rank(self, x: ir.Value) -> int:
        """Return the rank of a value; raise ``ShapeError`` if it is unknown."""
        return S.rank_of(x)

    def dims(self, x: ir.Value) -> tuple[Dim, ...]:
        """Return the dimensions of a value: integers, symbolic expressions, or ``None``."""
        S.rank_of(x)
        return S.dims_of(x) or ()

    def static(self, x: ir.Value) -> tuple[int, ...] | None:
        """Return the shape if it is static, else ``None``."""
        dims = S.dims_of(x)
        if dims is None or not all(isinstance(d, int) for d in dims):
            return None
        return dims  # pyright: ignore[reportReturnType]

    def axes(self, axes: Sequence[int] | ir.Value | None, rank: int) -> list[int] | None:
        """Return constant axes as non-negative integers; ``None`` if they are not constant.

        ``axes=None`` means all axes.
        """
        if axes is None:
            return list(range(rank))
        if isinstance(axes, ir.Value):
            array = S.constant_of(axes)
            if array is None:
                return None
            axes = [int(a) for a in array.reshape(-1)]
        return [a % rank for a in axes]

    def constant(self, x: ir.Value | None) -> np.ndarray | None:
        """Return the array of a constant, ``None`` if the value is computed or omitted."""
        return S.constant_of(x)

    def same_shape(self, x: ir.Value, ref: ir.Value) -> bool:
        """Return whether two values provably have the same shape."""
        return S.same_shape(x, ref)

    def shape_of(self, x: ir.Value) -> ir.Value:
        """Return the shape of a value as an int64 vector."""
        dims = S.dims_of(x)
        if dims is not None and all(isinstance(d, int) for d in dims):
            return self.const(np.asarray(dims, np.int64))
        return self.Shape(self.shape_source(x))

    def size(self, x: ir.Value, axis: int) -> Size:
        """Return one size: an ``int`` if it is static, else an int64 value of shape [1]."""
        axis %= self.rank(x)
        d = self.dims(x)[axis]
        if isinstance(d, int):
            return d
        # A builder that inserts nodes cannot use `shape_source`: it does not know what runs before.
        from_input = None if self.position is None or d is None else self.input_size(d)
        if from_input is not None:
            return from_input
        return self.Shape(self.shape_source(x), start=axis, end=axis + 1)

    def input_size(self, d: str) -> ir.Value | None:
        """Read a size, or a sum of sizes, from the shapes of graph inputs; else return ``None``.

        Read from an input, a size is the same value in every layer, so equal nodes merge.
        """
        parts: list[Any] = []
        sources = self._input_sizes()
        for name in [d] if d in sources else d.split("+"):
            name = name.strip()
            source = sources.get(name)
            if source is not None:
                parts.append(self.Shape(source[0], start=source[1], end=source[1] + 1))
            elif name.isdigit():
                parts.append(self.const([int(name)]))
            else:
                return None
        total = parts[0]
        for part in parts[1:]:
            total = self.Add(total, part)
        return total

    def _input_sizes(self) -> dict[str, tuple[ir.Value, int]]:
        """Map each symbolic size of the graph inputs to the first input and axis that has it."""
        sources: dict[str, tuple[ir.Value, int]] = {}
        for x in self.root.inputs:
            for i, d in enumerate(S.dims_of(x) or ()):
                if isinstance(d, str) and not isinstance(x.type, ir.SequenceType):
                    sources.setdefault(d, (x, i))
        return sources

    def vector(self, sizes: Sequence[Size]) -> ir.Value:
        """Concatenate sizes into an int64 vector; neighboring static sizes share one constant."""
        if all(isinstance(s, int) for s in sizes):
            return self.const(np.asarray(sizes, np.int64))
        parts: list[ir.Value] = []
        run: list[int] = []
        for s in sizes:
            if isinstance(s, int):
                run.append(s)
                continue
            if run:
                parts.append(self.const(run))
                run = []
            parts.append(s)
        if run:
            parts.append(self.const(run))
        return parts[0] if len(parts) == 1 else self.Concat(*parts, axis=0)

    def count(self, x: ir.Value, axes: Sequence[int] | ir.Value | None = None) -> ir.Value:
        """Return the number of elements along ``axes`` (all by default), a scalar of x's dtype."""
        if isinstance(axes, ir.Value):
            reduced = self.Gather(self.shape_of(x), axes)
            return self.Cast(self.ReduceProd(reduced, keepdims=0), to=x.dtype)
        dims = self.dims(x)
        reduced_dims = [dims[a] for a in (range(len(dims)) if axes is None else axes)]
        if all(isinstance(d, int) for d in reduced_dims):
            return self.const(D.product(reduced_dims), x.dtype)
        if axes is None:
            return self.Cast(self.Size(self.shape_source(x)), to=x.dtype)
        sizes = [self.size(x, a) for a in axes]
        total = sizes[0] if len(sizes) == 1 else self.ReduceProd(self.vector(sizes), keepdims=0)
        return self.Cast(self.Squeeze(total) if len(sizes) == 1 else total, to=x.dtype)

    def reshape(self, x: ir.Value, sizes: Sequence[Size]) -> ir.Value:
        """Reshape to the given sizes; one may be -1. A 0 means an empty axis, not "copy"."""
        return self.Reshape(x, self.vector(sizes), allowzero=1 if 0 in _ints(sizes) else None)

    def reshape_like(self, x: ir.Value, ref: ir.Value) -> ir.Value:
        """Reshape ``x`` to the shape of ``ref``, which must have the same number of elements."""
        if S.same_shape(x, ref):
            return x
        sizes = _constant_sizes(S.dims_of(x), S.dims_of(ref))
        out = self.Reshape(x, self.shape_of(ref) if sizes is None else sizes)
        out.shape = ref.shape
        return out

    def expand_like(self, x: ir.Value, ref: ir.Value) -> ir.Value:
        """Broadcast ``x`` to the shape of ``ref``."""
        if S.same_shape(x, ref):
            return x
        out = self.Expand(x, self.shape_of(ref))
        out.shape = ref.shape
        return out

    def sum_to(self, x: ir.Value, ref: ir.Value) -> ir.Value:
        """Undo broadcasting: sum ``x`` over the axes along which ``ref`` was broadcast."""
        if S.same_shape(x, ref):
            return x
        producer = x.producer()
        if producer is not None and is_op(producer, "Neg") and producer.inputs[0] is not None:
            return self.Neg(self.sum_to(producer.inputs[0], ref))  # negate the smaller tensor
        have, want = self.dims(x), self.dims(ref)
        lead = len(have) - len(want)
        if lead < 0:
            return self.reshape_like(x, ref)
        pairs = list(zip(have[lead:], want, strict=True))
        # Broadcast sizes are equal, or one of them is 1: an axis where ref has a static size above
        # 1 is never summed, whatever x has there.
        if all(a == b or b == 1 or (isinstance(b, int) and b > 1) for a, b in pairs):
            inner = [lead + i for i, (a, b) in enumerate(pairs) if b == 1 and a != 1]
            axes = [*range(lead), *inner]
            if not axes:
                return x
            if inner and lead:
                return self.reshape_like(self.ReduceSum(x, axes, keepdims=0), ref)
            out = self.ReduceSum(x, axes, keepdims=0 if lead else 1)
            out.shape = ref.shape
            return out
        # Some size is unknown until run time: sum every axis on which ref then has size 1.
        shape = self.shape_of(ref)
        padded = self.Concat(self.const([1] * lead), shape, axis=0) if lead else shape
        axes = self.Reshape(self.NonZero(self.Equal(padded, 1)), [-1])
        out = self.Reshape(self.ReduceSum(x, axes, keepdims=1, noop_with_empty_axes=1), shape)
        out.shape = ref.shape
        return out

    def restore_axes(
        self, y: ir.Value, x: ir.Value, axes: Sequence[int] | ir.Value | None, keepdims: int
    ) -> ir.Value:
        """Insert the axes that reducing ``x`` to ``y`` removed, with size 1."""
        if keepdims:
            return y
        if axes is None:
            return self.Reshape(y, [1] * self.rank(x)) if self.rank(x) else y
        return self.Unsqueeze(y, axes)

    def full(self, sizes: Sequence[Size] | ir.Value, value: float, dtype: ir.DataType) -> ir.Value:
        """Return a tensor of the given shape filled with one value."""
        shape = sizes if isinstance(sizes, ir.Value) else self.vector(sizes)
        # Not every runtime has a bfloat16 kernel for ConstantOfShape.
        if self.target.lacks("ConstantOfShape") or dtype == ir.DataType.BFLOAT16:
            return self.Expand(self.const(value, dtype), shape)
        filler = ir.tensor(np.full(1, value, dtype.numpy()), dtype=dtype)
        return self.ConstantOfShape(shape, value=filler)

    def sign(self, x: ir.Value) -> ir.Value:
        """Return the sign of each element, with comparisons where the target lacks Sign."""
        if not self.target.lacks("Sign"):
            return self.Sign(x)
        zero, one, minus = (self.const(v, x.dtype) for v in (0.0, 1.0, -1.0))
        return self.Where(self.Greater(x, zero), one, self.Where(self.Less(x, zero), minus, zero))

    def stop_gradient(self, x: ir.Value) -> ir.Value:
        """Return the value as a constant of the backward pass, as ``detach`` in torch."""
        y = self.Identity(x)
        node = y.producer()
        assert node is not None
        node.name = self.names.fresh(f"{y.name}.{STOP_GRADIENT}")
        return y

    def zeros_like(self, x: ir.Value) -> ir.Value:
        """Return zeros of the shape and dtype of ``x``."""
        return self._full_like(x, 0.0)

    def ones_like(self, x: ir.Value) -> ir.Value:
        """Return ones of the shape and dtype of ``x``."""
        return self._full_like(x, 1.0)

    def iota(self, size: Size) -> ir.Value:
        """Return the integers from 0 up to ``size``, exclusive, as an int64 vector."""
        if not isinstance(size, int):
            return self.Range(0, self.Squeeze(size, [0]), 1)
        if size > _MAX_CONSTANT_ELEMENTS:  # such as a declared batch of 2**32
            return self.Range(0, size, 1)
        return self.const(np.arange(size, dtype=np.int64))

    def eye(self, size: Size, dtype: ir.DataType) -> ir.Value:
        """Return the identity matrix."""
        if isinstance(size, int) and size * size <= _MAX_CONSTANT_ELEMENTS:
            return self.const(np.eye(size), dtype)
        count = self.iota(size)
        return self.Cast(self.Equal(self.Unsqueeze(count, [1]), count), to=dtype)

    def _full_like(self, x: ir.Value, value: float) -> ir.Value:
        assert x.dtype is not None
        if isinstance(x.type, ir.SequenceType):
            return self.map_sequences(lambda body, item: body._full_like(item, value), x)
        if x.shape is not None and len(x.shape) == 0:
            return self.const(value, x.dtype)
        out = self.full(self.shape_of(x), value, x.dtype)
        out.shape = x.shape
        return out

    def mT(self, x: ir.Value) -> ir.Value:  # noqa: N802 - numpy's name
        """Swap the last two axes."""
        r = self.rank(x)
        return self.Transpose(x, perm=[*range(r - 2), r - 1, r - 2])

    def move_axis(self, x: ir.Value, source: int, target: int) -> ir.Value:
        """Move one axis to another position."""
        r = self.rank(x)
        source, target = source % r, target % r
        if source == target:
            return x
        perm = [i for i in range(r) if i != source]
        perm.insert(target, source)
        return self.Transpose(x, perm=perm)

    def cast(self, x: ir.Value, dtype: ir.DataType | None) -> ir.Value:
        """Cast ``x`` to a dtype; return ``x`` itself if it has that dtype or ``dtype`` is None."""
        return x if x.dtype == dtype or dtype is None else self.Cast(x, to=dtype)


def _constant_sizes(have: Sequence[Dim] | None, want: Sequence[Dim] | None) -> list[int] | None:
    """Return a constant shape for Reshape: 0 copies a size, -1 stands in for one unknown size."""
    if want is None or 0 in want:
        return None
    sizes: list[int] = []
    for i, d in enumerate(want):
        if isinstance(d, int):
            sizes.append(d)
        elif have is not None and i < len(have) and d is not None and have[i] == d:
            sizes.append(0)
        else:
            sizes.append(-1)
    return sizes if sizes.count(-1) <= 1 else None


def _ints(sizes: Sequence[Size]) -> list[int]:
    return [s for s in sizes if isinstance(s, int)]


class Names:
    """Generator of names that are unique in a model."""

    def __init__(self, taken: set[str]) -> None:
        self.taken = taken
        self._next: dict[str, int] = {}

    def fresh(self, stem: str) -> str:
        """Return and reserve ``stem``, or ``stem_1``, ``stem_2`` ... if it is in use."""
        n = self._next.get(stem, 0)
        name = stem if n == 0 else f"{stem}_{n}"
        while name in self.taken:
            n += 1
            name = f"{stem}_{n}"
        self._next[stem] = n + 1
        self.taken.add(name)
        return name


class OpBuilder(ShapeOps):
    """Appends nodes to a graph; creates typed constants and infers shapes as it goes.

    Args:
        graph: the graph that receives the nodes.
        prefix: prefix of the names of new values.
        target: runtime to generate operators for, or its name.
        before: insert nodes before this one; append them if ``None``.
        parent: the builder to share names and constants with.
    """

    differentiated = True
    """Whether the emitted nodes will be differentiated; losses emit fewer nodes if not."""

    def __init__(
        self,
        graph: ir.Graph,
        prefix: str = "",
        *,
        target: str | Target = "cpu",
        before: ir.Node | None = None,
        parent: OpBuilder | None = None,
    ) -> None:
        self.graph = graph
        self.target = find(target)
        self.prefix = prefix
        self.position = before
        self.parent = parent
        if parent is None:
            self.opset: int = graph.opset_imports[""]
            self.root = graph
            self.names = Names(names_in(graph))
            self._constants: dict[tuple[Any, ...], ir.Value] = {}
            self._first_of: dict[tuple[Dim, ...], ir.Value] = {}
            for value in (*graph.inputs, *(y for node in graph for y in node.outputs)):
                self._record_shape(value)
        else:
            self.opset, self.root, self.names = parent.opset, parent.root, parent.names
            self._constants = parent._constants
            self._first_of = dict(parent._first_of)

    def __getattr__(self, op_type: str) -> Callable[..., Any]:
        if not op_type[:1].isupper():
            raise AttributeError(f"OpBuilder has no method {op_type!r}")
        return functools.partial(self.emit, op_type)

    def emit_contrib(
        self,
        op_type: str,
        inputs: Sequence[ir.Value],
        dtype: ir.DataType | None,
        dims: Sequence[Dim],
        **attributes: Any,
    ) -> ir.Value:
        """Append a ``com.microsoft`` operator; it has no schema, so the caller states its type."""
        self.graph.opset_imports.setdefault("com.microsoft", 1)
        attrs = ir.convenience.convert_attributes(attributes)
        y = self.append(ir.Node("com.microsoft", op_type, inputs, attrs))
        assert dtype is not None
        y.type = ir.TensorType(dtype)
        S.set_dims(y, dims)
        return y

    def emit(
        self, op_type: str, *inputs: Any, _outputs: int = 1, _domain: str = "", **attributes: Any
    ) -> Any:
        """Append one node; return its output, or a tuple of them if ``_outputs`` is above 1."""
        schema = S.schema_of(op_type, self.opset, _domain)
        if schema is None:
            raise AttributeError(
                f"no operator {op_type!r} in {_domain or 'ai.onnx'} opset {self.opset}"
            )
        unknown = attributes.keys() - schema.attributes.keys()
        if unknown:
            raise TypeError(
                f"{op_type} has no attribute {', '.join(sorted(unknown))}; "
                f"it has {', '.join(sorted(schema.attributes)) or 'none'}"
            )
        if not schema.min_input <= len(inputs) <= schema.max_input:
            raise TypeError(
                f"{op_type} takes {schema.min_input} to {schema.max_input} inputs, "
                f"got {len(inputs)}"
            )
        values = self._promote(schema, inputs)
        while values and values[-1] is None:
            values.pop()
        node = ir.Node(
            _domain,
            op_type,
            values,
            attributes=ir.convenience.convert_attributes(
                {k: v for k, v in attributes.items() if v is not None}
            ),
            num_outputs=_outputs,
            version=self.opset,
        )
        return self.append(node)

    def append(self, node: ir.Node) -> Any:
        """Append an existing node: name it, infer its shapes, return its output or outputs."""
        single = len(node.outputs) == 1
        for i, out in enumerate(node.outputs):
            out.name = self.names.fresh(
                f"{self.prefix}{node.op_type}" if single else f"{self.prefix}{node.op_type}.{i}"
            )
        node.name = node.outputs[0].name
        if self.position is None:
            self.graph.append(node)
        else:
            self.graph.insert_before(self.position, node)
        S.infer_node(node, self.opset)
        for out in node.outputs:
            self._record_shape(out)
        return node.outputs[0] if single else tuple(node.outputs)

    def _record_shape(self, value: ir.Value) -> None:
        dims = S.dims_of(value)
        if dims is not None and not isinstance(value.type, ir.SequenceType | ir.OptionalType):
            self._first_of.setdefault(dims, value)

    def shape_source(self, x: ir.Value) -> ir.Value:
        """Return the earliest value with the shape of ``x``, to read the shape from.

        A Shape node keeps its input alive. The earliest value, often a graph input, costs nothing;
        ``x`` itself could be a large activation that would otherwise be freed.
        """
        dims = S.dims_of(x)
        if dims is None or None in dims or self.position is not None:
            return x
        return self._first_of.get(dims, x)

    def _promote(self, schema: Any, inputs: Sequence[Any]) -> list[ir.Value | None]:
        """Turn Python scalars and lists into constants with the dtype the schema requires.

        Inputs that share a type variable of the schema share a dtype: in ``op.Mul(x, 0.5)`` the
        constant gets the dtype of ``x``.
        """
        formal = list(schema.inputs)
        formal += formal[-1:] * (len(inputs) - len(formal))
        bound = {
            f.type_str: x.dtype
            for f, x in zip(formal, inputs, strict=False)
            if isinstance(x, ir.Value)
        }
        values: list[ir.Value | None] = []
        for f, x in zip(formal, inputs, strict=False):
            if x is None or isinstance(x, ir.Value):
                values.append(x)
            else:
                values.append(self.const(x, bound.get(f.type_str)))
        return values

    def const(self, value: Any, dtype: ir.DataType | None = None) -> ir.Value:
        """Return a constant initializer; equal constants share one per graph.

        Without ``dtype``, Python integers become int64, Python floats float32, and arrays keep
        their dtype.
        """
        array = np.asarray(value)
        if dtype is None:
            dtype = (
                ir.DataType.from_numpy(array.dtype)
                if isinstance(value, np.ndarray | np.generic)
                else ir.DataType.INT64
                if array.dtype.kind in "iu" or array.size == 0
                else ir.DataType.BOOL
                if array.dtype.kind == "b"
                else ir.DataType.FLOAT
            )
        array = array.astype(dtype.numpy())
        key = (array.tobytes(), array.shape, dtype)
        cached = self._constants.get(key)
        # A pass may have removed or replaced the cached initializer since.
        if cached is None or self.root.initializers.get(cached.name or "") is not cached:
            name = self.names.fresh(f"{self.prefix}const")
            cached = self._constants[key] = self._initializer(name, array, dtype)
        return cached

    def _initializer(self, name: str, array: np.ndarray, dtype: ir.DataType) -> ir.Value:
        tensor = ir.Tensor(array, dtype=dtype, name=name)
        value = ir.Value(
            name=name, shape=ir.Shape(array.shape), type=ir.TensorType(dtype), const_value=tensor
        )
        self.root.register_initializer(value)
        S.mark_generated_constant(value)
        return value

    def input(self, name: str, dtype: ir.DataType, dims: Sequence[Dim] | None) -> ir.Value:
        """Add an input to the graph and return it."""
        value = ir.Value(name=self.names.fresh(name), type=ir.TensorType(dtype))
        S.set_dims(value, dims)
        self.graph.inputs.append(value)
        return value

    def body(self, like: Sequence[ir.Value] = (), stem: str = "in") -> OpBuilder:
        """Return a builder for a subgraph whose inputs have the types of ``like``.

        The subgraph may read values of the enclosing graphs. Set ``.graph.outputs`` when done and
        pass ``.graph`` as attribute: ``op.If(c, then_branch=a.graph, else_branch=b.graph)``.
        """
        graph = ir.Graph([], [], nodes=[], name=self.names.fresh(f"{self.prefix}body"))
        child = OpBuilder(graph, self.prefix, target=self.target, parent=self)
        for value in like:
            inner = ir.Value(
                name=self.names.fresh(f"{self.prefix}{stem}"), type=value.type, shape=value.shape
            )
            graph.inputs.append(inner)
        return child

    def before(self, node: ir.Node | None) -> OpBuilder:
        """Return a builder that inserts nodes before ``node`` and shares names and constants.

        ``None`` means the end of the graph.
        """
        return OpBuilder(self.graph, self.prefix, target=self.target, before=node, parent=self)

    def map_sequences(self, function: Callable[..., ir.Value], *sequences: ir.Value) -> ir.Value:
        """Map a function over sequences with SequenceMap; return the sequence of results.

        ``function(body, element, ...)`` emits nodes with ``body``. Elements at the same position of
        several sequences must have the same shape.
        """
        element = self._element_of(sequences[0])
        body = self.body([element] * len(sequences))
        item = function(body, *body.graph.inputs)
        body.graph.outputs.append(body.Identity(item) if item.producer() is None else item)
        return self.SequenceMap(*sequences, body=body.graph)

    def _element_of(self, sequence: ir.Value) -> ir.Value:
        """Return a value typed like one element, with symbolic names for the sizes that vary."""
        assert isinstance(sequence.type, ir.SequenceType)
        name = self.names.fresh(f"{self.prefix}element")
        element = ir.Value(name=name, type=sequence.type.elem_type)
        dims = S.dims_of(sequence)
        if dims is not None:
            named = [D.symbol(f"{name}.{i}") if d is None else d for i, d in enumerate(dims)]
            S.set_dims(element, named)
        return element

    def extra_output(self, node: ir.Node, index: int) -> ir.Value:
        """Return an optional output of an existing node, adding it if the node lacks it."""
        if len(node.outputs) <= index:
            node.resize_outputs(index + 1)
        out = node.outputs[index]
        if not out.name:
            out.name = self.names.fresh(f"{node.outputs[0].name}.{index}")
            # Inference runs for the new output only: it may know less about the others than the
            # file declares.
            declared = [
                (o, o.type, o.shape) for o in node.outputs if o is not out and o.type is not None
            ]
            S.infer_node(node, self.opset)
            for value, type_, shape in declared:
                value.type, value.shape = type_, shape
        return out


def names_in(graph: ir.Graph) -> set[str]:
    """Return the names of all values and nodes in a graph and its subgraphs."""
    names: set[str] = set()
    pending = [graph]
    while pending:
        g = pending.pop()
        names.update(v.name for v in g.inputs if v.name)
        names.update(g.initializers)
        for node in g:
            # onnxruntime rejects two nodes of one name, and new nodes are named like their outputs.
            if node.name:
                names.add(node.name)
            names.update(o.name for o in node.outputs if o.name)
            pending += subgraphs_of(node)
    return names


def plus(op: OpBuilder, a: Size, b: Size) -> Size:
    """Return ``a + b``."""
    if isinstance(a, int) and isinstance(b, int):
        return a + b
    if a == 0:
        return b
    return a if b == 0 else _simplified(op.Add(_value(op, a), _value(op, b)))


def minus(op: OpBuilder, a: Size, b: Size) -> Size:
    """Return ``a - b``."""
    if isinstance(a, int) and isinstance(b, int):
        return a - b
    if a is b:
        return 0
    return a if b == 0 else _simplified(op.Sub(_value(op, a), _value(op, b)))


def times(op: OpBuilder, a: Size, b: int) -> Size:
    """Return ``a * b``."""
    if isinstance(a, int):
        return a * b
    return a if b == 1 else _simplified(op.Mul(a, op.const([b])))


def max_size(op: OpBuilder, a: Size, low: int) -> Size:
    """Return ``max(a, low)``."""
    return max(a, low) if isinstance(a, int) else op.Max(a, op.const([low]))


def min_size(op: OpBuilder, a: Size, high: Size) -> Size:
    """Return ``min(a, high)``."""
    if isinstance(a, int) and isinstance(high, int):
        return min(a, high)
    return a if a == 0 else op.Min(_value(op, a), _value(op, high))


def element(op: OpBuilder, vector: ir.Value, i: int) -> Size:
    """Return element ``i`` of an integer vector of known length."""
    array = op.constant(vector)
    if array is not None:
        return int(array.reshape(-1)[i])
    part = vector if op.dims(vector) == (1,) else op.Slice(vector, [i], [i + 1])
    return op.cast(part, ir.DataType.INT64)


def _value(op: OpBuilder, a: Size) -> ir.Value:
    return op.const([a]) if isinstance(a, int) else a


def _simplified(a: ir.Value) -> Size:
    """Return an ``int`` if symbolic evaluation finds one, as in ``n + 1 - n``, else the value."""
    dims = S.symbolic_of(a)
    return dims[0] if dims is not None and len(dims) == 1 and isinstance(dims[0], int) else a


def runtime_zero(op: OpBuilder, x: ir.Value) -> ir.Value:
    """Return an int64 zero of shape [1] that runtimes cannot compute before ``x``.

    Runtimes fold or run early what reads only constants, and keep the result in memory. Adding this
    zero to such a node delays it until ``x`` exists. A runtime knows a static shape in advance, so
    for static shapes the zero is computed from an element of ``x``.
    """
    if op.static(x) is None or 0 in op.dims(x):
        return op.Min(op.Shape(x, start=0, end=1), op.const([0]))
    first = op.Slice(op.Reshape(x, [-1]), [0], [1])
    return op.Cast(op.Less(op.Abs(first), 0.0), to=ir.DataType.INT64)


def replace_value(old: ir.Value, new: ir.Value, uses: Sequence[tuple[ir.Node, int]]) -> None:
    """Redirect ``uses`` of ``old`` to ``new``, which also takes over the name of a graph output."""
    for node, index in uses:
        node.replace_input_with(index, new)
    if old.shape is not None:
        new.shape = old.shape
    graph, name = old.graph, old.name
    if not old.is_graph_output() or graph is None:
        return
    for i, y in enumerate(graph.outputs):
        if y is old:
            graph.outputs[i] = new
    old.name, new.name = f"{name}.inner", name


def copy_node_list(
    op: OpBuilder, nodes: Iterable[ir.Node], mapping: dict[ir.Value, ir.Value]
) -> None:
    """Append copies of nodes under fresh names.

    Args:
        op: the builder that receives the copies.
        nodes: the nodes to copy, in order.
        mapping: replacements for values that the nodes read; extended in place with the output of
            each copied node.
    """
    for node in nodes:
        copy = ir.Node(
            node.domain,
            node.op_type,
            [None if x is None else mapping.get(x, x) for x in node.inputs],
            attributes=[_copy_attribute(op, a, mapping) for a in node.attributes.values()],
            overload=node.overload,
            num_outputs=len(node.outputs),
            version=node.version,
        )
        copy.meta.update(node.meta)
        copy.name = op.names.fresh(f"{op.prefix}{node.op_type}")
        for old, new in zip(node.outputs, copy.outputs, strict=True):
            new.name = op.names.fresh(f"{op.prefix}{old.name}") if old.name else ""
            new.type, new.shape = old.type, old.shape
            new.meta.update(old.meta)
            mapping[old] = new
        if op.position is None:
            op.graph.append(copy)
        else:
            op.graph.insert_before(op.position, copy)


def copy_nodes(op: OpBuilder, graph: ir.Graph, mapping: dict[ir.Value, ir.Value]) -> list[ir.Value]:
    """Append copies of a graph's nodes under fresh names; return the copies of its outputs.

    Initializers are shared, not copied. ``mapping`` is as in :func:`copy_node_list` and usually
    replaces the inputs of the graph.
    """
    copy_node_list(op, graph, mapping)
    return [mapping.get(y, y) for y in graph.outputs]


def copy_node(op: OpBuilder, node: ir.Node, inputs: Sequence[ir.Value | None]) -> ir.Value:
    """Append a copy of a single-output node with other inputs; return its output."""
    attributes = list(node.attributes.values())
    copy = ir.Node(node.domain, node.op_type, inputs, attributes, version=node.version)
    copy.meta.update(node.meta)
    return op.append(copy)


def _copy_attribute(
    op: OpBuilder, attribute: ir.Attr, mapping: dict[ir.Value, ir.Value]
) -> ir.Attr:
    if attribute.type == ir.AttributeType.GRAPH:
        return ir.AttrGraph(attribute.name, _copy_graph(op, attribute.as_graph(), mapping))
    if attribute.type == ir.AttributeType.GRAPHS:
        graphs = [_copy_graph(op, g, mapping) for g in attribute.as_graphs()]
        return ir.AttrGraphs(attribute.name, graphs)
    return attribute


def _copy_graph(op: OpBuilder, graph: ir.Graph, mapping: dict[ir.Value, ir.Value]) -> ir.Graph:
    child = op.body(graph.inputs)
    inner = dict(mapping)
    inner.update(zip(graph.inputs, child.graph.inputs, strict=True))
    child.graph.outputs.extend(copy_nodes(child, graph, inner))
    return child.graph


_BUILDER: contextvars.ContextVar[OpBuilder | None] = contextvars.ContextVar("builder", default=None)


@contextlib.contextmanager
def python_operators(op: OpBuilder) -> Generator[None]:
    """Let values emit nodes with a builder inside this context: ``(y - t) ** 2``.

    onnx-ir calls one handler per process; it looks up the builder of this thread.
    """
    before: Any = ir.set_value_magic_handler(None)
    handler: Any = before if isinstance(before, _Operators) else _Operators(before)
    ir.set_value_magic_handler(handler)
    token = _BUILDER.set(op)
    try:
        yield
    finally:
        _BUILDER.reset(token)


class _Operators:
    """Calls the builder of the current context, else the handler that was there before."""

    def __init__(self, before: Any) -> None:
        self._before = before

    def __getattr__(self, op_type: str) -> Any:
        handler = _BUILDER.get() or self._before
        if handler is None:
            raise TypeError(
                f"{op_type} of graph values outside a loss or metric; call op.{op_type}(...)"
            )
        return getattr(handler, op_type)


def _operator(op_type: str, *, reflected: bool = False) -> Callable[..., Any]:
    def call(self: ir.Value, *other: Any) -> Any:
        operands = (*other, self) if reflected else (self, *other)
        return getattr(_Operators(None), op_type)(*operands)

    return call


def _power_of(self: ir.Value, base: Any) -> ir.Value:
    op = _BUILDER.get()
    # The base decides the type of Pow: a number takes that of the exponent.
    return _Operators(None).Pow(base if op is None else op.const(base, self.dtype), self)


# onnx-ir defines + - * / and negation only.
for _name, _method in (
    ("__pow__", _operator("Pow")),
    ("__rpow__", _power_of),
    ("__matmul__", _operator("MatMul")),
    ("__rmatmul__", _operator("MatMul", reflected=True)),
    ("__abs__", _operator("Abs")),
    ("__array_ufunc__", None),  # numpy leaves `array - value` to the value
):
    if _name not in vars(ir.Value):
        setattr(ir.Value, _name, _method)
