"""If and Loop.

Backward bodies recompute the forward body of one step from what entered it, then run its reverse
sweep. What entered each step of a Loop is saved by the forward node in additional scan outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.autodiff.accumulate import accumulate
from onnxtrain.autodiff.registry import vjp_multi
from onnxtrain.autodiff.subgraphs import (
    append_identities,
    name_outputs,
    own,
    refuse_randomness,
    shaped,
    sweep,
)
from onnxtrain.errors import UndifferentiableError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.builder.copy_nodes import copy_nodes
from onnxtrain.graph.captured_values import captured
from onnxtrain.graph.shapes import dims as D
from onnxtrain.way_out import leave_out

Maybe = ir.Value | None


@vjp_multi("If")
def if_(op, dys, cond, *, node):
    """The taken branch again, then its reverse sweep; zeros for what the branch does not read."""
    outer = captured(node)
    refuse_randomness(node)
    wanted = [x for x in outer if S.is_float(x)]
    branches = {}
    for name in ("then_branch", "else_branch"):
        body = op.body()
        outputs = copy_nodes(body, node.attributes[name].as_graph(), {})
        grads = sweep(body, outputs, dys, wanted)
        body.graph.outputs.extend(own(body, grads, wanted))
        branches[name] = body.graph
    if not wanted:
        return (None,)
    branch_grads = op.If(cond, **branches, _outputs=len(wanted))
    by_value = dict(zip(wanted, branch_grads if len(wanted) > 1 else [branch_grads], strict=True))
    for x, dx in by_value.items():
        dx.shape = x.shape
    return None, *(by_value.get(x) for x in outer)


@vjp_multi("Loop")
def loop(op, dys, trip_count, cond, *states, node):
    """A Loop over the steps that ran, in reverse, which carries the gradients of the states."""
    refuse_randomness(node)
    body = node.attributes["body"].as_graph()
    n = len(states)
    outer = captured(node)
    _refuse_changing_shapes(node, body, states)
    saved, steps = _save_loop_states(op, node, body, n)
    floats = [i for i in range(n) if S.is_float(states[i])]
    wanted_outer = [x for x in outer if S.is_float(x)]
    given = [i for i in range(n, len(dys)) if dys[i] is not None]
    count = op.Squeeze(op.Shape(steps, start=0, end=1), [0])

    carried = [
        *(dys[i] if dys[i] is not None else op.zeros_like(states[i]) for i in floats),
        *(op.zeros_like(x) for x in wanted_outer),
    ]
    step = op.body([op.const(0), op.const(True), *carried])
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
    # A file may have the number of the step and the condition as vectors of one.
    first = [
        step.Reshape(x, [1]) if _is_vector(y) else x
        for x, y in zip((at, go), body.inputs[:2], strict=True)
    ]
    mapping = dict(zip(body.inputs, [*first, *before], strict=True))
    outputs = copy_nodes(step, body, mapping)
    wrt = [*(before[i] for i in floats), *wanted_outer]
    grads = own(step, sweep(step, outputs, d_outputs, wrt), wrt)
    totals = [accumulate(step, a, b) for a, b in zip(d_outer, grads[len(floats) :], strict=True)]
    step.graph.outputs.extend([step.Identity(go), *grads[: len(floats)], *totals])
    loop_grads = op.Loop(count, op.const(True), *carried, body=step.graph, _outputs=len(carried))
    loop_grads = list(loop_grads) if isinstance(loop_grads, tuple) else [loop_grads]
    result: list[Maybe] = [None] * (n + 2)
    for i, d in zip(floats, loop_grads, strict=False):
        result[i + 2] = shaped(d, states[i])
    by_value = dict(zip(wanted_outer, loop_grads[len(floats) :], strict=True))
    return *result, *(None if x not in by_value else shaped(by_value[x], x) for x in outer)


def _is_vector(x: ir.Value) -> bool:
    return x.shape is not None and len(x.shape) == 1


def _save_loop_states(
    op: OpBuilder, node: ir.Node, body: ir.Graph, n: int
) -> tuple[list[ir.Value], ir.Value]:
    """Make a Loop give what entered each step and the step numbers; return those."""
    key = "onnxtrain.saved"
    if key in node.meta:
        return node.meta[key]
    first = len(body.outputs) - 1
    if len(node.outputs) < first:
        node.resize_outputs(first)
    append_identities(op, body, [body.inputs[0], *body.inputs[2:]])
    node.resize_outputs(first + n + 1)
    steps = node.outputs[first]
    steps.name = op.names.fresh(f"{node.outputs[0].name}.steps")
    steps.type = ir.TensorType(ir.DataType.INT64)
    length = D.symbol(steps.name)
    S.set_dims(steps, [length, *(S.dims_of(body.inputs[0]) or ())])
    for i, state in enumerate(node.inputs[2:]):
        assert state is not None
        out = node.outputs[first + 1 + i]
        out.name = op.names.fresh(f"{node.outputs[0].name}.state{i}")
        out.type = state.type
        dims = S.dims_of(state)
        S.set_dims(out, None if dims is None else [length, *dims])
    name_outputs(op, node)
    node.meta[key] = (list(node.outputs[first + 1 :]), steps)
    return node.meta[key]


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
                "hint: fix sizes of inputs that decide on it by `dims`, unroll the loop, "
                f"or {leave_out('the parameters that enter it')}"
            )
