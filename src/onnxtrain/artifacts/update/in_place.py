"""Which new values a graph may write over old ones while it runs."""

from __future__ import annotations

import onnx

from onnxtrain.manifest import ModelSpec

_GRAPHS = (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS)
_ELEMENTWISE = frozenset({"Add", "Sub", "Mul", "Div", "Identity", "Max", "Min", "Where"})


def overwritable(model: onnx.ModelProto, spec: ModelSpec) -> set[str]:
    """Return the inputs that the outputs which replace them may overwrite.

    That is so if every node that reads the old value has run before the node that writes the new
    one, in any order the runtime may choose: it is that node or one of its ancestors.
    """
    nodes = model.graph.node
    if any(a.type in _GRAPHS for node in nodes for a in node.attribute):
        return set()  # a subgraph reads what its node does not list
    makers = {y: i for i, node in enumerate(nodes) for y in node.output}
    readers: dict[str, set[int]] = {}
    for i, node in enumerate(nodes):
        for x in node.input:
            readers.setdefault(x, set()).add(i)
    inputs = set()
    for t in spec.outputs:
        writer = makers.get(t.name)
        if t.feeds is None or writer is None:
            continue
        # The writer itself must be elementwise, or it could overwrite what it still has to read.
        last = nodes[writer]
        if t.feeds in last.input and last.op_type not in _ELEMENTWISE:
            continue
        if readers.get(t.feeds, set()) <= _ancestors(model, makers, writer):
            inputs.add(t.feeds)
    return inputs


def _ancestors(model: onnx.ModelProto, makers: dict[str, int], node: int) -> set[int]:
    ancestors, pending = {node}, [node]
    while pending:
        for x in model.graph.node[pending.pop()].input:
            maker = makers.get(x)
            if maker is not None and maker not in ancestors:
                ancestors.add(maker)
                pending.append(maker)
    return ancestors
