"""A forward model and a backward model, with the tensors that pass between them."""

from __future__ import annotations

import dataclasses

import onnx
import onnx_ir as ir

from onnxtrain.autodiff.differentiate import ancestor_nodes
from onnxtrain.autodiff.gradients import GradientModel, Names, prepare_gradients
from onnxtrain.graph.io.reader import Source
from onnxtrain.graph.io.writer import finalize
from onnxtrain.graph.nodes import captured
from onnxtrain.graph.simplify import simplify
from onnxtrain.targets import Target

# Cheaper to compute again than to keep: they move or rename elements, or read only a shape.
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

    ``forward`` takes the model's inputs and the lifted parameters; it gives the model's outputs,
    then ``saved``. ``backward`` takes ``saved``, ``passed`` (inputs and parameters of the forward
    model that it reads again) and ``<output>_grad`` for each chosen output; it gives
    ``<name>_grad`` for each ``wrt``.
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
        outputs: which outputs get a cotangent; ``None`` stands for every float output.
        target: as in :func:`onnxtrain.vjp`.
    """
    work, wrt_values, chosen = prepare_gradients(model, wrt, outputs, target)
    made = GradientModel(work, target)
    made.lift(wrt_values)
    given = [x.name or "" for x in made.graph.inputs]
    own = [y.name or "" for y in made.graph.outputs]
    cotangents = {y: made.input_like(f"{y.name}_grad", y) for y in chosen}
    names = [y.name or "" for y in chosen]
    grads = made.differentiate(cotangents, wrt_values)
    for x in wrt_values:
        made.output(f"{x.name}_grad", grads[x], x)
    return _cut(made.finish(), given, own, [x.name or "" for x in wrt_values], names)


def _cut(
    both: onnx.ModelProto, given: list[str], outputs: list[str], wrt: list[str], chosen: list[str]
) -> Split:
    forward, backward = ir.from_proto(both), ir.from_proto(both)
    count = len(outputs)
    nodes = list(forward.graph)
    ahead = ancestor_nodes(nodes, list(forward.graph.outputs)[:count])
    made = {y.name for n in ahead for y in n.outputs}
    again: set[str] = set()
    later = [n for n in nodes if n not in ahead]
    wanted = {x.name for n in later for x in (*n.inputs, *captured(n)) if x is not None}
    wanted |= {y.name for y in list(forward.graph.outputs)[count:]}
    # Walk back: what is cheap is computed again, from what it needs.
    for node in reversed([n for n in nodes if n in ahead]):
        if any(y.name in wanted for y in node.outputs) and node.op_type in _CHEAP:
            again.add(node.name or "")
            wanted |= {x.name for x in node.inputs if x is not None}
    kept = {n.name or "" for n in later} | again
    redone = {y.name for n in ahead if (n.name or "") in again for y in n.outputs}
    saved = [
        y.name or ""
        for n in nodes
        if n in ahead
        for y in n.outputs
        if y.name in wanted and y.name in made and y.name not in redone
    ]
    passed = [name for name in given if name in wanted]
    del forward.graph.outputs[count:]
    shown = {y.name for y in forward.graph.outputs}
    by_name = {y.name: y for n in forward.graph for y in n.outputs}
    del forward.graph.inputs[len(given) :]
    extra = [by_name[name] for name in saved if name not in shown]
    forward.graph.outputs.extend(extra)
    _make_backward(backward, saved, passed, kept, count, len(given))
    return Split(
        finalize(simplify(forward)),
        finalize(simplify(backward)),
        tuple(saved),
        tuple(passed),
        tuple(wrt),
        tuple(chosen),
    )


def _make_backward(
    model: ir.Model, saved: list[str], passed: list[str], kept: set[str], count: int, given: int
) -> None:
    graph = model.graph
    cotangents = list(graph.inputs)[given:]
    by_name = {x.name: x for x in graph.inputs}
    old = {y.name: y for n in graph for y in n.outputs}
    inputs = []
    for name in saved:
        value = old[name]
        entry = ir.Value(name=name, type=value.type, shape=value.shape)
        value.name = f"{name}.forward"
        value.replace_all_uses_with(entry, replace_graph_outputs=True)
        inputs.append(entry)
    del graph.outputs[:count]
    graph.inputs.clear()
    graph.inputs.extend([*inputs, *(by_name[n] for n in passed), *cotangents])
    for node in list(graph)[::-1]:
        if (node.name or "") not in kept:
            for y in node.outputs:
                if y.uses() or y.is_graph_output():
                    break
            else:
                graph.remove(node, safe=True)
