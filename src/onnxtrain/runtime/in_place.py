"""Whether a graph may write new values over old ones while it runs."""

from __future__ import annotations

import onnx

from onnxtrain.manifest import ModelSpec

_ELEMENTWISE = frozenset({"Add", "Sub", "Mul", "Div", "Identity", "Max", "Min", "Where"})


def may_update_in_place(model: onnx.ModelProto, spec: ModelSpec) -> bool:
    """Tell whether each new value may overwrite the old one.

    It may if every node that reads the old value has run before the node that writes the new one,
    in any order the runtime may choose: it is that node or one of its ancestors.
    """
    nodes = model.graph.node
    if any(a.type in (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS)
           for node in nodes for a in node.attribute):  # fmt: skip
        return False  # a subgraph reads what its node does not list
    makers = {y: i for i, node in enumerate(nodes) for y in node.output}
    readers: dict[str, set[int]] = {}
    for i, node in enumerate(nodes):
        for x in node.input:
            readers.setdefault(x, set()).add(i)
    for t in spec.outputs:
        if t.feeds is None:
            continue
        writer = makers.get(t.name)
        if writer is None:
            return False
        if not readers.get(t.feeds, set()) <= _ancestors(model, makers, writer):
            return False
        # The writer itself must be elementwise, or it could overwrite what it still has to read.
        node = nodes[writer]
        if t.feeds in node.input and node.op_type not in _ELEMENTWISE:
            return False
    return True


def _ancestors(model: onnx.ModelProto, makers: dict[str, int], node: int) -> set[int]:
    found, pending = {node}, [node]
    while pending:
        for x in model.graph.node[pending.pop()].input:
            maker = makers.get(x)
            if maker is not None and maker not in found:
                found.add(maker)
                pending.append(maker)
    return found
