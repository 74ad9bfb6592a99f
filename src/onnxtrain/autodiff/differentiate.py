"""The reverse sweep: gradients of a graph, appended to the graph.

Read this first. ``differentiate`` walks the nodes backwards, asks the registry for each node's
rule, and adds up what flows into every value. A rule need not care which gradients are wanted
(unused nodes are removed afterwards), how they are accumulated, or about broadcasting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from onnxtrain.autodiff.accumulate import QUANTISED, accumulate, carries_gradient
from onnxtrain.autodiff.registry import (
    NO_GRADIENT,
    Undefined,
    call_rule,
    find_rule,
    has_own_rule,
    is_refused,
    is_stopped,
    is_straight_through,
    key_of,
)
from onnxtrain.errors import OnnxTrainError, UndifferentiableError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.captured_values import captured
from onnxtrain.graph.shapes import dims as D
from onnxtrain.way_out import leave_out

_SHOWN = 10  # nodes in a message


def differentiate(
    op: OpBuilder, cotangents: Mapping[ir.Value, ir.Value], wrt: Sequence[ir.Value]
) -> dict[ir.Value, ir.Value | None]:
    """Append the reverse sweep of ``op.graph``; return the gradient of each ``wrt``.

    Args:
        op: a builder over the graph; new nodes go where it puts them.
        cotangents: the gradient of the loss with respect to some values of the graph.
        wrt: values whose gradient is wanted: inputs, initializers, outer values or anything inside.

    Returns:
        For each ``wrt`` its gradient, ``None`` where nothing flows (the gradient is zero).

    Raises:
        UndifferentiableError: naming all nodes on the way that have no rule.
    """
    nodes = list(op.graph)
    live = reached_from(nodes, wrt)
    needed = needed_for(nodes, cotangents)
    path = [
        n
        for n in nodes
        if n in needed
        and any(y in live for y in n.outputs)
        and any(x in live for x in differentiable_inputs(n))
    ]
    missing = [n for n in path if find_rule(n) is None and not is_stopped(n)]
    if missing:
        raise UndifferentiableError(_explain(missing, cotangents))
    flowing = needed_for([n for n in nodes if not is_stopped(n) or is_refused(n)], cotangents)
    refused = [n for n in nodes if n in flowing and is_refused(n) and live.intersection(n.inputs)]
    if refused:
        raise UndifferentiableError(_explain_refusal(refused))

    undefined: list[tuple[ir.Node, int, str]] = []
    grads: dict[ir.Value, ir.Value] = {y: dy for y, dy in cotangents.items() if y in live}
    for node in reversed(path):
        dys = [grads.get(y) for y in node.outputs]
        rule = find_rule(node)
        if rule is None or all(dy is None for dy in dys):
            continue
        sources = _sources(node)
        wanted = tuple(x is not None and x in live for x in sources)
        try:
            input_grads = call_rule(rule, op, node, dys, wanted)
        except OnnxTrainError:
            raise
        except S.UNFIT as error:
            if has_own_rule(node):
                raise
            raise UndifferentiableError(S.unfit(node, error)) from error
        for i, (x, dx) in enumerate(zip(sources, input_grads, strict=False)):
            if x is None or dx is None or not wanted[i] or i in rule.constant_inputs:
                continue
            if isinstance(dx, Undefined):
                undefined.append((node, i, dx.why))
                continue
            _stamp(dx, x, node)
            grads[x] = accumulate(op, grads[x], dx) if x in grads else dx
    if undefined:
        raise UndifferentiableError(_explain_undefined(undefined))
    return {x: grads.get(x) for x in wrt}


def refuse_behind(
    nodes: Sequence[ir.Node], values: Sequence[ir.Value], results: Sequence[ir.Value]
) -> None:
    """Raise if it is refused nodes that keep values from results.

    Raises:
        UndifferentiableError: naming those nodes.
    """
    if not values or not any(is_refused(n) for n in nodes):
        return
    live, flowing = reached_from(nodes, values), needed_for(nodes, results)
    refused = [n for n in nodes if n in flowing and is_refused(n) and live.intersection(n.inputs)]
    if refused:
        raise UndifferentiableError(_explain_refusal(refused))


def reached_from(nodes: Sequence[ir.Node], wrt: Sequence[ir.Value]) -> set[ir.Value]:
    """Return the values that depend differentiably on ``wrt``."""
    live = set(wrt)
    for node in nodes:
        if not is_stopped(node) and any(x in live for x in differentiable_inputs(node)):
            live.update(y for y in node.outputs if carries_gradient(y))
            # A straight-through rule of the user's makes integers carry on.
            live.update(y for y in node.outputs if y.dtype in QUANTISED and _stands_in(node, live))
    return live


def _stands_in(node: ir.Node, live: set[ir.Value]) -> bool:
    return (
        has_own_rule(node)
        or is_straight_through(node)
        or any(x in live and x.dtype in QUANTISED for x in node.inputs if x is not None)
    )


def needed_for(
    nodes: Sequence[ir.Node], values: Mapping[ir.Value, ir.Value] | Sequence[ir.Value]
) -> set[ir.Node]:
    """Return the nodes that ``values`` depend on."""
    wanted, needed = set(values), set()
    for node in reversed(nodes):
        if any(y in wanted for y in node.outputs):
            needed.add(node)
            wanted.update(x for x in _sources(node) if x is not None)
    return needed


def differentiable_inputs(node: ir.Node) -> list[ir.Value]:
    """Return the inputs of a node, captured ones included, through which a gradient may flow."""
    rule = find_rule(node)
    constant = rule.constant_inputs if rule is not None else {}
    return [
        x
        for i, x in enumerate(_sources(node))
        if x is not None and i not in constant and (carries_gradient(x) or x.dtype in QUANTISED)
    ]


def _sources(node: ir.Node) -> list[ir.Value | None]:
    """Return the inputs of a node, then what its subgraphs capture, in a fixed order."""
    return [*node.inputs, *captured(node)]


def _stamp(dx: ir.Value, x: ir.Value, node: ir.Node) -> None:
    """Record that a gradient has the type and shape of what it is the gradient of."""
    have, want = S.dims_of(dx), S.dims_of(x)
    wrong = dx.dtype not in S.FLOATS if x.dtype in QUANTISED else dx.dtype != x.dtype
    if wrong or (have is not None and want is not None and D.clash(have, want)):
        error = AssertionError(
            f"rule for {key_of(node)}: {S.describe_value(dx)} for {S.describe_value(x)}"
        )
        if has_own_rule(node):
            raise error
        raise UndifferentiableError(S.unfit(node, error)) from error
    if dx.producer() is not None and x.shape is not None and have != want:
        dx.shape = x.shape


def _explain(missing: Sequence[ir.Node], outputs: Mapping[ir.Value, ir.Value]) -> str:
    kinds = sorted({key_of(n) for n in missing})
    goal = ", ".join(repr(y.name) for y in outputs)
    lines = [
        f"no gradient rule for {len(kinds)} operator(s) on the path to {goal}: {', '.join(kinds)}"
    ]
    lines += [f"  node {n.name!r}: {S.describe(n)}" for n in missing[:10]]
    if len(missing) > 10:
        lines.append(f"  ... and {len(missing) - 10} more")
    lines.append(
        f"hint: {leave_out('the parameters upstream of these nodes')}, "
        "or give a rule with onnxtrain.register_vjp"
    )
    return "\n".join(lines)


def _explain_refusal(refused: Sequence[ir.Node]) -> str:
    lines = ["no gradient flows through nodes that depend on what is differentiated:"]
    lines += [f"  node {n.name!r}: {S.describe(n)}: {NO_GRADIENT[key_of(n)]}" for n in refused[:10]]
    if len(refused) > 10:
        lines.append(f"  ... and {len(refused) - 10} more")
    lines.append(
        f"hint: build(..., straight_through=True) trains through quantisers; or "
        f"{leave_out('the parameters upstream of these nodes')}, or register a rule with "
        f"onnxtrain.register_vjp({key_of(refused[0])!r})"
    )
    return "\n".join(lines)


def _explain_undefined(undefined: Sequence[tuple[ir.Node, int, str]]) -> str:
    lines, names = [], dict[str, None]()
    for node, i, why in undefined[:_SHOWN]:
        lines.append(f"no gradient for input {i} of node {node.name!r}: {why}")
        lines.append(f"  {S.describe(node)}")
    if len(undefined) > _SHOWN:
        lines.append(f"... and {len(undefined) - _SHOWN} more")
    for node, i, _ in undefined:
        x = _sources(node)[i]
        names[repr(i) if x is None else x.name or ""] = None
    lines.append(f"hint: {leave_out(', '.join(names) + ' and what they depend on')}")
    return "\n".join(lines)
