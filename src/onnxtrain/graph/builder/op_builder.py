"""Emit ONNX nodes by calling them: ``op.MatMul(a, b)``.

CamelCase attributes are ONNX operators and emit exactly one node. snake_case methods are helpers:
they may fold to a constant, emit several nodes, or none. So the capital letters of a rule show its
cost.

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

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder.shape_ops import ShapeOps
from onnxtrain.graph.shapes import dims as D
from onnxtrain.graph.shapes.dims import Dim
from onnxtrain.targets import Target, find


class Names:
    """Hands out names that no value of the model has."""

    def __init__(self, taken: set[str]) -> None:
        self.taken = taken
        self._next: dict[str, int] = {}

    def fresh(self, stem: str) -> str:
        """Return ``stem``, or ``stem_1``, ``stem_2`` ... if it is taken."""
        n = self._next.get(stem, 0)
        name = stem if n == 0 else f"{stem}_{n}"
        while name in self.taken:
            n += 1
            name = f"{stem}_{n}"
        self._next[stem] = n + 1
        self.taken.add(name)
        return name


class OpBuilder(ShapeOps):
    """Appends nodes to a graph, with typed constants and shapes inferred at once.

    Args:
        graph: where nodes go.
        prefix: what names of new values start with.
        target: the kind of runtime that forms are chosen for, or its name.
        before: nodes are inserted in front of this one; appended if ``None``.
    """

    differentiated = True
    """Whether gradients of what is written will be asked for; losses may do with less if not."""

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
                self._see(value)
        else:
            self.opset, self.root, self.names = parent.opset, parent.root, parent.names
            self._constants = parent._constants
            self._first_of = dict(parent._first_of)

    def __getattr__(self, op_type: str) -> Callable[..., Any]:
        if not op_type[:1].isupper():
            raise AttributeError(f"OpBuilder has no helper {op_type!r}")
        return functools.partial(self.emit, op_type)

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
        """Append a node made elsewhere; name it, infer its shapes, return its output or outputs."""
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
            self._see(out)
        return node.outputs[0] if single else tuple(node.outputs)

    def _see(self, value: ir.Value) -> None:
        dims = S.dims_of(value)
        if dims is not None and not isinstance(value.type, ir.SequenceType | ir.OptionalType):
            self._first_of.setdefault(dims, value)

    def shape_source(self, x: ir.Value) -> ir.Value:
        """Return the earliest value of the same shape: asking for that keeps nothing else alive."""
        dims = S.dims_of(x)
        if dims is None or None in dims or self.position is not None:
            return x
        return self._first_of.get(dims, x)

    def _promote(self, schema: Any, inputs: Sequence[Any]) -> list[ir.Value | None]:
        """Turn Python numbers and lists into constants of the dtype their neighbours have."""
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
        """Return a constant, stored once per graph.

        Without ``dtype``, whole numbers become int64, other numbers float32.
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
        known = self._constants.get(key)
        if known is None or self.root.initializers.get(known.name or "") is not known:
            # The second: a pass has put another in its place.
            name = self.names.fresh(f"{self.prefix}const")
            known = self._constants[key] = self._initializer(name, array, dtype)
        return known

    def _initializer(self, name: str, array: np.ndarray, dtype: ir.DataType) -> ir.Value:
        tensor = ir.Tensor(array, dtype=dtype, name=name)
        value = ir.Value(
            name=name, shape=ir.Shape(array.shape), type=ir.TensorType(dtype), const_value=tensor
        )
        self.root.register_initializer(value)
        S.mark_own_constant(value)
        return value

    def input(self, name: str, dtype: ir.DataType, dims: Sequence[Dim] | None) -> ir.Value:
        """Add an input to the graph and give it."""
        value = ir.Value(name=self.names.fresh(name), type=ir.TensorType(dtype))
        S.set_dims(value, dims)
        self.graph.inputs.append(value)
        return value

    def body(self, like: Sequence[ir.Value] = (), stem: str = "in") -> OpBuilder:
        """Return a builder for a subgraph whose inputs have the types of ``like``.

        Values of the enclosing graphs may be used inside. Set ``.graph.outputs`` when done and pass
        ``.graph`` as attribute: ``op.If(c, then_branch=a.graph, else_branch=b.graph)``.
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
        """Return a builder with the same names and constants whose nodes go in front of ``node``.

        ``None`` stands for the end of the graph.
        """
        return OpBuilder(self.graph, self.prefix, target=self.target, before=node, parent=self)

    def map_sequences(self, function: Callable[..., ir.Value], *sequences: ir.Value) -> ir.Value:
        """Return the sequence of ``function(body, element, ...)``; ``body`` is the builder to use.

        Elements at the same position of several sequences must have the same shape.
        """
        element = self._element_of(sequences[0])
        body = self.body([element] * len(sequences))
        item = function(body, *body.graph.inputs)
        body.graph.outputs.append(body.Identity(item) if item.producer() is None else item)
        return self.SequenceMap(*sequences, body=body.graph)

    def _element_of(self, sequence: ir.Value) -> ir.Value:
        """Return a value that has the type of one element, with names for the sizes that vary."""
        assert isinstance(sequence.type, ir.SequenceType)
        name = self.names.fresh(f"{self.prefix}element")
        element = ir.Value(name=name, type=sequence.type.elem_type)
        dims = S.dims_of(sequence)
        if dims is not None:
            named = [D.symbol(f"{name}.{i}") if d is None else d for i, d in enumerate(dims)]
            S.set_dims(element, named)
        return element

    def extra_output(self, node: ir.Node, index: int) -> ir.Value:
        """Return an optional output of an existing node, adding it if it is not there yet."""
        if len(node.outputs) <= index:
            node.resize_outputs(index + 1)
        out = node.outputs[index]
        if not out.name:
            out.name = self.names.fresh(f"{node.outputs[0].name}.{index}")
            known = [
                (o, o.type, o.shape) for o in node.outputs if o is not out and o.type is not None
            ]
            S.infer_node(node, self.opset)
            for value, type_, shape in known:
                value.type, value.shape = type_, shape
        return out


def names_in(graph: ir.Graph) -> set[str]:
    """Return every name of a value or a node in a graph and its subgraphs."""
    taken: set[str] = set()
    pending = [graph]
    while pending:
        g = pending.pop()
        taken.update(v.name for v in g.inputs if v.name)
        taken.update(g.initializers)
        for node in g:
            if node.name:  # onnxruntime refuses two nodes of one name, and an output may be renamed
                taken.add(node.name)
            taken.update(o.name for o in node.outputs if o.name)
            for attribute in node.attributes.values():
                if attribute.type == ir.AttributeType.GRAPH:
                    pending.append(attribute.as_graph())
                elif attribute.type == ir.AttributeType.GRAPHS:
                    pending.extend(attribute.as_graphs())
    return taken


__all__ = ["Names", "OpBuilder", "names_in"]
