"""If, Loop, Scan, sequences and optionals.

If and Loop: the backward body recomputes one step of the forward body from the step's inputs, then
runs its reverse sweep. The forward Loop saves the inputs of each step in additional scan outputs.

Scan: the backward Scan runs the steps in reverse. Its body reads the inputs of the step and results
that are expensive to recompute, which the forward node saves in additional scan outputs. It
recomputes the rest. Weight gradients that are matmuls run once after the loop, over all steps.

Scan that sums a scalar: the gradient is computed in the same loop. Each step adds to one carried
scalar, so the gradient of a step is proportional to the incoming gradient. The loop computes it for
an incoming gradient of 1, and one multiplication follows. Nothing of a step is saved or recomputed.
The main use is a loss over a large vocabulary, whose logits exist for a few rows at a time.

Sequences that ``prepare`` could not resolve, and optionals: the gradient of a sequence is a
sequence of the same length; the gradient of an optional is the gradient of its element.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import onnx_ir as ir

from onnxtrain.autodiff.differentiate import (
    accumulate,
    append_identities,
    as_body_outputs,
    carries_gradient,
    differentiate,
    differentiate_body,
    name_outputs,
    reject_randomness,
    with_shape_of,
)
from onnxtrain.autodiff.rule_registry import vjp, vjp_multi
from onnxtrain.errors import UndifferentiableError, exclusion_hint
from onnxtrain.expand.control_flow import RECURRENT
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder, copy_nodes
from onnxtrain.graph.nodes import captured
from onnxtrain.graph.shapes import dims as D

OptionalValue = ir.Value | None


@vjp_multi("If")
def if_(op, dys, cond, *, node):
    """Recompute the taken branch and run its reverse sweep; unread values get zeros."""
    outer = captured(node)
    reject_randomness(node)
    wanted = [x for x in outer if S.is_float(x)]
    branches = {}
    for name in ("then_branch", "else_branch"):
        body = op.body()
        outputs = copy_nodes(body, node.attributes[name].as_graph(), {})
        grads = differentiate_body(body, outputs, dys, wanted)
        body.graph.outputs.extend(as_body_outputs(body, grads, wanted))
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
    """A Loop over the executed steps in reverse, which carries the gradients of the states."""
    reject_randomness(node)
    body = node.attributes["body"].as_graph()
    n = len(states)
    outer = captured(node)
    _reject_changing_shapes(node, body, states)
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
    d_outputs: list[OptionalValue] = [None] * len(body.outputs)
    for i, d in zip(floats, d_state, strict=True):
        d_outputs[i + 1] = d
    for i in given:
        d_outputs[i + 1] = step.Gather(dys[i], at, axis=0)
    before = []
    for i, stack in enumerate(saved):
        value = step.Gather(stack, at, axis=0)
        value.shape = states[i].shape
        before.append(value)
    # Some files declare the step number and the condition as vectors with one element.
    first = [
        step.Reshape(x, [1]) if _is_vector(y) else x
        for x, y in zip((at, go), body.inputs[:2], strict=True)
    ]
    mapping = dict(zip(body.inputs, [*first, *before], strict=True))
    outputs = copy_nodes(step, body, mapping)
    wrt = [*(before[i] for i in floats), *wanted_outer]
    grads = as_body_outputs(step, differentiate_body(step, outputs, d_outputs, wrt), wrt)
    totals = [accumulate(step, a, b) for a, b in zip(d_outer, grads[len(floats) :], strict=True)]
    step.graph.outputs.extend([step.Identity(go), *grads[: len(floats)], *totals])
    loop_grads = op.Loop(count, op.const(True), *carried, body=step.graph, _outputs=len(carried))
    loop_grads = list(loop_grads) if isinstance(loop_grads, tuple) else [loop_grads]
    result: list[OptionalValue] = [None] * (n + 2)
    for i, d in zip(floats, loop_grads, strict=False):
        result[i + 2] = with_shape_of(d, states[i])
    by_value = dict(zip(wanted_outer, loop_grads[len(floats) :], strict=True))
    return *result, *(None if x not in by_value else with_shape_of(by_value[x], x) for x in outer)


def _is_vector(x: ir.Value) -> bool:
    return x.shape is not None and len(x.shape) == 1


def _save_loop_states(
    op: OpBuilder, node: ir.Node, body: ir.Graph, n: int
) -> tuple[list[ir.Value], ir.Value]:
    """Add scan outputs for the inputs of each step and the step numbers; return them."""
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


def _reject_changing_shapes(node: ir.Node, body: ir.Graph, states: Sequence[ir.Value]) -> None:
    for i, state in enumerate(states):
        inner, after = body.inputs[i + 2], body.outputs[i + 1]
        if not isinstance(state.type, ir.TensorType):
            raise UndifferentiableError(
                f"Loop {node.name!r} carries {S.describe_value(state)}: "
                "only states of a fixed shape are differentiable"
            )
        if S.dims_of(after) is None or S.dims_of(after) != S.dims_of(inner):
            raise UndifferentiableError(
                f"Loop {node.name!r} may change the shape of a state: "
                f"{S.describe_value(inner)} becomes {S.describe_value(after)}\n"
                "hint: fix the input sizes that determine it with `dims`, unroll the loop, "
                f"or {exclusion_hint('the parameters that enter it')}"
            )


_SUM_SCAN_KEY = "onnxtrain.summed"


def mark_sum_scan(node: ir.Node) -> None:
    """Mark a Scan whose only state has shape [1], and whose steps only add to it."""
    node.meta[_SUM_SCAN_KEY] = True


def is_sum_scan(node: ir.Node) -> bool:
    """Return whether a Scan is marked as a sum."""
    return bool(node.meta.get(_SUM_SCAN_KEY))


def sum_scan(
    op: OpBuilder, dy: ir.Value, node: ir.Node, wanted: Sequence[bool]
) -> tuple[OptionalValue, ...]:
    """``dx = dy * d(sum)/dx``; the loop computes the sum and its gradient together."""
    start, *scans = [x for x in node.inputs if x is not None]
    outer = captured(node)
    slices = [i for i, x in enumerate(scans) if wanted[1 + i] and S.is_float(x)]
    weights = [
        x for x, w in zip(outer, wanted[len(node.inputs) :], strict=True) if w and S.is_float(x)
    ]
    front = op.before(node)
    old = node.attributes["body"].as_graph()
    step = front.body([start, *weights, *old.inputs[1:]])
    total, *rest = step.graph.inputs
    sums, parts = rest[: len(weights)], rest[len(weights) :]
    (new,) = copy_nodes(step, old, dict(zip(old.inputs, [total, *parts], strict=True)))
    wrt = [*(parts[i] for i in slices), *weights]
    swept = as_body_outputs(
        step, differentiate_body(step, [new], [step.const([1.0], new.dtype)], wrt), wrt
    )
    gradients, of_weights = swept[: len(slices)], swept[len(slices) :]
    added = [accumulate(step, a, b) for a, b in zip(sums, of_weights, strict=True)]
    step.graph.outputs.extend([new, *added, *gradients])
    results = front.Scan(
        *(start, *(front.zeros_like(x) for x in weights), *scans),
        body=step.graph,
        num_scan_inputs=len(scans),
        _outputs=1 + len(weights) + len(slices),
    )
    loss, *unscaled = results if isinstance(results, tuple) else (results,)
    loss.type, loss.shape = node.outputs[0].type, node.outputs[0].shape
    node.outputs[0].replace_all_uses_with(loss)
    scaled = [op.Mul(g, dy) for g in unscaled]
    by_weight = {x: with_shape_of(g, x) for x, g in zip(weights, scaled, strict=False)}
    by_slice = dict(zip(slices, scaled[len(weights) :], strict=True))
    of_scans = [
        with_shape_of(by_slice[i], x) if i in by_slice else None for i, x in enumerate(scans)
    ]
    return None if not wanted[0] else dy, *of_scans, *(by_weight.get(x) for x in outer)


_EXPENSIVE_OPS = frozenset(
    {
        *("MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum", "Sigmoid", "Tanh", "Erf", "Exp"),
        *("Log", "Softmax", "LogSoftmax", "Softplus", "Gelu", "Pow", "LayerNormalization"),
    }
)
_SAVED = "onnxtrain.saved"


@dataclasses.dataclass(frozen=True)
class _Parts:
    """A Scan node: its inputs and outputs by kind, and the gradients it needs."""

    node: ir.Node
    body: ir.Graph
    inputs: Sequence[ir.Value]
    n: int
    """Number of states; they are the first inputs and outputs."""
    outer: list[ir.Value]
    """Values that the body captures."""
    axes_in: list[int]
    turns_in: list[int]
    axes_out: list[int]
    turns_out: list[int]
    floats: list[int]
    """The states that have a gradient."""
    wanted_scans: list[int]
    wanted_outer: list[ir.Value]
    given: list[int]
    """Indices of scan outputs with nonzero gradients, among all outputs."""

    @property
    def scans(self) -> Sequence[ir.Value]:
        return self.inputs[self.n :]


@dataclasses.dataclass(frozen=True)
class _Step:
    """The backward body and its inputs and outputs by kind."""

    op: OpBuilder
    mapping: dict[ir.Value, ir.Value]
    """Values of the forward body -> their copies."""
    states: list[ir.Value]
    totals: dict[ir.Value, ir.Value]
    """Captured values -> the sum of their gradients so far."""
    products: dict[ir.Value, list[tuple[ir.Value, int]]]
    """Captured values -> the factors of their gradients, for one matmul or sum after the loop."""
    factors: list[ir.Value]
    """The factors that are scan outputs of the backward body."""


@vjp_multi("Scan")
def scan(op, dys, *inputs, node, wanted):
    """A Scan over the steps in reverse, which carries the gradients of the states."""
    reject_randomness(node)
    if is_sum_scan(node):
        return sum_scan(op, dys[0], node, wanted)
    parts = _read(node, inputs, dys, wanted)
    n, body = parts.n, parts.body
    d_states = [dys[i] if dys[i] is not None else op.zeros_like(inputs[i]) for i in parts.floats]
    step = _backward_step(op, parts, d_states)
    kept = _values_to_save(step.op.graph, step.mapping)
    saved = _save(op, node, body, n, [*body.inputs[:n], *kept])
    for copy in kept.values():
        entry = ir.Value(name=op.names.fresh(f"{op.prefix}kept"), type=copy.type, shape=copy.shape)
        copy.replace_all_uses_with(entry)
        step.op.graph.inputs.append(entry)
    carried = [*d_states, *(op.zeros_like(x) for x in step.totals)]
    fed = [*saved[:n], *parts.scans, *(dys[i] for i in parts.given), *saved[n:]]
    results = _backward_scan(op, parts, step, carried, fed)
    return _gradients(op, parts, step, results, saved, saved[0] if n else fed[0])


def _read(
    node: ir.Node, inputs: Sequence[ir.Value], dys: Sequence[OptionalValue], wanted: Sequence[bool]
) -> _Parts:
    body = node.attributes["body"].as_graph()
    n = len(inputs) - node.attributes["num_scan_inputs"].as_int()
    scans, outer = inputs[n:], captured(node)
    n_out = len(body.outputs) - n
    return _Parts(
        node,
        body,
        inputs,
        n,
        outer,
        axes_in=_ints(node, "scan_input_axes", len(scans)),
        turns_in=_ints(node, "scan_input_directions", len(scans)),
        axes_out=_ints(node, "scan_output_axes", n_out)[: len(node.outputs) - n],
        turns_out=_ints(node, "scan_output_directions", n_out)[: len(node.outputs) - n],
        floats=[i for i in range(n) if S.is_float(inputs[i])],
        wanted_scans=[i for i, x in enumerate(scans) if S.is_float(x) and wanted[n + i]],
        wanted_outer=[
            x for x, w in zip(outer, wanted[len(inputs) :], strict=True) if w and S.is_float(x)
        ],
        given=[i for i in range(n, len(dys)) if dys[i] is not None],
    )


def _backward_step(op: OpBuilder, parts: _Parts, d_states: Sequence[ir.Value]) -> _Step:
    """Return the body of the backward Scan: recompute the forward step, then its reverse sweep."""
    body, floats, wanted_outer = parts.body, parts.floats, parts.wanted_outer
    step = op.body(
        [*d_states, *wanted_outer, *body.inputs, *(body.outputs[i] for i in parts.given)]
    )
    ins = iter(list(step.graph.inputs))
    d_now = [next(ins) for _ in floats]
    totals = {x: next(ins) for x in wanted_outer}
    states = [next(ins) for _ in range(parts.n)]
    slices = [next(ins) for _ in parts.scans]
    d_outputs: list[OptionalValue] = [None] * len(body.outputs)
    for i, d in (*zip(floats, d_now, strict=True), *zip(parts.given, ins, strict=True)):
        d_outputs[i] = d
    mapping = dict(zip(body.inputs, [*states, *slices], strict=True))
    outputs = copy_nodes(step, body, mapping)
    wrt = [*(states[i] for i in floats), *(slices[i] for i in parts.wanted_scans)]
    swept = differentiate_body(step, outputs, d_outputs, [*wrt, *wanted_outer])
    of_outer = dict(zip(wanted_outer, swept[len(wrt) :], strict=True))
    grads = as_body_outputs(step, swept[: len(wrt)], wrt)

    products = {x: p for x, g in of_outer.items() if (p := _factors(g)) is not None}
    for x in products:
        step.graph.inputs.remove(totals.pop(x))
    news = as_body_outputs(step, [of_outer[x] for x in totals], list(totals))
    sums = [accumulate(step, old, new) for old, new in zip(totals.values(), news, strict=True)]
    # The inputs of the steps are available for all steps already.
    factors = list(dict.fromkeys(v for p in products.values() for v, _ in p if v not in states))
    step.graph.outputs.extend(
        [*grads[: len(floats)], *sums, *grads[len(floats) :], *map(step.Identity, factors)]
    )
    return _Step(step, mapping, states, totals, products, factors)


def _backward_scan(
    op: OpBuilder,
    parts: _Parts,
    step: _Step,
    carried: Sequence[ir.Value],
    fed: Sequence[ir.Value],
) -> Iterator[ir.Value]:
    """Yield the outputs of the Scan whose body is the backward step."""
    n, turns_in = parts.n, parts.turns_in
    given = [i - n for i in parts.given]
    kept = len(fed) - n - len(parts.scans) - len(given)
    factors = len(step.factors)
    outputs = op.Scan(
        *carried,
        *fed,
        body=step.op.graph,
        num_scan_inputs=len(fed),
        scan_input_axes=[
            *[0] * n,
            *parts.axes_in,
            *(parts.axes_out[i] for i in given),
            *[0] * kept,
        ],
        scan_input_directions=[
            *[1] * n,
            *(1 - t for t in turns_in),
            *(1 - parts.turns_out[i] for i in given),
            *[1] * kept,
        ],
        # Factors are in forward order, like the saved values.
        scan_output_axes=[*(parts.axes_in[i] for i in parts.wanted_scans), *[0] * factors] or None,
        scan_output_directions=[*(1 - turns_in[i] for i in parts.wanted_scans), *[1] * factors]
        or None,
        _outputs=len(carried) + len(parts.wanted_scans) + factors,
    )
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    loop = outputs[0].producer()
    assert loop is not None
    loop.meta.update({k: v for k, v in parts.node.meta.items() if k == RECURRENT})
    return iter(outputs)


def _gradients(
    op: OpBuilder,
    parts: _Parts,
    step: _Step,
    results: Iterator[ir.Value],
    saved: Sequence[ir.Value],
    all_steps: ir.Value,
) -> tuple[OptionalValue, ...]:
    """Return the gradients of the inputs, then of the captured values.

    The first axis of ``all_steps`` has the number of steps.
    """
    inputs, n = parts.inputs, parts.n
    gradients: list[OptionalValue] = [None] * len(inputs)
    for i in parts.floats:
        gradients[i] = with_shape_of(next(results), inputs[i])
    by_value: dict[ir.Value, OptionalValue] = {
        x: with_shape_of(next(results), x) for x in step.totals
    }
    for i in parts.wanted_scans:
        gradients[n + i] = with_shape_of(next(results), inputs[n + i])
    stacks = {v: _stack(next(results), v, all_steps) for v in step.factors}
    stacks |= dict(zip(step.states, saved, strict=False))
    for x, factors in step.products.items():
        rows = [op.Reshape(stacks[v], [-1, columns]) for v, columns in factors]
        total = op.Gemm(*rows, transA=1) if len(rows) > 1 else op.ReduceSum(*rows, [0], keepdims=0)
        by_value[x] = with_shape_of(total, x)
    return *gradients, *(by_value.get(x) for x in parts.outer)


def _factors(g: OptionalValue) -> list[tuple[ir.Value, int]] | None:
    """Return ``a`` and ``b`` as matrices if a gradient is ``a^T b``, ``a`` if it sums its rows."""
    made = None if g is None else g.producer()
    if made is None:
        return None
    attributes = {k: a.value for k, a in made.attributes.items()}
    if made.op_type == "Gemm" and len(made.inputs) == 2 and attributes == {"transA": 1}:
        values = list(made.inputs)
    elif made.op_type == "ReduceSum" and _sums_rows(made):
        values = [made.inputs[0]]
    else:
        return None
    factors = []
    for v in values:
        dims = None if v is None else S.dims_of(v)
        if v is None or dims is None or not isinstance(dims[1], int) or v.graph is not made.graph:
            return None
        factors.append((v, dims[1]))
    return factors


def _sums_rows(node: ir.Node) -> bool:
    """Return whether a ReduceSum adds the rows of a matrix to a vector."""
    x, keep = node.inputs[0], node.attributes.get("keepdims")
    dims = None if x is None else S.dims_of(x)
    axes = S.constant_of(node.inputs[1]) if len(node.inputs) > 1 else None
    flat = keep is not None and not keep.as_int()
    return (
        flat and dims is not None and len(dims) == 2 and axes is not None and axes.tolist() == [0]
    )


def _values_to_save(graph: ir.Graph, mapping: dict[ir.Value, ir.Value]) -> dict[ir.Value, ir.Value]:
    """Return expensive values that a backward body needs: the forward value and its copy."""
    copies = {copy: value for value, copy in mapping.items()}
    needed = set(graph.outputs)
    costly: dict[ir.Value, ir.Value] = {}
    for node in reversed(graph):
        if not needed.intersection(node.outputs):
            continue
        y = node.outputs[0]
        if y in copies and node.op_type in _EXPENSIVE_OPS and len(node.outputs) == 1:
            costly[copies[y]] = y
            continue
        needed.update(x for x in (*node.inputs, *captured(node)) if x is not None)
    return dict(reversed(costly.items()))


def _stack(stack: ir.Value, one: ir.Value, like: ir.Value) -> ir.Value:
    dims, length = S.dims_of(one), S.dims_of(like)
    stack.type = one.type
    S.set_dims(stack, None if dims is None or length is None else [length[0], *dims])
    return stack


def _save(
    op: OpBuilder, node: ir.Node, body: ir.Graph, n: int, values: Sequence[ir.Value]
) -> list[ir.Value]:
    """Add values of a Scan's body to its scan outputs; return the stacked outputs."""
    saved: dict[ir.Value, ir.Value] = node.meta.setdefault(_SAVED, {})
    fresh = [v for v in values if v not in saved]
    if len(node.outputs) < len(body.outputs):  # trailing outputs were omitted
        node.resize_outputs(len(body.outputs))
    first = len(body.outputs)
    for name in ("scan_output_axes", "scan_output_directions"):
        if name in node.attributes:
            kept = [*node.attributes[name].as_ints(), *[0] * len(fresh)]
            node.attributes[name] = ir.AttrInt64s(name, kept[: first - n + len(fresh)])
    append_identities(op, body, fresh)
    node.resize_outputs(first + len(fresh))
    length = _length(node, n)
    for i, value in enumerate(fresh):
        out = node.outputs[first + i]
        out.name = op.names.fresh(f"{node.outputs[0].name}.{value.name}")
        state = node.inputs[body.inputs.index(value)] if value in body.inputs else None
        out.type = value.type or (None if state is None else state.type)
        dims = S.dims_of(value if state is None else state)
        S.set_dims(out, None if dims is None else [length, *dims])
        saved[value] = out
    name_outputs(op, node)
    return [saved[v] for v in values]


