"""Which values a request means: names, glob patterns, or the trainable parameters."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.autodiff.differentiate import differentiable_inputs, reached_from
from onnxtrain.autodiff.named_selections import expand
from onnxtrain.autodiff.registry import is_refused, is_stopped
from onnxtrain.errors import PrepareError, UndifferentiableError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.nodes import nodes
from onnxtrain.graph.prepare import constant_names, unused_parameters
from onnxtrain.graph.roles import roles_of


def select_wrt(model: ir.Model, wrt: str | Sequence[str] | None) -> list[ir.Value]:
    """Return the inputs and initializers that ``wrt`` names, in that order, each once.

    ``None`` stands for every trainable parameter, in the order of the file.
    """
    if wrt is None:
        return trainable(model)
    candidates = {x.name or "": x for x in model.graph.inputs}
    hidden = constant_names(model)
    for name, x in model.graph.initializers.items():
        if name not in hidden:
            candidates.setdefault(name, x)
    candidates.update(unused_parameters(model))
    names = expand(model, [wrt] if isinstance(wrt, str) else list(wrt), trainable(model))
    values = match(names, candidates, "wrt", "value")
    return _only_floats(values, "wrt")


def select_outputs(
    model: ir.Model, outputs: str | Sequence[str] | None, argument: str = "outputs"
) -> list[ir.Value]:
    """Return the graph outputs that ``outputs`` names; ``None`` stands for all float ones."""
    if outputs is None:
        chosen = [y for y in model.graph.outputs if S.is_float(y)]
        if not chosen:
            raise UndifferentiableError(
                "the model has no float output: "
                + ", ".join(S.describe_value(y) for y in model.graph.outputs)
            )
        return chosen
    candidates = {y.name or "": y for y in model.graph.outputs}
    chosen = match(
        [outputs] if isinstance(outputs, str) else list(outputs), candidates, argument, "output"
    )
    return _only_floats(chosen, argument)


def _only_floats(values: list[ir.Value], argument: str) -> list[ir.Value]:
    wrong = [x for x in values if not S.is_float(x)]
    if wrong:
        listing = ", ".join(S.describe_value(x) for x in wrong)
        raise UndifferentiableError(
            f"only floats have gradients: {listing}\nhint: leave them out of `{argument}`"
        )
    return values


def trainable(model: ir.Model, *, inner: Sequence[ir.Value] = ()) -> list[ir.Value]:
    """Return the float initializers that work as weights and through which a gradient can flow.

    Running statistics of BatchNormalization are not among them, nor are the constants of the graph
    and what works as one (:mod:`onnxtrain.graph.roles`). A gradient comes from the float outputs,
    and from ``inner`` values.
    """
    graph = model.graph
    hidden, statistics = constant_names(model) | untrained_names(model), batch_statistics(graph)
    candidates = [
        x
        for name, x in graph.initializers.items()
        if name not in hidden and x not in statistics and S.is_float(x)
    ]
    useful = reaching(graph, [*graph.outputs, *inner], refused=True)
    return [x for x in candidates if x in useful]


def untrained_names(model: ir.Model) -> frozenset[str]:
    """Return the names of tensors that are no parameters unless the user names them."""
    return frozenset(n for n, role in roles_of(model).items() if not role.trains)


def batch_statistics(graph: ir.Graph) -> set[ir.Value]:
    """Return the values that BatchNormalization nodes read as running mean and variance."""
    statistics: set[ir.Value] = set()
    for node in nodes(graph, "BatchNormalization", subgraphs=True):
        statistics.update(x for x in node.inputs[3:5] if x is not None)
    return statistics


def reaching(
    graph: ir.Graph, outputs: Sequence[ir.Value] | None = None, *, refused: bool = False
) -> set[ir.Value]:
    """Return every value from which a differentiable path leads to ``outputs``.

    ``None`` stands for every float output of the graph. With ``refused``, nodes count as passed
    that it is an error to differentiate through: whoever wants the gradient shall be told.
    """
    useful = set(graph.outputs if outputs is None else outputs)
    useful = {y for y in useful if S.is_float(y)}
    for node in reversed(list(graph)):
        if any(y in useful for y in node.outputs):
            useful.update(flowing_inputs(node))
            if refused and is_refused(node):
                useful.update(x for x in node.inputs if x is not None)
    return useful


def flowing_inputs(node: ir.Node) -> list[ir.Value]:
    """Return the inputs of a node that pass a gradient on to some output of it."""
    return [] if is_stopped(node) else differentiable_inputs(node)


def match(
    wanted: Sequence[str], candidates: dict[str, ir.Value], argument: str, kind: str
) -> list[ir.Value]:
    matched: dict[ir.Value, None] = {}
    absent: list[str] = []
    for pattern in wanted:
        if pattern in candidates:
            matched.setdefault(candidates[pattern])
            continue
        hits = fnmatch.filter(candidates, pattern) if any(c in pattern for c in "*?[") else []
        # A pattern stands for what can be differentiated; a plain name must exist.
        hits = [h for h in hits if S.is_float(candidates[h])]
        if not hits:
            absent.append(pattern)
        for name in hits:
            matched.setdefault(candidates[name])
    if absent:
        near = {
            n for a in absent for n in difflib.get_close_matches(a, candidates, n=3, cutoff=0.4)
        }
        listing = ", ".join(repr(a) for a in absent)
        choice = ", ".join(sorted(near) or list(candidates)[:8])
        raise PrepareError(
            f"no such {kind} in `{argument}`: {listing}\nhint: the model has {choice}"
        )
    if not matched:
        raise PrepareError(f"`{argument}` is empty\nhint: name at least one {kind}")
    return list(matched)


__all__ = ["batch_statistics", "reached_from", "select_outputs", "select_wrt", "trainable"]
