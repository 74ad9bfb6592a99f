"""If, Scan and Loop.

Backward bodies recompute the forward body of one step from what entered it, then run its reverse
sweep. What entered each step of a Scan or Loop is saved by the forward node in additional scan
outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.autodiff.flow import accumulate
from onnxtrain.autodiff.registry import vjp_multi
from onnxtrain.errors import UndifferentiableError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.copying import copy_nodes
from onnxtrain.graph.scopes import captured
from onnxtrain.graph.simplify import RANDOM

Maybe = ir.Value | None


@vjp_multi("If")
def if_(op, dys, cond, *, node):
    """The taken branch again, then its reverse sweep; zeros for what the branch does not read."""
    outer = captured(node)
    _refuse_randomness(node)
    wanted = [x for x in outer if S.is_float(x)]
    branches = {}
    for name in ("then_branch", "else_branch"):
        body = op.body()
        outputs = copy_nodes(body, node.attributes[name].as_graph(), {})
        grads = _sweep(body, outputs, dys, wanted)
        body.graph.outputs.extend(_own(body, grads, wanted))
        branches[name] = body.graph
    if not wanted:
        return (None,)
    found = op.If(cond, **branches, _outputs=len(wanted))
    by_value = dict(zip(wanted, found if len(wanted) > 1 else [found], strict=True))
    for x, dx in by_value.items():
        dx.shape = x.shape
    return None, *(by_value.get(x) for x in outer)


@vjp_multi("Scan")
def scan(op, dys, *inputs, node):
    """A Scan over the steps in reverse, which carries the gradients of the states."""
    _refuse_randomness(node)
    body = node.attributes["body"].as_graph()
    n = len(inputs) - node.attributes["num_scan_inputs"].as_int()
    scans = inputs[n:]
    outer = captured(node)
    axes_in = _ints(node, "scan_input_axes", len(scans))
    turns_in = _ints(node, "scan_input_directions", len(scans))
    n_out = len(body.outputs) - n
    axes_out = _ints(node, "scan_output_axes", n_out)[: len(node.outputs) - n]
    turns_out = _ints(node, "scan_output_directions", n_out)[: len(node.outputs) - n]

    saved = _save_states(op, node, body, n)
    floats = [i for i in range(n) if S.is_float(inputs[i])]
    wanted_scans = [i for i, x in enumerate(scans) if S.is_float(x)]
    wanted_outer = [x for x in outer if S.is_float(x)]
    given = [i for i in range(n, len(dys)) if dys[i] is not None]

    carried = [
        *(dys[i] if dys[i] is not None else op.zeros_like(inputs[i]) for i in floats),
        *(op.zeros_like(x) for x in wanted_outer),
    ]
    step = op.body([*carried, *body.inputs, *(body.outputs[i] for i in given)])
    ins = list(step.graph.inputs)
    d_state, d_outer = ins[: len(floats)], ins[len(floats) : len(carried)]
    entering = ins[len(carried) : len(carried) + len(inputs)]
    states, slices = entering[:n], entering[n:]
    d_outputs: list[Maybe] = [None] * len(body.outputs)
    for i, d in zip(floats, d_state, strict=True):
        d_outputs[i] = d
    for i, d in zip(given, ins[len(carried) + len(inputs) :], strict=True):
        d_outputs[i] = d
    mapping = dict(zip(body.inputs, entering, strict=True))
    outputs = copy_nodes(step, body, mapping)
    wrt = [*(states[i] for i in floats), *(slices[i] for i in wanted_scans), *wanted_outer]
    grads = _own(step, _sweep(step, outputs, d_outputs, wrt), wrt)
    d_now, d_slices, d_step = (
        grads[: len(floats)],
        grads[len(floats) : len(floats) + len(wanted_scans)],
        grads[len(floats) + len(wanted_scans) :],
    )
    totals = [accumulate(step, a, b) for a, b in zip(d_outer, d_step, strict=True)]
    step.graph.outputs.extend([*d_now, *totals, *d_slices])

    directions = [1] * n + [1 - t for t in turns_in] + [1 - turns_out[i - n] for i in given]
    found = op.Scan(
        *carried,
        *saved,
        *scans,
        *(dys[i] for i in given),
        body=step.graph,
        num_scan_inputs=n + len(scans) + len(given),
        scan_input_axes=[0] * n + axes_in + [axes_out[i - n] for i in given],
        scan_input_directions=directions,
        scan_output_axes=[axes_in[i] for i in wanted_scans] or None,
        scan_output_directions=[1 - turns_in[i] for i in wanted_scans] or None,
        _outputs=len(carried) + len(wanted_scans),
    )
    found = list(found) if isinstance(found, tuple) else [found]
    result: list[Maybe] = [None] * len(inputs)
    for i, d in zip(floats, found, strict=False):
        result[i] = _shaped(d, inputs[i])
    for i, d in zip(wanted_scans, found[len(carried) :], strict=True):
        result[n + i] = _shaped(d, scans[i])
    by_value = dict(zip(wanted_outer, found[len(floats) : len(carried)], strict=True))
    return *result, *(None if x not in by_value else _shaped(by_value[x], x) for x in outer)


@vjp_multi("Loop")
def loop(op, dys, trip_count, cond, *states, node):
    """A Loop over the steps that ran, in reverse, which carries the gradients of the states."""
    _refuse_randomness(node)
    body = node.attributes["body"].as_graph()
    n = len(states)
    outer = captured(node)
    _refuse_changing_shapes(node, body, states)
    saved, steps = _save_loop_states(op, node, body, n)
    floats = [i for i in range(n) if S.is_float(states[i])]
    wanted_outer = [x for x in outer if S.is_float(x)]
    given = [i for i in range(n, len(dys)) if dys[i] is not None]
    count = op.Squeeze(op.Shape(steps), [0])

    carried = [
        *(dys[i] if dys[i] is not None else op.zeros_like(states[i]) for i in floats),
        *(op.zeros_like(x) for x in wanted_outer),
    ]
    step = op.body([*body.inputs[:2], *carried])
    turn, go, *rest = step.graph.inputs
    d_state, d_outer = rest[: len(floats)], rest[len(floats) :]
    at = step.Sub(step.Sub(count, 1), turn)
    d_outputs: list[Maybe] = [None] * len(body.outputs)
    for i, d in zip(floats, d_state, strict=True):
        d_outputs[i + 1] = d
    for i in given:
        d_outputs[i + 1] = step.Gather(dys[i], at, axis=0)
    before = []
    for i, stack in enumerate(saved):
        value = step.Gather(stack, at, axis=0)
        value.shape = states[i].shape
        before.append(value)
    mapping = dict(zip(body.inputs, [at, go, *before], strict=True))
    outputs = copy_nodes(step, body, mapping)
    wrt = [*(before[i] for i in floats), *wanted_outer]
    grads = _own(step, _sweep(step, outputs, d_outputs, wrt), wrt)
    totals = [accumulate(step, a, b) for a, b in zip(d_outer, grads[len(floats) :], strict=True)]
    step.graph.outputs.extend([step.Identity(go), *grads[: len(floats)], *totals])
    found = op.Loop(count, op.const(True), *carried, body=step.graph, _outputs=len(carried))
    found = list(found) if isinstance(found, tuple) else [found]
    result: list[Maybe] = [None] * (n + 2)
    for i, d in zip(floats, found, strict=False):
        result[i + 2] = _shaped(d, states[i])
    by_value = dict(zip(wanted_outer, found[len(floats) :], strict=True))
    return *result, *(None if x not in by_value else _shaped(by_value[x], x) for x in outer)


def _sweep(
    op: OpBuilder, outputs: Sequence[ir.Value], dys: Sequence[Maybe], wrt: Sequence[ir.Value]
) -> list[Maybe]:
    """Run the reverse sweep of a body; give the gradient of each ``wrt``."""
    from onnxtrain.autodiff.differentiate import differentiate  # the driver calls rules

    cotangents: dict[ir.Value, ir.Value] = {}
    for y, dy in zip(outputs, dys, strict=False):
        if dy is not None and S.is_float(y):
            cotangents[y] = accumulate(op, cotangents[y], dy) if y in cotangents else dy
    grads = differentiate(op, cotangents, wrt)
    return [grads[x] for x in wrt]


def _own(op: OpBuilder, grads: Sequence[Maybe], wrt: Sequence[ir.Value]) -> list[ir.Value]:
    """Give gradients as values that a body may return: made inside it, each of its own."""
    own = []
    for g, x in zip(grads, wrt, strict=True):
        out = op.Identity(op.zeros_like(x) if g is None else g)
        out.type, out.shape = x.type, x.shape
        own.append(out)
    return own


def _save_states(op: OpBuilder, node: ir.Node, body: ir.Graph, n: int) -> list[ir.Value]:
    """Make a Scan give what entered each step, as additional scan outputs; give those."""
    key = "onnxtrain.saved"
    if key in node.meta:
        return node.meta[key]
    first = len(node.outputs)
    if first < len(body.outputs):  # trailing outputs were omitted
        node.resize_outputs(len(body.outputs))
        first = len(body.outputs)
    scan_outputs = first - n
    for name in ("scan_output_axes", "scan_output_directions"):
        if name in node.attributes:
            values = [*node.attributes[name].as_ints(), *[0] * n]
            node.attributes[name] = ir.AttrInt64s(name, values[: scan_outputs + n])
    _append_identities(op, body, body.inputs[:n])
    node.resize_outputs(first + n)
    length = _scan_length(node, n)
    for i, state in enumerate(body.inputs[:n]):
        out = node.outputs[first + i]
        out.name = op.names.fresh(f"{node.outputs[0].name}.state{i}")
        outer = node.inputs[i]
        assert outer is not None
        out.type = state.type or outer.type
        dims = S.dims_of(outer)
        S.set_dims(out, None if dims is None else [length, *dims])
    _name_outputs(op, node)
    node.meta[key] = list(node.outputs[first : first + n])
    return node.meta[key]


def _save_loop_states(
    op: OpBuilder, node: ir.Node, body: ir.Graph, n: int
) -> tuple[list[ir.Value], ir.Value]:
    """Make a Loop give what entered each step and the step numbers; give those."""
    key = "onnxtrain.saved"
    if key in node.meta:
        return node.meta[key]
    first = len(body.outputs) - 1
    if len(node.outputs) < first:
        node.resize_outputs(first)
    _append_identities(op, body, [body.inputs[0], *body.inputs[2:]])
    node.resize_outputs(first + n + 1)
    steps = node.outputs[first]
    steps.name = op.names.fresh(f"{node.outputs[0].name}.steps")
    steps.type = ir.TensorType(ir.DataType.INT64)
    length = S.D.symbol(steps.name)
    S.set_dims(steps, [length])
    for i, state in enumerate(node.inputs[2:]):
        assert state is not None
        out = node.outputs[first + 1 + i]
        out.name = op.names.fresh(f"{node.outputs[0].name}.state{i}")
        out.type = state.type
        dims = S.dims_of(state)
        S.set_dims(out, None if dims is None else [length, *dims])
    _name_outputs(op, node)
    node.meta[key] = (list(node.outputs[first + 1 :]), steps)
    return node.meta[key]


def _append_identities(op: OpBuilder, body: ir.Graph, values: Sequence[ir.Value]) -> None:
    inner = OpBuilder(body, op.prefix, target=op.target, parent=op)
    for value in values:
        body.outputs.append(inner.Identity(value))


def _name_outputs(op: OpBuilder, node: ir.Node) -> None:
    for i, out in enumerate(node.outputs):
        if not out.name:
            out.name = op.names.fresh(f"{node.outputs[0].name}.{i}")


def _scan_length(node: ir.Node, n: int) -> S.Dim:
    axes = _ints(node, "scan_input_axes", len(node.inputs) - n)
    first = node.inputs[n]
    dims = None if first is None else S.dims_of(first)
    return None if dims is None else dims[axes[0]]


def _refuse_randomness(node: ir.Node) -> None:
    for attribute in node.attributes.values():
        if attribute.type != ir.AttributeType.GRAPH:
            continue
        for inner in attribute.as_graph().all_nodes():
            if inner.op_type in RANDOM:
                raise UndifferentiableError(
                    f"node {inner.name!r} ({inner.op_type}) draws random numbers inside "
                    f"{node.op_type} {node.name!r}; the backward pass could not draw the same\n"
                    "hint: draw them outside and pass them in"
                )


def _refuse_changing_shapes(node: ir.Node, body: ir.Graph, states: Sequence[ir.Value]) -> None:
    for i, state in enumerate(states):
        inner, after = body.inputs[i + 2], body.outputs[i + 1]
        if not isinstance(state.type, ir.TensorType):
            raise UndifferentiableError(
                f"Loop {node.name!r} carries {S.describe_value(state)}: "
                "only tensors of a fixed shape can be differentiated through"
            )
        if S.dims_of(after) is None or S.dims_of(after) != S.dims_of(inner):
            raise UndifferentiableError(
                f"Loop {node.name!r} may change the shape of what it carries: "
                f"{S.describe_value(inner)} becomes {S.describe_value(after)}\n"
                "hint: declare a fixed shape, or unroll the loop"
            )


def _ints(node: ir.Node, name: str, n: int) -> list[int]:
    attribute = node.attributes.get(name)
    return [0] * n if attribute is None else list(attribute.as_ints())


def _shaped(d: ir.Value, x: ir.Value) -> ir.Value:
    d.shape = x.shape
    return d
