"""Optimizer state in parts: each worker keeps and updates its own parameters (ZeRO stage 1).

The optimizer model updates all parameters in one graph. :func:`partition` divides the parameters
among workers, :func:`own_update` cuts the graph down to those of one. What a worker does not
update, it receives from the owner. Gradients are whole on every worker, so clipping by the global
norm computes the same.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.errors import OnnxTrainError
from onnxtrain.graph.nodes import captured
from onnxtrain.graph.simplify import remove_dead
from onnxtrain.manifest import Manifest, ModelSpec
from onnxtrain.runtime import session as runtime


def partition(
    manifest: Manifest, source: bytes | str, spec: ModelSpec, size: int
) -> list[list[str]]:
    """Return the parameters of each worker, with about equal bytes of state.

    Parameters whose updates read a state in common stay together, such as small ones that the graph
    joins to a vector.

    Args:
        manifest: describes the state.
        source: the optimizer model.
        spec: describes it.
        size: number of workers.

    Raises:
        OnnxTrainError: if there is no state.
    """
    owner = {s.name: s.parameter for s in manifest.state}
    parameters = [p.name for p in manifest.parameters]
    if not owner:
        raise OnnxTrainError(
            "shard_state=True, but the optimizer has no state\nhint: leave shard_state out"
        )
    groups = {n: {n} for n in parameters}
    for name, states in _states_read(source, spec).items():
        updated = owner.get(name, name)
        for state in states:
            if owner[state] not in groups or updated not in groups:  # the loss scale: all have it
                continue
            joined = groups[updated] | groups[owner[state]]
            groups.update(dict.fromkeys(joined, joined))
    cost = dict.fromkeys(parameters, 1)
    for s in manifest.state:
        if s.parameter in cost:
            cost[s.parameter] += math.prod(s.shape) * np.dtype(s.dtype).itemsize
    chosen: list[list[str]] = [[] for _ in range(size)]
    loads = [0] * size
    unique = {min(group, key=parameters.index): group for group in groups.values()}
    for first in sorted(unique, key=lambda n: (-sum(cost[m] for m in unique[n]), n)):
        worker = loads.index(min(loads))
        chosen[worker] += sorted(unique[first], key=parameters.index)
        loads[worker] += sum(cost[n] for n in unique[first])
    return chosen


def _states_read(source: bytes | str, spec: ModelSpec) -> dict[str, set[str]]:
    """Return the state tensors that the update of each parameter and its state reads."""
    graph = ir.from_proto(runtime.load_graph(source)).graph
    states = {t.name for t in spec.inputs_of("state")}
    read: dict[ir.Value, frozenset[str]] = {
        x: frozenset({x.name or ""} & states) for x in graph.inputs
    }
    empty = frozenset[str]()
    for node in graph:
        inputs = [x for x in (*node.inputs, *captured(node)) if x is not None]
        union = empty.union(*(read.get(x, empty) for x in inputs))
        read.update(dict.fromkeys(node.outputs, union))
    by_name = {y.name: y for y in graph.outputs}
    result: dict[str, set[str]] = {}
    for t in spec.outputs:
        if t.feeds is not None and t.role in ("parameter", "state"):
            result.setdefault(t.feeds, set()).update(read[by_name[t.name]])
    return result


def own_update(
    source: bytes | str, spec: ModelSpec, names: Collection[str]
) -> tuple[bytes, ModelSpec]:
    """Return the part of an optimizer model that updates some tensors, and its description.

    Args:
        source: the optimizer model.
        spec: describes it.
        names: parameters and state to update.
    """
    model = ir.from_proto(runtime.load_graph(source))
    graph = model.graph
    kept = [t for t in spec.outputs if t.feeds is None or t.feeds in names]
    outputs = {t.name for t in kept}
    graph.outputs[:] = [y for y in graph.outputs if y.name in outputs]
    remove_dead(model)
    used = {x for node in graph.all_nodes() for x in node.inputs}
    used |= {x for node in graph for x in captured(node)}
    graph.inputs[:] = [x for x in graph.inputs if x in used or x in list(graph.outputs)]
    inputs = {x.name for x in graph.inputs}
    proto: onnx.ModelProto = ir.to_proto(model)
    data = runtime.with_weights_folder(source, proto.SerializeToString())
    return data, dataclasses.replace(
        spec,
        inputs=tuple(t for t in spec.inputs if t.name in inputs),
        outputs=tuple(kept),
        in_place=tuple(n for n in spec.in_place if n in names),
    )
