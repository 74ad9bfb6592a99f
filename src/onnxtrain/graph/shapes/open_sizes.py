"""What is left open in a model: sizes of its inputs, and ranks that depend on them."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph.captured_values import subgraphs_of

_ROOT = "onnxtrain.root"  # key in Graph.meta: the graph with the inputs that users know
_OURS = ("prepare/", "grad/", "step/")  # what names of ours start with


def open_sizes(graph: ir.Graph) -> list[str]:
    """Return the sizes of a graph's inputs that are no numbers: ``batch``, or ``x[0]``."""
    names: dict[str, None] = {}
    for x in graph.inputs:
        for axis, d in enumerate(x.shape or ()):
            if not isinstance(d, int):
                names[d.value or f"{x.name}[{axis}]"] = None
    return list(names)


def note_root(root: ir.Graph) -> None:
    """Record which graph its bodies belong to, for messages."""
    for node in root.all_nodes():
        for body in subgraphs_of(node):
            body.meta[_ROOT] = root


def unknown_rank(x: ir.Value) -> str:
    """Return a message on a value of unknown rank: where it was lost, and what would help."""
    lost = _first_lost(x)
    node = lost.producer()
    lines = [f"the rank of value {_name(lost)!r} is unknown"]
    if lost is not x and not _is_ours(x):
        lines[0] += f", and so is that of {x.name!r}"
    if node is not None:
        lines.append(f"  node {node.name!r}: {_why(node)}")
    graph = node.graph if node is not None else lost.graph
    sizes = open_sizes(graph.meta.get(_ROOT, graph)) if isinstance(graph, ir.Graph) else []
    if sizes:
        example = ", ".join(f"{name!r}: 1" for name in sizes[:4])
        lines.append(f"hint: fix sizes that decide on it, dims={{{example}}}, say")
    else:
        lines.append("hint: give the model's inputs shapes, symbolic sizes are enough")
    return "\n".join(lines)


def _first_lost(x: ir.Value) -> ir.Value:
    """Return the value at which the rank got lost: what its node reads is known."""
    seen = {x}
    while True:
        node = x.producer()
        unknown = [
            v
            for v in (node.inputs if node is not None else ())
            if v is not None and v.shape is None and v not in seen and _is_tensor(v)
        ]
        if not unknown:
            return x
        x = unknown[0]
        seen.add(x)


def _is_tensor(x: ir.Value) -> bool:
    return x.type is None or isinstance(x.type, ir.TensorType)


def _is_ours(x: ir.Value) -> bool:
    return (x.name or "").startswith(_OURS)


def _name(x: ir.Value) -> str:
    """Return the name of a value, or of the nearest one before it that the file has."""
    while _is_ours(x):
        node = x.producer()
        before = next((v for v in node.inputs if v is not None), None) if node else None
        if before is None:
            break
        x = before
    return x.name or ""


def _why(node: ir.Node) -> str:
    if node.op_type == "If":
        return "the branches of If give different ranks"
    if node.op_type == "Squeeze" and len(node.inputs) < 2:
        return "Squeeze without axes drops every size that is 1"
    if node.op_type == "Reshape":
        return "the shape that Reshape gets is computed"
    return f"{node.op_type} leaves it open"
