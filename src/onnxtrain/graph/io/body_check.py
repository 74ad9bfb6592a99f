"""Whether the bodies of If, Loop and Scan take and give what their nodes do."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from onnxtrain.graph.io.limits import quote

_FIRST = 2  # what a Loop has in front of its states: the count and the condition


def body_misfits(node: ir.Node) -> Iterator[str]:
    """Return what is wrong with the numbers of inputs and outputs of a node's bodies."""
    check = _CHECKS.get(node.op_type) if node.domain in ("", "ai.onnx") else None
    return iter(()) if check is None else check(node)


def _body(node: ir.Node, name: str) -> ir.Graph | None:
    attribute = node.attributes.get(name)
    if attribute is None or attribute.is_ref() or attribute.type != ir.AttributeType.GRAPH:
        return None
    return attribute.as_graph()


def _counts(what: str, has: int, needs: int) -> Iterator[str]:
    if has != needs:
        yield f"the body has {has} {what}, should be {needs}"


def _outputs_twice(body: ir.Graph | None) -> Iterator[str]:
    """Return a line on a value that leaves a body twice: onnxruntime then fills one of the two."""
    outputs = [] if body is None else list(body.outputs)
    twice = next((y for i, y in enumerate(outputs) if y in outputs[:i]), None)
    if twice is not None:
        name = quote(twice.name or "")
        yield f"the body gives {name} twice, which onnxruntime gets wrong (Identity would help)"


def _if(node: ir.Node) -> Iterator[str]:
    for name in ("then_branch", "else_branch"):
        body = _body(node, name)
        if body is not None and len(body.outputs) < len(node.outputs):
            yield f"{name} has {len(body.outputs)} outputs, should be {len(node.outputs)}"
        yield from _outputs_twice(body)


def _loop(node: ir.Node) -> Iterator[str]:
    body = _body(node, "body")
    if body is None:
        return
    yield from _counts("inputs", len(body.inputs), max(_FIRST, len(node.inputs)))
    states = len(node.inputs) - _FIRST
    least = 1 + max(states, len(node.outputs))
    if len(body.outputs) < least:
        yield f"the body has {len(body.outputs)} outputs, should be {least}"


def _scan(node: ir.Node) -> Iterator[str]:
    body, count = _body(node, "body"), node.attributes.get("num_scan_inputs")
    if body is None or count is None or count.is_ref() or count.type != ir.AttributeType.INT:
        return
    batched = len(node.inputs) == len(body.inputs) + 1
    inputs = len(node.inputs) - batched  # of opset 8, with lengths in front
    if not 1 <= count.as_int() <= inputs:
        yield f"num_scan_inputs is {count.as_int()}, of {inputs} inputs"
        return
    yield from _counts("inputs", len(body.inputs), inputs)
    least = max(len(node.outputs), inputs - count.as_int())
    if len(body.outputs) < least:
        yield f"the body has {len(body.outputs)} outputs, should be {least}"
    yield from _outputs_twice(body)
    passed = next((y for y in body.outputs if y in body.inputs), None)
    if passed is not None:
        name = quote(passed.name or "")
        yield f"the body gives back its input {name}, which onnxruntime gets wrong (use Identity)"
    axes = node.attributes.get("scan_input_axes")
    if axes is not None and not axes.is_ref() and len(axes.as_ints()) != count.as_int():
        yield f"{len(axes.as_ints())} scan_input_axes for {count.as_int()} inputs"


_CHECKS = {"If": _if, "Loop": _loop, "Scan": _scan}
