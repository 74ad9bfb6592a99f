"""Indices that say before a run where slices come from, so that gradients need no scattering.

Positions of tokens, their types and windows of pictures are looked up in small tables by indices
that files compute from constants, or repeat for each row of a batch. Slices that are read by the
same index are added up first, and a run of indices is a part of the table.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain import thresholds as T
from onnxtrain.graph import shapes as S
from onnxtrain.graph.nodes import is_op

_INTEGERS = frozenset({ir.DataType.INT32, ir.DataType.INT64})
_EXACT = frozenset(
    (
        *("Add", "Cast", "Concat", "ConstantOfShape", "Expand", "Flatten", "Gather"),
        *("GatherElements", "Identity", "Mul", "Neg", "Range", "Reshape", "Slice", "Squeeze"),
        *("Sub", "Tile", "Transpose", "Unsqueeze"),
    )
)


def known_integers(x: ir.Value | None, opset: int) -> np.ndarray | None:
    """Return the integers that a value holds in every run, ``None`` if they are not known."""
    if x is None or x.dtype not in _INTEGERS:
        return None
    chain = _chain(x)
    if chain is None:
        return None
    return S.constant_of(x) if not chain else _evaluate(x, chain, opset)


def repeats(x: ir.Value) -> tuple[ir.Value, int, list[int]] | None:
    """Return what an Expand repeats, how many axes are new, and which of its own are repeated."""
    node = x.producer()
    if node is None or not is_op(node, "Expand"):
        return None
    source = node.inputs[0]
    have, want = (None, None) if source is None else (S.dims_of(source), S.dims_of(x))
    if source is None or have is None or want is None:
        return None
    new = len(want) - len(have)
    pairs = list(zip(have, want[new:], strict=True))
    if any(a is None or (a != 1 and a != b) for a, b in pairs):
        return None
    return source, new, [i for i, (a, b) in enumerate(pairs) if a == 1 and b != 1]


def equal_axes(indices: np.ndarray) -> list[int]:
    """Return the axes along which all indices are the same."""
    return [
        axis
        for axis, size in enumerate(indices.shape)
        if size > 1 and np.all(indices == np.take(indices, [0], axis))
    ]


def inverse(indices: np.ndarray, size: Any) -> np.ndarray | None:
    """Return where each slice went, if each of them was read once."""
    if not isinstance(size, int) or indices.size != size or not size:
        return None
    flat = np.where(indices < 0, indices + size, indices).reshape(-1)
    order = np.argsort(flat)
    return order if np.array_equal(flat[order], np.arange(size)) else None


def _chain(x: ir.Value, most: int = 32) -> list[ir.Node] | None:
    """Return the nodes that compute integers from constants, in order; ``None`` if others do.

    More than ``most`` nodes are no list of positions.
    """
    order: list[ir.Node] = []
    seen: set[int] = set()

    def visit(value: ir.Value | None) -> bool:
        if value is None or S.constant_of(value) is not None:
            return value is None or value.dtype in _INTEGERS
        node = value.producer()
        if node is None or not is_op(node, *_EXACT) or value.dtype not in _INTEGERS:
            return False
        if id(node) in seen:
            return True
        seen.add(id(node))
        if len(seen) > most or not _small(value) or not all(map(visit, node.inputs)):
            return False
        order.append(node)
        return True

    return order if visit(x) else None


def _small(x: ir.Value) -> bool:
    sizes = S.dims_of(x)
    if sizes is None or not all(isinstance(d, int) for d in sizes):
        return False
    return int(np.prod([d for d in sizes if isinstance(d, int)], dtype=np.int64)) <= T.KNOWN_INDICES


def _evaluate(x: ir.Value, chain: list[ir.Node], opset: int) -> np.ndarray | None:
    made: dict[str, np.ndarray] = {}
    for node in chain:
        given: list[np.ndarray | None] = []
        for value in node.inputs:
            array = None if value is None else made.get(value.name or "")
            given.append(S.constant_of(value) if array is None else array)
        array = _run(node, given, opset)
        if array is None:
            return None
        made[node.outputs[0].name or ""] = array
    array = made[x.name or ""]
    same = x.shape is not None and tuple(array.shape) == tuple(x.shape)
    return array if same and array.dtype.kind == "i" else None


def _run(node: ir.Node, given: list[np.ndarray | None], opset: int) -> np.ndarray | None:
    if is_op(node, "GatherElements") and given[0] is not None and given[1] is not None:
        return _gather_elements(given[0], given[1], S.attributes_of(node, opset)["axis"])
    names = [x.name or "" for x in node.inputs if x is not None]
    feeds = dict(zip(names, (a for a in given if a is not None), strict=True))
    graph = onnx.GraphProto(name="indices", node=[ir.serde.serialize_node(node)])
    graph.input.extend(onnx.ValueInfoProto(name=name) for name in feeds)
    graph.output.append(onnx.ValueInfoProto(name=node.outputs[0].name))
    model = onnx.ModelProto(
        ir_version=10, graph=graph, opset_import=[onnx.OperatorSetIdProto(version=opset)]
    )
    from onnx.reference import ReferenceEvaluator  # large, and seldom needed

    try:
        (array,) = ReferenceEvaluator(model).run(None, feeds)
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
        return None  # the indices are then asked for at run time
    return np.asarray(array)


def _gather_elements(data: np.ndarray, indices: np.ndarray, axis: int) -> np.ndarray | None:
    """Return elements by their indices; the reference evaluator goes wrong beyond 32 of them."""
    axis %= data.ndim
    size = data.shape[axis]
    if indices.size and not (-size <= indices.min() and indices.max() < size):
        return None
    read = tuple(slice(None if a == axis else n) for a, n in enumerate(indices.shape))
    return np.take_along_axis(data[read], indices, axis)