def _length(node: ir.Node, n: int) -> D.Dim:
    axes = _ints(node, "scan_input_axes", len(node.inputs) - n)
    first = node.inputs[n]
    dims = None if first is None else S.dims_of(first)
    return None if dims is None else dims[axes[0]]


def _ints(node: ir.Node, name: str, n: int) -> list[int]:
    attribute = node.attributes.get(name)
    return [0] * n if attribute is None else list(attribute.as_ints())


@vjp("SequenceConstruct")
def sequence_construct(op, dy, *xs):
    """Each element gets the gradient at its position."""
    return tuple(op.SequenceAt(dy, i) for i in range(len(xs)))


@vjp("SequenceAt")
def sequence_at(op, dy, input_sequence, position):
    """Zeros for every element but one."""
    at = _from_front(op, input_sequence, position)
    others = op.SequenceErase(op.zeros_like(input_sequence), at)
    return op.SequenceInsert(others, dy, at)


@vjp("SequenceInsert")
def sequence_insert(op, dy, input_sequence, tensor, position=None):
    """Remove the gradient of the inserted element."""
    if position is None:
        return op.SequenceErase(dy), op.SequenceAt(dy, -1)
    at = _from_front(op, input_sequence, position)
    return op.SequenceErase(dy, at), op.SequenceAt(dy, at)


