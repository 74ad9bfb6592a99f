"""Plain descent inside the products that make gradients.

``p - rate * (a @ b)`` is one Gemm that starts from ``p``, with the rate on the smaller factor: the
gradient is never written, read or scaled. Rows that are added to zeros are added to ``p`` likewise.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping

import onnx

from onnxtrain.artifacts.update.vector_graphs import (
    GRADIENT,
    PARAMETER,
    VectorGraph,
    VectorGraphs,
    inner_names,
)
from onnxtrain.manifest import TensorSpec

_PREFIX = "descent/"
_ROLES = {"learning_rate": "lr", "step": "step", "grad_scale": "grad_scale"}
_TYPES: dict[int, str] = {
    onnx.TensorProto.FLOAT: "float32",
    onnx.TensorProto.INT64: "int64",
    onnx.TensorProto.INT32: "int32",
}
_FEW = 8
"""Parameters that may be left over for all to be updated within the training graph."""
Node = onnx.NodeProto


@dataclasses.dataclass(frozen=True)
class FusedSgd:
    """A training graph that gives new values of some parameters instead of their gradients."""

    train: onnx.ModelProto
    updates: VectorGraphs
    """Those of all other parameters."""
    results: dict[str, str]
    """The output of ``train`` for each such parameter."""
    controls: tuple[TensorSpec, ...]
    """Inputs that ``train`` takes besides."""


def fuse_sgd(
    train: onnx.ModelProto, updates: VectorGraphs, gradients: Mapping[str, str]
) -> FusedSgd | None:
    """Return the graphs with updates fused where that can be done; ``None`` if it can nowhere.

    Args:
        train: plain gradients; not changed.
        updates: of all parameters.
        gradients: the outputs of ``train`` by the names that ``updates`` has for them.
    """
    model = onnx.ModelProto()
    model.CopyFrom(train)
    part = _Part(model.graph)
    groups: list[VectorGraph] = []
    results: dict[str, str] = {}
    rates: dict[str, None] = {}
    left: list[tuple[VectorGraph, dict[str, str]]] = []
    for group in updates.groups:
        rate = _rate(group)
        for member in group.members:
            if rate is not None and part.fold(member[PARAMETER], gradients[member[GRADIENT]], rate):
                results[member[PARAMETER]] = f"{_PREFIX}{member[PARAMETER]}"
                rates[rate] = None
            else:
                left.append((group, member))
    if not results:
        return None
    if len(left) <= _FEW and all(_rate(group) is not None for group, _ in left):
        # Two nodes for each are quicker than another run.
        for group, member in left:
            rate, name = _rate(group) or "", member[PARAMETER]
            part.append(name, gradients[member[GRADIENT]], rate)
            results[name] = f"{_PREFIX}{name}"
            rates[rate] = None
        left = []
    for group in updates.groups:
        members = tuple(m for g, m in left if g is group)
        if members:
            groups.append(dataclasses.replace(group, members=members))
    controls = part.finish(updates.scalars, list(rates))
    return FusedSgd(model, VectorGraphs(tuple(groups), updates.scalars), results, controls)


class _Part:
    """A graph in which gradients give way to new values."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self.graph = graph
        self.outputs = {y.name: y for y in graph.output}
        self.makers = {y: node for node in graph.node for y in node.output}
        self.readers = collections.Counter(
            x for node in graph.node for x in (*node.input, *inner_names(node))
        )
        known = (*graph.input, *graph.value_info)
        self.ranks = {v.name: len(v.type.tensor_type.shape.dim) for v in known}
        self.drop: set[str] = set()
        self.fresh: list[Node] = []

    def fold(self, name: str, gradient: str, rate: str) -> bool:
        """Replace a gradient by the new value of its parameter; ``False`` if it is made otherwise.

        Args:
            name: of the parameter.
            gradient: the output.
            rate: the scalar that it is to be multiplied with.
        """
        last = self.makers[gradient]
        maker = self.makers.get(last.input[0]) if last.op_type == "Identity" else None
        if maker is None or self.readers[maker.output[0]] > 1 or maker.output[0] in self.outputs:
            return False
        info = self.outputs[gradient]
        nodes = self._product(maker, name, info) or self._rows(maker, name)
        if not nodes:
            return False
        self.drop.update((gradient, maker.output[0]))
        self._add(nodes, name, info, rate)
        return True

    def append(self, name: str, gradient: str, rate: str) -> None:
        """Replace a gradient by the new value of its parameter, as it is spelled elsewhere."""
        small = f"{_PREFIX}{name}/change"
        scaled = Node(op_type="Mul", input=[gradient], output=[small])
        info = self.outputs[gradient]
        self._add([scaled, Node(op_type="Add", input=[name, small])], name, info, rate)

    def _add(self, nodes: list[Node], name: str, info: onnx.ValueInfoProto, rate: str) -> None:
        nodes[0].input.append(f"{_PREFIX}minus/{rate}")
        nodes[-1].output.append(f"{_PREFIX}{name}")
        self.fresh += nodes
        info.name = f"{_PREFIX}{name}"

    def _product(self, maker: Node, name: str, info: onnx.ValueInfoProto) -> list[Node]:
        plain = maker.op_type == "Gemm" and (len(maker.input) == 2 or not maker.input[2])
        matrices = maker.op_type == "MatMul" and all(self.ranks.get(x) == 2 for x in maker.input)
        if not plain and not matrices:
            return []
        rows, columns = (d.dim_value for d in info.type.tensor_type.shape.dim)
        a, b = maker.input[:2]
        small = f"{_PREFIX}{name}/factor"
        factors = [small, b] if rows <= columns else [a, small]
        scaled = Node(op_type="Mul", input=[a if rows <= columns else b], output=[small])
        attributes = [x for x in maker.attribute if x.name != "beta"]
        return [scaled, Node(op_type="Gemm", input=[*factors, name], attribute=attributes)]

    def _rows(self, maker: Node, name: str) -> list[Node]:
        zeros = self.makers.get(maker.input[0]) if maker.op_type == "ScatterND" else None
        added = any(a.name == "reduction" and a.s == b"add" for a in maker.attribute)
        if zeros is None or not added or zeros.op_type != "ConstantOfShape":
            return []
        if any(any(a.t.raw_data) or any(a.t.float_data) for a in zeros.attribute):
            return []
        small = f"{_PREFIX}{name}/rows"
        scaled = Node(op_type="Mul", input=[maker.input[2]], output=[small])
        inputs = [name, maker.input[1], small]
        return [scaled, Node(op_type="ScatterND", input=inputs, attribute=maker.attribute)]

    def finish(self, scalars: onnx.ModelProto, rates: list[str]) -> tuple[TensorSpec, ...]:
        """Write the nodes; return the inputs that they need besides."""
        before, controls = _scalars(scalars, rates)
        kept = [node for node in self.graph.node if node.output[0] not in self.drop]
        used = {x for node in (*kept, *self.fresh) for x in (*node.input, *inner_names(node))}
        kept = [n for n in kept if n.op_type != "ConstantOfShape" or n.output[0] in used]
        del self.graph.node[:]
        self.graph.node.extend((*before, *kept, *self.fresh))
        self.graph.initializer.extend(_renamed_tensors(scalars))
        self.graph.input.extend(controls)
        return tuple(_spec(x) for x in controls)


