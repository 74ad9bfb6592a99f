"""What gets one adapter: a module, in one layer or spread over several."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.adapters.families import PACKED, renamed
from onnxtrain.adapters.layers import LINEAR, Layer


@dataclasses.dataclass(frozen=True)
class Site:
    """Where a module's output lies: columns of a layer's output, columns of the module's own."""

    layer: Layer
    start: int
    width: int
    column: int = 0


@dataclasses.dataclass(frozen=True)
class Unit:
    """A module of torch: it reads ``inputs`` numbers and gives ``outputs``, at some sites."""

    module: str
    kind: str
    inputs: int
    outputs: int
    sites: tuple[Site, ...]

    @property
    def kernel(self) -> tuple[int, ...]:
        """Sizes of a convolution's window."""
        return self.sites[0].layer.kernel

    @property
    def groups(self) -> int:
        """Groups of a convolution, 1 of all else."""
        return self.sites[0].layer.groups

    @property
    def dtype(self) -> ir.DataType:
        """The type of what the module gives."""
        return self.sites[0].layer.dtype

    @property
    def largest_rank(self) -> int:
        """The rank from which on a branch could be any matrix."""
        reach = self.inputs
        for size in self.kernel:
            reach *= size
        return min(reach, self.outputs)


def units_of(layers: Sequence[Layer], family: str | None) -> list[Unit]:
    """Return the modules of a model; those that torch packs in this family are one."""
    parts: dict[str, Unit] = {}
    for layer in layers:
        for part in layer.parts:
            site = Site(layer, part.start, part.width)
            _add(parts, Unit(part.module, layer.kind, layer.inputs, part.width, (site,)))
    units = _joined(parts, PACKED.get(family or "", {}))
    return [dataclasses.replace(u, module=renamed(u.module, family)) for u in units]


def _add(units: dict[str, Unit], unit: Unit) -> None:
    """Add a unit; one that reads the weights of another is that one at a further site."""
    old = units.get(unit.module)
    if old is not None and _same_weights(old, unit):
        units[unit.module] = dataclasses.replace(old, sites=(*old.sites, *unit.sites))
        return
    name, n = unit.module, 1
    while name in units:
        name, n = f"{unit.module}_{n}", n + 1
    units[name] = dataclasses.replace(unit, module=name)


def _same_weights(a: Unit, b: Unit) -> bool:
    first, second = a.sites[0], b.sites[0]
    return (
        a.kind == b.kind
        and first.layer.weights == second.layer.weights
        and (first.start, first.width) == (second.start, second.width)
    )


def _joined(parts: dict[str, Unit], packed: dict[str, tuple[str, ...]]) -> list[Unit]:
    """Return the units with parts of a packed module put together, in the order of the file."""
    wholes: dict[str, list[str]] = collections.defaultdict(list)
    for whole, members in packed.items():
        for name in parts:
            if name.endswith("." + members[0]):
                stem = name.removesuffix(members[0])
                names = [stem + m for m in members]
                if all(n in parts and parts[n].kind == LINEAR for n in names):
                    wholes[stem + whole] = names
    first = {names[0]: whole for whole, names in wholes.items()}
    swallowed = {n for names in wholes.values() for n in names}
    units = []
    for name, unit in parts.items():
        if name in first:
            units.append(_packed(first[name], [parts[n] for n in wholes[first[name]]]))
        elif name not in swallowed:
            units.append(unit)
    return units


def _packed(module: str, members: Sequence[Unit]) -> Unit:
    sites: list[Site] = []
    column = 0
    for member in members:
        sites += [dataclasses.replace(s, column=column) for s in member.sites]
        column += member.outputs
    return Unit(module, LINEAR, members[0].inputs, column, tuple(sites))


__all__ = ["Site", "Unit", "units_of"]
