"""Small parameters as one: an optimizer that works on each element needs one chain of nodes then.

On small models the nodes of the update outnumber all others, and each costs some microseconds
whatever its size. Inside a model of several steps the packed form may stay from step to step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain import thresholds as T
from onnxtrain.artifacts.graphs import Backward
from onnxtrain.artifacts.options import UpdateOptions
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.manifest import StateSpec
from onnxtrain.optim.packing import Pack, alike

_FLOAT32 = np.dtype("float32")


def packed(
    origin: Backward, options: UpdateOptions, state: Sequence[StateSpec]
) -> tuple[Backward, list[StateSpec], list[Pack]]:
    """Return the same with small parameters and their state packed, and what was packed how."""
    packs = _packs(origin, options, state)
    if not packs:
        return origin, list(state), []
    model = origin.model.clone()
    model.meta.update(origin.model.meta)
    graph = model.graph
    known = {x.name or "": x for x in graph.inputs}
    outputs = list(graph.outputs)
    first = len(outputs) - len(origin.parameters) - len(origin.changing)
    gradients = dict(zip(origin.parameters, outputs[first:], strict=False))
    gone: set[str] = set()
    first_node = next(iter(graph), None)
    back = OpBuilder(graph, "pack/", target=options.target)
    front = OpBuilder(graph, "pack/", target=options.target, before=first_node, parent=back)
    for pack in packs:
        values = [known[n] for n in pack.members]
        values[0].name = front.names.fresh(f"{pack.name}/member")
        size = ir.Shape([sum(pack.sizes)])
        whole = ir.Value(name=pack.name, type=values[0].type, shape=size)
        for old, new in zip(values, pack.split(front, whole).values(), strict=True):
            old.replace_all_uses_with(new)
        graph.inputs[list(graph.inputs).index(values[0])] = whole
        gradients[pack.name] = pack.join(back, gradients)
        gone.update(pack.members[1:])
        for n in pack.members[1:]:
            graph.inputs.remove(known[n])
    parameters = tuple(n for n in origin.parameters if n not in gone)
    tail = outputs[len(outputs) - len(origin.changing) :]
    graph.outputs.clear()
    graph.outputs.extend([*outputs[:first], *(gradients[n] for n in parameters), *tail])
    slots = [p for pack in packs for p in _state_packs(pack, state)]
    whole = {p.name: (sum(p.sizes),) for p in slots}
    kept = [
        dataclasses.replace(s, shape=whole.get(s.name, s.shape))
        for s in state
        if s.parameter not in gone
    ]
    return (
        dataclasses.replace(origin, model=model, parameters=parameters),
        kept,
        [*packs, *slots],
    )


def _packs(origin: Backward, options: UpdateOptions, state: Sequence[StateSpec]) -> list[Pack]:
    """Return the small float32 parameters that one update can serve, if there are several."""
    plain = options.ema is None and options.precision.half is None and not options.precision.scaled
    if not plain:
        return []
    shapes = {
        x.name or "": tuple(d for d in x.shape or () if isinstance(d, int))
        for x in origin.model.graph.inputs
        if x.name in origin.parameters and x.dtype == ir.DataType.FLOAT
    }
    # State of another shape than its parameter is not a vector's where that is one.
    apart = {s.parameter for s in state if s.shape != shapes.get(s.parameter)}
    largest = T.PACKED_PARAMETER_ELEMENTS
    small = {
        n: _FLOAT32 for n, shape in shapes.items() if math.prod(shape) <= largest and n not in apart
    }
    return [
        Pack(names[0], names, tuple(shapes[n] for n in names), _FLOAT32)
        for names in alike(options.optimizer, small)
        if len(names) > 1
    ]


def _state_packs(pack: Pack, state: Sequence[StateSpec]) -> list[Pack]:
    """Return the packs of a pack's state, each named as that of its first parameter."""
    named = {(s.parameter, s.slot): s.name for s in state}
    slots = [s.slot for s in state if s.parameter == pack.name]
    members = [tuple(named[n, slot] for n in pack.members) for slot in slots]
    return [dataclasses.replace(pack, name=names[0], members=names) for names in members]