@vjp("SequenceErase")
def sequence_erase(op, dy, input_sequence, position=None):
    """Insert zeros for the removed element."""
    dropped = op.SequenceAt(input_sequence, -1 if position is None else position)
    at = None if position is None else _from_front(op, input_sequence, position)
    return op.SequenceInsert(dy, op.zeros_like(dropped), at)


@vjp("SplitToSequence")
def split_to_sequence(op, dy, x, split=None, *, axis, keepdims):
    """Concatenate the pieces."""
    stacked = split is None and not keepdims
    return op.ConcatFromSequence(dy, axis=axis, new_axis=1 if stacked else 0)


@vjp("ConcatFromSequence")
def concat_from_sequence(op, dy, input_sequence, *, axis, new_axis):
    """Split the gradient at the boundaries of the elements."""
    if new_axis:
        return op.SplitToSequence(dy, axis=axis, keepdims=0)
    end = None if axis == -1 else axis + 1
    sizes = op.map_sequences(lambda body, x: body.Shape(x, start=axis, end=end), input_sequence)
    return op.SplitToSequence(dy, op.ConcatFromSequence(sizes, axis=0), axis=axis)


@vjp_multi("SequenceMap")
def sequence_map(op, dys, input_sequence, *additional_inputs, node):
    """Map the reverse sweep of the body; captured values get the sum over the steps."""
    inputs, outer = (input_sequence, *additional_inputs), captured(node)
    inner = node.attributes["body"].as_graph()
    given = [i for i, dy in enumerate(dys) if dy is not None]
    step = op.body([*inner.inputs, *(inner.outputs[i] for i in given)])
    own, cotangents = step.graph.inputs[: len(inputs)], step.graph.inputs[len(inputs) :]
    outputs = copy_nodes(step, inner, dict(zip(inner.inputs, own, strict=True)))
    wanted = [x for x in (*own, *outer) if carries_gradient(x)]
    grads = differentiate(
        step, dict(zip((outputs[i] for i in given), cotangents, strict=True)), wanted
    )
    sources = dict(zip((*own, *outer), (*inputs, *outer), strict=True))
    for x in wanted:
        grad = grads[x]
        made = step.Identity(step.zeros_like(x) if grad is None else grad)
        made.shape = x.shape
        step.graph.outputs.append(made)
    step_grads = op.SequenceMap(
        *inputs, *(dys[i] for i in given), body=step.graph, _outputs=len(wanted)
    )
    by_value = dict(zip(wanted, step_grads if len(wanted) > 1 else [step_grads], strict=True))
    return tuple(_summed(op, by_value.get(x), sources[x]) for x in (*own, *outer))


@vjp("Optional")
def optional(op, dy, x=None):
    """The gradient of the element."""
    return dy


@vjp("OptionalGetElement")
def optional_get_element(op, dy, x):
    """The gradient of the element."""
    return dy


def _summed(op, grads, x):
    """Return the gradient of an input of SequenceMap from the gradients of its steps."""
    if grads is None or isinstance(x.type, ir.SequenceType):
        return grads
    # ConcatFromSequence rejects an empty sequence, so a zero is put first.
    some = op.SequenceInsert(grads, op.zeros_like(x))
    total = op.ReduceSum(op.ConcatFromSequence(some, axis=0, new_axis=1), [0], keepdims=0)
    total.shape = x.shape
    return total


def _from_front(op, sequence, position):
    """Return a nonnegative position; ``length`` means behind the last element."""
    known = op.constant(position)
    if known is not None and int(known.reshape(-1)[0]) >= 0:
        return position
    at = op.cast(position, ir.DataType.INT64)
    return op.Where(op.Less(at, 0), op.Add(at, op.SequenceLength(sequence)), at)
