"""Split ``vjp`` into a forward model and a backward model, with the saved tensors between them."""

from __future__ import annotations

import dataclasses

import onnx
import onnx_ir as ir

from onnxtrain.autodiff.differentiate import ancestor_nodes
from onnxtrain.autodiff.gradients import GradientModel, Names, prepare_gradients
from onnxtrain.graph import shapes as S
from onnxtrain.graph.io.external_data import share_weights
from onnxtrain.graph.io.reader import Source
from onnxtrain.graph.io.writer import finalize
from onnxtrain.graph.nodes import captured
from onnxtrain.graph.simplify import simplify
from onnxtrain.targets import Target

# Cheaper to recompute than to save: they move or rename elements, or read only a shape.
_CHEAP = frozenset(
    {
        "Cast",
        "Expand",
        "Flatten",
        "Identity",
        "Reshape",
        "Shape",
        "Size",
        "Slice",
        "Squeeze",
        "Transpose",
        "Unsqueeze",
    }
)


@dataclasses.dataclass(frozen=True)
class Split:
    """Two models that together compute what :func:`onnxtrain.vjp` computes.

    ``forward``: the model's inputs and the parameters -> the model's outputs and ``saved``.
    ``backward``: ``saved``, ``passed`` (inputs and parameters of the forward model) and
    ``<output>_grad`` for each selected output -> ``<name>_grad`` for each ``wrt``.
    """

    forward: onnx.ModelProto
    backward: onnx.ModelProto
    saved: tuple[str, ...]
    passed: tuple[str, ...]
    wrt: tuple[str, ...]
    outputs: tuple[str, ...]
    """The outputs that get a cotangent."""


def split(
    model: Source, wrt: Names = None, outputs: Names = None, *, target: str | Target = "cpu"
) -> Split:
    """Return forward and backward as two models, so that several forwards may precede a backward.

    Args:
        model: a path, bytes, ``ModelProto`` or ``ir.Model``; it is not changed.
        wrt: as in :func:`onnxtrain.vjp`.
        outputs: outputs that get a cotangent. By default, every float output.
        target: as in :func:`onnxtrain.vjp`.
    """
    work, wrt_values, chosen = prepare_gradients(model, wrt, outputs, target)
    both = GradientModel(work, target)
    both.lift(wrt_values)
    inputs = [x.name or "" for x in both.graph.inputs]
    own = [y.name or "" for y in both.graph.outputs]
    cotangents = {y: both.input_like(f"{y.name}_grad", y) for y in chosen}
    names = [y.name or "" for y in chosen]
    grads = both.differentiate(cotangents, wrt_values)
    for x in wrt_values:
        both.output(f"{x.name}_grad", grads[x], x)
    _hide_sizes(list(cotangents.values()), [x for x in both.graph.inputs if x.name in inputs])
    wrt_names = [x.name or "" for x in wrt_values]
    return _cut(both.finish(), both.model, inputs, own, wrt_names, names)


def _hide_sizes(cotangents: list[ir.Value], inputs: list[ir.Value]) -> None:
    """Make symbolic sizes unknown that only cotangents have.

    Final passes read a size from the first input that has it; the forward model lacks cotangents.
    """
    known = {d for x in inputs for d in S.dims_of(x) or ()}
    for x in cotangents:
        dims = S.dims_of(x)
        if dims is not None:
            x.shape = ir.Shape([d if isinstance(d, int) or d in known else None for d in dims])


def _cut(
    both: onnx.ModelProto,
    origin: ir.Model,
    inputs: list[str],
    outputs: list[str],
    wrt: list[str],
    selected: list[str],
) -> Split:
    forward, backward = ir.from_proto(both), ir.from_proto(both)
    share_weights(origin, forward)
    share_weights(origin, backward)
    count = len(outputs)
    nodes = list(forward.graph)
    forward_nodes = ancestor_nodes(nodes, list(forward.graph.outputs)[:count])
    computed = {y.name for n in forward_nodes for y in n.outputs}
    recomputed: set[str] = set()
    backward_nodes = [n for n in nodes if n not in forward_nodes]
    needed = {x.name for n in backward_nodes for x in (*n.inputs, *captured(n)) if x is not None}
    needed |= {y.name for y in list(forward.graph.outputs)[count:]}
    # Backwards, so that the inputs of a recomputed node are considered after it.
    for node in reversed([n for n in nodes if n in forward_nodes]):
        if any(y.name in needed for y in node.outputs) and node.op_type in _CHEAP:
            recomputed.add(node.name or "")
            needed |= {x.name for x in node.inputs if x is not None}
    kept = {n.name or "" for n in backward_nodes} | recomputed
    recomputed_values = {
        y.name for n in forward_nodes if (n.name or "") in recomputed for y in n.outputs
    }
    saved = [
        y.name or ""
        for n in nodes
        if n in forward_nodes
        for y in n.outputs
        if y.name in needed and y.name in computed and y.name not in recomputed_values
    ]
    passed = [name for name in inputs if name in needed]
    forward.graph.outputs[:] = forward.graph.outputs[:count]  # del would leave them marked
    output_names = {y.name for y in forward.graph.outputs}
    by_name = {y.name: y for n in forward.graph for y in n.outputs}
    forward.graph.inputs[:] = forward.graph.inputs[: len(inputs)]
    extra = [by_name[name] for name in saved if name not in output_names]
    forward.graph.outputs.extend(extra)
    _make_backward(backward, saved, passed, kept, count, len(inputs))
    return Split(
        finalize(simplify(forward)),
        finalize(simplify(backward)),
        tuple(saved),
        tuple(passed),
        tuple(wrt),
        tuple(selected),
    )


def _make_backward(
    model: ir.Model,
    saved: list[str],
    passed: list[str],
    kept: set[str],
    count: int,
    num_inputs: int,
) -> None:
    graph = model.graph
    cotangents = list(graph.inputs)[num_inputs:]
    by_name = {x.name: x for x in graph.inputs}
    old = {y.name: y for n in graph for y in n.outputs}
    inputs = []
    for name in saved:
        value = old[name]
        entry = ir.Value(name=name, type=value.type, shape=value.shape)
        value.name = f"{name}.forward"
        value.replace_all_uses_with(entry, replace_graph_outputs=True)
        inputs.append(entry)
    graph.outputs[:] = graph.outputs[count:]
    graph.inputs.clear()
    graph.inputs.extend([*inputs, *(by_name[n] for n in passed), *cotangents])
    for node in list(graph)[::-1]:
        if (node.name or "") not in kept:
            for y in node.outputs:
                if y.uses() or y.is_graph_output():
                    break
            else:
                graph.remove(node, safe=True)
