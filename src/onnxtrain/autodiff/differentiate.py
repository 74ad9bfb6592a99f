"""The reverse sweep: append the gradients of a graph to the graph.

``differentiate`` walks the nodes backwards, asks the registry for the rule of each node, and
accumulates the gradients of every value. A rule does not check which gradients are wanted (unused
nodes are removed afterwards), and does not handle accumulation or broadcasting.

The second half of the file serves rules of nodes with bodies (If, Loop, Scan): a reverse sweep
inside a body, and additional body outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from onnxtrain.autodiff.rule_registry import (
    NO_GRADIENT,
    Undefined,
    blocks_gradient,
    call_rule,
    find_rule,
    has_user_rule,
    is_not_differentiable,
    is_straight_through,
)
from onnxtrain.errors import OnnxTrainError, UndifferentiableError, exclusion_hint
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.nodes import captured, op_key
from onnxtrain.graph.shapes import dims as D
from onnxtrain.graph.simplify import RANDOM_OPS

_SMALL_INTEGERS = (
    "INT2",
    "UINT2",
    "INT4",
    "UINT4",
    "INT8",
    "UINT8",
    "INT16",
    "UINT16",
    "FLOAT4E2M1",
)
_EIGHT_BITS = ("FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ")
QUANTIZED_DTYPES = frozenset(
    ir.DataType[name]
    for name in (*_SMALL_INTEGERS, *_EIGHT_BITS)
    if name in ir.DataType.__members__
)
"""Dtypes that QuantizeLinear returns. Gradients flow through them only with a user's rule or
``straight_through=True``."""


def carries_gradient(x: ir.Value) -> bool:
    """Return whether a value is a float tensor, or a sequence or optional of them."""
    inner = x.type
    while isinstance(inner, ir.SequenceType | ir.OptionalType):
        inner = inner.elem_type
    return isinstance(inner, ir.TensorType) and inner.dtype in S.FLOATS


def accumulate(op: OpBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    """Return the sum of two gradients of one value; sequences are added elementwise."""
    if not isinstance(a.type, ir.SequenceType):
        return op.Add(a, b)
    return op.map_sequences(lambda body, x, y: body.Add(x, y), a, b)


_MAX_LISTED = 10  # nodes in a message


def differentiate(
    op: OpBuilder, cotangents: Mapping[ir.Value, ir.Value], wrt: Sequence[ir.Value]
) -> dict[ir.Value, ir.Value | None]:
    """Append the reverse sweep of ``op.graph``; return the gradient of each ``wrt``.

    Args:
        op: a builder over the graph. It decides where new nodes are inserted.
        cotangents: the gradient of the loss with respect to some values of the graph.
        wrt: inputs, initializers, values of outer graphs or intermediate values.

    Returns:
        For each ``wrt`` its gradient, or ``None`` if the gradient is zero.

    Raises:
        UndifferentiableError: nodes on the path have no rule; the message lists them all.
    """
    nodes = list(op.graph)
    live = reachable_values(nodes, wrt)
    needed = ancestor_nodes(nodes, cotangents)
    path = [
        n
        for n in nodes
        if n in needed
        and any(y in live for y in n.outputs)
        and any(x in live for x in differentiable_inputs(n))
    ]
    missing = [n for n in path if find_rule(n) is None and not blocks_gradient(n)]
    if missing:
        raise UndifferentiableError(_explain(missing, cotangents))
    # Declared zero gradients end a path; nodes that are an error to differentiate do not.
    passable = [n for n in nodes if not blocks_gradient(n) or is_not_differentiable(n)]
    refused = blocking_nodes(passable, live, cotangents)
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
        except S.INVALID_NODE_ERRORS as error:
            if has_user_rule(node):
                raise
            raise UndifferentiableError(S.invalid_node_message(node, error)) from error
        for i, (x, dx) in enumerate(zip(sources, input_grads, strict=False)):
            if x is None or dx is None or not wanted[i] or i in rule.constant_inputs:
                continue
            if isinstance(dx, Undefined):
                undefined.append((node, i, dx.why))
                continue
            _set_type_and_shape(dx, x, node)
            grads[x] = accumulate(op, grads[x], dx) if x in grads else dx
    if undefined:
        raise UndifferentiableError(_explain_undefined(undefined))
    return {x: grads.get(x) for x in wrt}


def raise_if_blocked(
    nodes: Sequence[ir.Node], values: Sequence[ir.Value], results: Sequence[ir.Value]
) -> None:
    """Raise if non-differentiable nodes stand between ``values`` and ``results``.

    Raises:
        UndifferentiableError: the message lists those nodes.
    """
    if not values or not any(is_not_differentiable(n) for n in nodes):
        return
    refused = blocking_nodes(nodes, reachable_values(nodes, values), results)
    if refused:
        raise UndifferentiableError(_explain_refusal(refused))


def blocking_nodes(
    nodes: Sequence[ir.Node],
    live: set[ir.Value],
    outputs: Mapping[ir.Value, ir.Value] | Sequence[ir.Value],
) -> list[ir.Node]:
    """Return the non-differentiable nodes on a path from ``live`` values to ``outputs``."""
    ancestors = ancestor_nodes(nodes, outputs)
    return [
        n
        for n in nodes
        if n in ancestors and is_not_differentiable(n) and live.intersection(n.inputs)
    ]


def reachable_values(nodes: Sequence[ir.Node], wrt: Sequence[ir.Value]) -> set[ir.Value]:
    """Return the values that depend differentiably on ``wrt``."""
    live = set(wrt)
    for node in nodes:
        if not blocks_gradient(node) and any(x in live for x in differentiable_inputs(node)):
            live.update(y for y in node.outputs if carries_gradient(y))
            # Behind a straight-through rule, integers carry gradients too.
            if _is_straight_through(node, live):
                live.update(y for y in node.outputs if y.dtype in QUANTIZED_DTYPES)
    return live


def _is_straight_through(node: ir.Node, live: set[ir.Value]) -> bool:
    return (
        has_user_rule(node)
        or is_straight_through(node)
        or any(x in live and x.dtype in QUANTIZED_DTYPES for x in node.inputs if x is not None)
    )


def ancestor_nodes(
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
    """Return the inputs of a node, including captured values, that may get a gradient."""
    rule = find_rule(node)
    constant = rule.constant_inputs if rule is not None else {}
    return [
        x
        for i, x in enumerate(_sources(node))
        if x is not None
        and i not in constant
        and (carries_gradient(x) or x.dtype in QUANTIZED_DTYPES)
    ]


def _sources(node: ir.Node) -> list[ir.Value | None]:
    """Return the inputs of a node, then the values that its subgraphs capture, in a fixed order."""
    return [*node.inputs, *captured(node)]


def _set_type_and_shape(dx: ir.Value, x: ir.Value, node: ir.Node) -> None:
    """Give the gradient ``dx`` the dtype and shape of ``x``; raise if they contradict."""
    have, want = S.dims_of(dx), S.dims_of(x)
    wrong = dx.dtype not in S.FLOATS if x.dtype in QUANTIZED_DTYPES else dx.dtype != x.dtype
    if wrong or (have is not None and want is not None and D.shapes_differ(have, want)):
        error = AssertionError(
            f"rule for {op_key(node)}: {S.describe_value(dx)} for {S.describe_value(x)}"
        )
        if has_user_rule(node):
            raise error
        raise UndifferentiableError(S.invalid_node_message(node, error)) from error
    if dx.producer() is not None and x.shape is not None and have != want:
        dx.shape = x.shape


def _explain(missing: Sequence[ir.Node], outputs: Mapping[ir.Value, ir.Value]) -> str:
    kinds = sorted({op_key(n) for n in missing})
    goal = ", ".join(repr(y.name) for y in outputs)
    lines = [
        f"no gradient rule for {len(kinds)} operator(s) on the path to {goal}: {', '.join(kinds)}"
    ]
    lines += [f"  node {n.name!r}: {S.describe(n)}" for n in missing[:10]]
    if len(missing) > 10:
        lines.append(f"  ... and {len(missing) - 10} more")
    lines.append(
        f"hint: {exclusion_hint('the parameters upstream of these nodes')}, "
        "or register a rule with onnxtrain.register_vjp"
    )
    return "\n".join(lines)


def _explain_refusal(refused: Sequence[ir.Node]) -> str:
    lines = ["no gradient flows through these nodes, which depend on parameters:"]
    lines += [f"  node {n.name!r}: {S.describe(n)}: {NO_GRADIENT[op_key(n)]}" for n in refused[:10]]
    if len(refused) > 10:
        lines.append(f"  ... and {len(refused) - 10} more")
    lines.append(
        f"hint: build(..., straight_through=True) trains through quantizers; or "
        f"{exclusion_hint('the parameters upstream of these nodes')}, or register a rule with "
        f"onnxtrain.register_vjp({op_key(refused[0])!r})"
    )
    return "\n".join(lines)


def _explain_undefined(undefined: Sequence[tuple[ir.Node, int, str]]) -> str:
    lines, names = [], dict[str, None]()
    for node, i, why in undefined[:_MAX_LISTED]:
        lines.append(f"no gradient for input {i} of node {node.name!r}: {why}")
        lines.append(f"  {S.describe(node)}")
    if len(undefined) > _MAX_LISTED:
        lines.append(f"... and {len(undefined) - _MAX_LISTED} more")
    for node, i, _ in undefined:
        x = _sources(node)[i]
        names[repr(i) if x is None else x.name or ""] = None
    lines.append(f"hint: {exclusion_hint(', '.join(names) + ' and what they depend on')}")
    return "\n".join(lines)


OptionalValue = ir.Value | None


def differentiate_body(
    op: OpBuilder,
    outputs: Sequence[ir.Value],
    dys: Sequence[OptionalValue],
    wrt: Sequence[ir.Value],
) -> list[OptionalValue]:
    """Append the reverse sweep of a body; return the gradient of each ``wrt``."""
    cotangents: dict[ir.Value, ir.Value] = {}
    for y, dy in zip(outputs, dys, strict=False):
        if dy is not None and S.is_float(y):
            cotangents[y] = accumulate(op, cotangents[y], dy) if y in cotangents else dy
    grads = differentiate(op, cotangents, wrt)
    return [grads[x] for x in wrt]


def as_body_outputs(
    op: OpBuilder, grads: Sequence[OptionalValue], wrt: Sequence[ir.Value]
) -> list[ir.Value]:
    """Return gradients as body outputs: separate values that the body computes."""
    own = []
    for g, x in zip(grads, wrt, strict=True):
        out = op.Identity(op.zeros_like(x) if g is None else g)
        out.type, out.shape = x.type, x.shape
        own.append(out)
    return own


def append_identities(op: OpBuilder, body: ir.Graph, values: Sequence[ir.Value]) -> None:
    """Add outputs to a body."""
    inner = OpBuilder(body, op.prefix, target=op.target, parent=op)
    for value in values:
        body.outputs.append(inner.Identity(value))


def name_outputs(op: OpBuilder, node: ir.Node) -> None:
    """Name the unnamed outputs of a node."""
    for i, out in enumerate(node.outputs):
        if not out.name:
            out.name = op.names.fresh(f"{node.outputs[0].name}.{i}")


def reject_randomness(node: ir.Node) -> None:
    """Raise if a body of the node has random operators."""
    for attribute in node.attributes.values():
        if attribute.type != ir.AttributeType.GRAPH:
            continue
        for inner in attribute.as_graph().all_nodes():
            if inner.op_type in RANDOM_OPS:
                raise UndifferentiableError(
                    f"node {inner.name!r} ({inner.op_type}) draws random numbers inside "
                    f"{node.op_type} {node.name!r}; the backward pass could not draw the same\n"
                    "hint: draw them outside and pass them in"
                )


def with_shape_of(d: ir.Value, x: ir.Value) -> ir.Value:
    """Give the gradient ``d`` the shape of ``x``; return it."""
    d.shape = x.shape
    return d
