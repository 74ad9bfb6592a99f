"""Small parameters as one: an optimizer that works on each element needs one chain of nodes then.

On small models the nodes of the update outnumber all others, and each costs some microseconds
whatever its size. Inside a model of several steps the packed form may stay from step to step.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.artifacts.graphs import Backward, BuildOptions
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.manifest import StateSpec
from onnxtrain.optim import SGD, Adam, AdamW

SMALL = 1 << 14
"""Elements up to which a parameter is packed: beyond, copying costs as much as nodes."""
_BY_ELEMENT = (SGD, Adam, AdamW)


@dataclasses.dataclass(frozen=True)
class Pack:
    """A tensor of rank 1 that stands for several, named as the first of them."""

    members: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def name(self) -> str:
        """What the packed tensor is called."""
        return self.members[0]

    @property
    def sizes(self) -> list[int]:
        """Elements of each member."""
        return [math.prod(s) for s in self.shapes]

    def join(self, op: OpBuilder, values: Sequence[ir.Value]) -> ir.Value:
        """Emit the packed tensor."""
        return op.Concat(*(op.Reshape(v, op.const([-1])) for v in values), axis=0)

    def split(self, op: OpBuilder, value: ir.Value) -> list[ir.Value]:
        """Emit the members."""
        parts = op.Split(value, op.const(self.sizes), axis=0, _outputs=len(self.sizes))
        return [
            op.Reshape(part, op.const(list(shape), ir.DataType.INT64))
            for part, shape in zip(parts, self.shapes, strict=True)
        ]


def packed(
    origin: Backward, options: BuildOptions, state: Sequence[StateSpec]
) -> tuple[Backward, list[StateSpec], list[Pack]]:
    """Return the same with small parameters and their state packed, and what was packed how."""
    packs = _packs(origin, options)
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
        for old, new in zip(values, pack.split(front, whole), strict=True):
            old.replace_all_uses_with(new)
        graph.inputs[list(graph.inputs).index(values[0])] = whole
        gradient = pack.join(back, [gradients[n] for n in pack.members])
        gradients[pack.name] = gradient
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


def _packs(origin: Backward, options: BuildOptions) -> list[Pack]:
    """Return parameters with equal settings that an optimizer of single elements updates."""
    plain = options.ema is None and options.precision.half is None and not options.precision.scaled
    if not plain or type(options.optimizer) not in _BY_ELEMENT:
        return []
    shapes: dict[str, tuple[int, ...]] = {}
    alike: dict[tuple[float | None, float], list[str]] = collections.defaultdict(list)
    for x in origin.model.graph.inputs:
        name = x.name or ""
        if name not in origin.parameters or x.dtype != ir.DataType.FLOAT:
            continue
        shapes[name] = tuple(d for d in x.shape or () if isinstance(d, int))
        if math.prod(shapes[name]) <= SMALL:
            group = options.optimizer.group_of(name)
            alike[group.weight_decay, group.lr_factor].append(name)
    return [
        Pack(tuple(names), tuple(shapes[n] for n in names))
        for names in alike.values()
        if len(names) > 1
    ]


def _state_packs(pack: Pack, state: Sequence[StateSpec]) -> list[Pack]:
    named = {(s.parameter, s.slot): s.name for s in state}
    slots = [s.slot for s in state if s.parameter == pack.name]
    return [Pack(tuple(named[n, slot] for n in pack.members), pack.shapes) for slot in slots]