def _rate(group: VectorGraph) -> str | None:
    """Return the scalar of an update that is ``parameter - gradient * scalar``."""
    nodes = group.model.graph.node
    if len(nodes) != 2 or len(group.scalars) != 1 or set(group.members[0]) != {PARAMETER, GRADIENT}:
        return None
    scaled, last = nodes
    (rate,) = group.scalars
    plain = (scaled.op_type, last.op_type) == ("Mul", "Sub")
    if not plain or set(scaled.input) != {GRADIENT, rate}:
        return None
    return rate if list(last.input) == [PARAMETER, scaled.output[0]] else None


def _scalars(
    model: onnx.ModelProto, rates: list[str]
) -> tuple[list[Node], list[onnx.ValueInfoProto]]:
    """Return the nodes that compute the negative rates, and the inputs that they read."""
    nodes: list[Node] = []
    for node in model.graph.node:
        copy = Node()
        copy.CopyFrom(node)
        copy.ClearField("name")
        for names in (copy.input, copy.output):
            names[:] = [n and _PREFIX + n for n in names]
        nodes.append(copy)
    nodes += [
        Node(op_type="Neg", input=[_PREFIX + r], output=[f"{_PREFIX}minus/{r}"]) for r in rates
    ]
    used = {x for node in nodes for x in node.input}
    return nodes, [
        onnx.ValueInfoProto(name=_PREFIX + x.name, type=x.type)
        for x in model.graph.input
        if _PREFIX + x.name in used
    ]


def _renamed_tensors(model: onnx.ModelProto) -> list[onnx.TensorProto]:
    tensors: list[onnx.TensorProto] = []
    for tensor in model.graph.initializer:
        copy = onnx.TensorProto()
        copy.CopyFrom(tensor)
        copy.name = _PREFIX + tensor.name
        tensors.append(copy)
    return tensors


def _spec(x: onnx.ValueInfoProto) -> TensorSpec:
    kind = x.type.tensor_type
    sizes = tuple(d.dim_value for d in kind.shape.dim)
    return TensorSpec(x.name, _TYPES[kind.elem_type], sizes, _ROLES[x.name.removeprefix(_PREFIX)])
