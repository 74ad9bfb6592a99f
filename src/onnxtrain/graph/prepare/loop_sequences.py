"""Loops that append to a sequence, as loops with a scan output."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.captured_values import captured
from onnxtrain.graph.shapes import dims as D


def as_scan_outputs(
    op: OpBuilder, node: ir.Node, empty: set[ir.Value]
) -> tuple[ir.Node, dict[ir.Value, ir.Value]]:
    """Rewrite what a Loop only appends to, if all elements have one shape.

    Args:
        op: puts nodes in front of the Loop.
        node: the Loop.
        empty: sequences known to be empty.

    Returns:
        The Loop, a new one if something was done, and for each sequence it gave the value that now
        stands for it, with the stack of its elements.
    """
    body, outer = node.attributes["body"].as_graph(), _outer_symbols(node)
    chosen = {
        i: element
        for i in range(2, len(node.inputs))
        if node.inputs[i] in empty and (element := _appended(node, body, i)) is not None
    }
    if not chosen:
        return node, {}
    inner = OpBuilder(body, op.prefix, parent=op)
    scans = [inner.Identity(element) for element in chosen.values()]
    for i in sorted(chosen, reverse=True):
        append = body.outputs.pop(i - 1).producer()
        assert append is not None
        body.remove(append, safe=True)
        body.inputs.pop(i)
    body.outputs.extend(scans)
    kept = [i for i in range(len(node.outputs)) if i + 2 not in chosen]
    missing = len(body.outputs) - 1 - len(kept) - len(scans)  # trailing outputs nobody asked for
    loop = ir.Node(
        "",
        "Loop",
        [x for i, x in enumerate(node.inputs) if i not in chosen],
        attributes=[ir.AttrGraph("body", body)],
        num_outputs=len(kept) + missing + len(scans),
        version=node.version,
        name=node.name,
    )
    assert node.graph is not None
    node.attributes.pop("body")
    node.graph.insert_before(node, loop)
    for old, new in zip((node.outputs[i] for i in kept), loop.outputs, strict=False):
        new.name, new.type, new.shape = old.name, old.type, old.shape
        old.name = op.names.fresh(f"{old.name}.replaced") if old.name else old.name
        old.replace_all_uses_with(new, replace_graph_outputs=True)
    for out in loop.outputs[len(kept) :]:
        out.name = op.names.fresh(f"{op.prefix}{node.op_type}.stack")
    stacks: dict[ir.Value, ir.Value] = {}
    for i, element, stack in zip(chosen, scans, loop.outputs[-len(scans) :], strict=True):
        stack.type = element.type
        known = [None if D.symbols(d) - outer else d for d in S.dims_of(element) or ()]
        names = [D.symbol(f"{stack.name}.{k}") for k in range(len(known) + 1)]
        sizes = [b if a is None else a for a, b in zip(known, names[1:], strict=True)]
        S.set_dims(stack, [names[0], *sizes])
        old, new = node.outputs[i - 2], op.SplitToSequence(stack, axis=0, keepdims=0)
        if old.is_graph_output():
            name, old.name = old.name, op.names.fresh(f"{old.name}.replaced")
            new.name = name
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        stacks[new] = stack
    node.graph.remove(node, safe=True)
    return loop, stacks


def _outer_symbols(node: ir.Node) -> set[str]:
    """Return the symbolic sizes that mean the same inside and outside of a Loop."""
    return {
        symbol
        for x in (*node.inputs, *captured(node))
        if x is not None
        for d in S.dims_of(x) or ()
        for symbol in D.symbols(d)
    }


def _appended(node: ir.Node, body: ir.Graph, i: int) -> ir.Value | None:
    """Return what each step appends to a carried sequence, if that is all it does with it."""
    before, after = body.inputs[i], body.outputs[i - 1]
    append = after.producer()
    if append is None or append.op_type != "SequenceInsert" or append.graph is not body:
        return None
    at_end = len(append.inputs) < 3 or append.inputs[2] is None
    if append.inputs[0] is not before or not at_end:
        return None
    if len(before.uses()) != 1 or after.uses() or list(body.outputs).count(after) != 1:
        return None
    element = append.inputs[1]
    assert element is not None
    dims, outer = S.dims_of(element), _outer_symbols(node)
    fixed = dims is not None and all(
        dims[k] is not None and D.symbols(dims[k]) <= outer
        for k in _free_axes(node.outputs[i - 2], len(dims))
    )
    return element if fixed else None


def _free_axes(sequence: ir.Value, rank: int) -> list[int]:
    """Return the axes along which the elements of a sequence may differ.

    Elements that are only concatenated agree on all other axes, or the model would not run.
    """
    uses = list(sequence.uses())
    if sequence.is_graph_output() or any(use.node.op_type != "ConcatFromSequence" for use in uses):
        return list(range(rank))
    free = set()
    for use in uses:
        new_axis = use.node.attributes.get("new_axis")
        if new_axis is None or not new_axis.as_int():
            free.add(use.node.attributes["axis"].as_int() % rank if rank else 0)
    return sorted(free) if rank else []
