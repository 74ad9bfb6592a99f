"""Scan: the steps in reverse.

The backward body runs the reverse sweep of one step. It reads what entered the step and what was
costly to compute in it, which the forward node saves in additional scan outputs; the rest it
computes again. Gradients of weights that are products are taken after the loop, for all steps at
once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import onnx_ir as ir

from onnxtrain.autodiff.accumulate import accumulate
from onnxtrain.autodiff.registry import vjp_multi
from onnxtrain.autodiff.rules.summed_scan import is_summed, summed_scan
from onnxtrain.autodiff.subgraphs import (
    append_identities,
    name_outputs,
    own,
    refuse_randomness,
    shaped,
    sweep,
)
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.builder.copy_nodes import copy_nodes
from onnxtrain.graph.captured_values import captured
from onnxtrain.graph.shapes import dims as D

Maybe = ir.Value | None
_COSTLY = frozenset(
    {
        *("MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum", "Sigmoid", "Tanh", "Erf", "Exp"),
        *("Log", "Softmax", "LogSoftmax", "Softplus", "Gelu", "Pow", "LayerNormalization"),
    }
)
_SAVED = "onnxtrain.saved"


@dataclasses.dataclass(frozen=True)
class _Parts:
    """A Scan node: its inputs and outputs by kind, and which gradients there are or must be."""

    body: ir.Graph
    inputs: Sequence[ir.Value]
    n: int
    """How many states are carried; they come first among inputs and outputs."""
    outer: list[ir.Value]
    """What the body captures."""
    axes_in: list[int]
    turns_in: list[int]
    axes_out: list[int]
    turns_out: list[int]
    floats: list[int]
    """The states that have a gradient."""
    wanted_scans: list[int]
    wanted_outer: list[ir.Value]
    given: list[int]
    """The scan outputs whose gradients are not zero, counted among all outputs."""

    @property
    def scans(self) -> Sequence[ir.Value]:
        return self.inputs[self.n :]


@dataclasses.dataclass(frozen=True)
class _Step:
    """The backward body, and what its inputs and outputs are."""

    op: OpBuilder
    mapping: dict[ir.Value, ir.Value]
    """Values of the forward body -> their copies."""
    states: list[ir.Value]
    totals: dict[ir.Value, ir.Value]
    """Captured values -> the sum of their gradients so far."""
    products: dict[ir.Value, list[tuple[ir.Value, int]]]
    """Captured values -> the factors of their gradients, which are multiplied after the loop."""
    factors: list[ir.Value]
    """Those of the factors that have to leave the loop."""


@vjp_multi("Scan")
def scan(op, dys, *inputs, node, wanted):
    """A Scan over the steps in reverse, which carries the gradients of the states."""
    refuse_randomness(node)
    if is_summed(node):
        return summed_scan(op, dys[0], node, wanted)
    parts = _read(node, inputs, dys, wanted)
    n, body = parts.n, parts.body
    d_states = [dys[i] if dys[i] is not None else op.zeros_like(inputs[i]) for i in parts.floats]
    step = _backward_step(op, parts, d_states)
    kept = _costly(step.op.graph, step.mapping)
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
    node: ir.Node, inputs: Sequence[ir.Value], dys: Sequence[Maybe], wanted: Sequence[bool]
) -> _Parts:
    body = node.attributes["body"].as_graph()
    n = len(inputs) - node.attributes["num_scan_inputs"].as_int()
    scans, outer = inputs[n:], captured(node)
    n_out = len(body.outputs) - n
    return _Parts(
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
    """Return the body of the backward Scan: the forward step again, then its reverse sweep."""
    body, floats, wanted_outer = parts.body, parts.floats, parts.wanted_outer
    step = op.body(
        [*d_states, *wanted_outer, *body.inputs, *(body.outputs[i] for i in parts.given)]
    )
    ins = iter(list(step.graph.inputs))
    d_now = [next(ins) for _ in floats]
    totals = {x: next(ins) for x in wanted_outer}
    states = [next(ins) for _ in range(parts.n)]
    slices = [next(ins) for _ in parts.scans]
    d_outputs: list[Maybe] = [None] * len(body.outputs)
    for i, d in (*zip(floats, d_now, strict=True), *zip(parts.given, ins, strict=True)):
        d_outputs[i] = d
    mapping = dict(zip(body.inputs, [*states, *slices], strict=True))
    outputs = copy_nodes(step, body, mapping)
    wrt = [*(states[i] for i in floats), *(slices[i] for i in parts.wanted_scans)]
    swept = sweep(step, outputs, d_outputs, [*wrt, *wanted_outer])
    of_outer = dict(zip(wanted_outer, swept[len(wrt) :], strict=True))
    grads = own(step, swept[: len(wrt)], wrt)

    products = {x: p for x, g in of_outer.items() if (p := _factors(g)) is not None}
    for x in products:
        step.graph.inputs.remove(totals.pop(x))
    news = own(step, [of_outer[x] for x in totals], list(totals))
    sums = [accumulate(step, old, new) for old, new in zip(totals.values(), news, strict=True)]
    # What entered the step is there for all steps already.
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
        # The factors' first step comes first, as in what was saved.
        scan_output_axes=[*(parts.axes_in[i] for i in parts.wanted_scans), *[0] * factors] or None,
        scan_output_directions=[*(1 - turns_in[i] for i in parts.wanted_scans), *[1] * factors]
        or None,
        _outputs=len(carried) + len(parts.wanted_scans) + factors,
    )
    return iter(outputs if isinstance(outputs, tuple) else [outputs])


def _gradients(
    op: OpBuilder,
    parts: _Parts,
    step: _Step,
    results: Iterator[ir.Value],
    saved: Sequence[ir.Value],
    all_steps: ir.Value,
) -> tuple[Maybe, ...]:
    """Return the gradients of the inputs, then of the captured values.

    ``all_steps`` is a value whose first axis counts the steps.
    """
    inputs, n = parts.inputs, parts.n
    gradients: list[Maybe] = [None] * len(inputs)
    for i in parts.floats:
        gradients[i] = shaped(next(results), inputs[i])
    by_value: dict[ir.Value, Maybe] = {x: shaped(next(results), x) for x in step.totals}
    for i in parts.wanted_scans:
        gradients[n + i] = shaped(next(results), inputs[n + i])
    stacks = {v: _stack(next(results), v, all_steps) for v in step.factors}
    stacks |= dict(zip(step.states, saved, strict=False))
    for x, (a, b) in step.products.items():
        rows = [op.Reshape(stacks[v], [-1, columns]) for v, columns in (a, b)]
        by_value[x] = shaped(op.Gemm(*rows, transA=1), x)
    return *gradients, *(by_value.get(x) for x in parts.outer)


def _factors(g: Maybe) -> list[tuple[ir.Value, int]] | None:
    """Return ``a`` and ``b``, each with its columns, where a gradient is ``a^T b``."""
    made = None if g is None else g.producer()
    if made is None or made.op_type != "Gemm" or len(made.inputs) != 2:
        return None
    if {k: a.value for k, a in made.attributes.items()} != {"transA": 1}:
        return None
    factors = []
    for v in made.inputs:
        dims = None if v is None else S.dims_of(v)
        if v is None or dims is None or not isinstance(dims[1], int) or v.graph is not made.graph:
            return None
        factors.append((v, dims[1]))
    return factors


def _costly(graph: ir.Graph, mapping: dict[ir.Value, ir.Value]) -> dict[ir.Value, ir.Value]:
    """Return costly values that outputs of a backward body need: the forward's, and its copy."""
    copies = {copy: value for value, copy in mapping.items()}
    needed = set(graph.outputs)
    costly: dict[ir.Value, ir.Value] = {}
    for node in reversed(graph):
        if not needed.intersection(node.outputs):
            continue
        y = node.outputs[0]
        if y in copies and node.op_type in _COSTLY and len(node.outputs) == 1:
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
    """Add values of a Scan's body, for all steps, to its scan outputs; return those."""
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
