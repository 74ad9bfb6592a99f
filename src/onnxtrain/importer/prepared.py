"""The result of the import pipeline: a model in the normal form and facts about its tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

import onnx_ir as ir

from onnxtrain.importer.parameters import Role
from onnxtrain.targets import Target, find

# Key in Value.meta, for constants that losses, random streams and passes add to derived models.
# The mark is on the value, not in `Prepared`, to survive renames and Model.clone().
_CONSTANT = "onnxtrain.constant"
_ROTARY_EMBEDDING_OPSET = 23


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A model in the normal form, with the facts that the import pipeline found.

    ``Prepared.of(model)`` wraps a graph that was built in the normal form and never imported.
    """

    model: ir.Model
    opset: int
    """Opset of the file. Whoever runs the file has its operators, also those newer than ours."""
    roles: Mapping[str, Role] = dataclasses.field(default_factory=dict)
    """What each float initializer of the file is for, by name."""
    constants: frozenset[str] = frozenset()
    """Names of initializers that are constants of the graph, not parameters."""
    kinds: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """``weight``, ``bias``, ``normalization`` ... by use, whatever parameter list the file has."""
    unused: Mapping[str, ir.Value] = dataclasses.field(default_factory=dict)
    """Float initializers of the file that no node reads; the graph no longer has them."""
    repairs: tuple[str, ...] = ()
    """What was changed to reach the normal form, a line for each kind of change."""

    @classmethod
    def of(cls, model: ir.Model) -> Prepared:
        """Return a model that is in the normal form already."""
        return cls(model, model.opset_imports.get("", 0))

    @property
    def graph(self) -> ir.Graph:
        """The main graph."""
        return self.model.graph

    @property
    def untrained(self) -> frozenset[str]:
        """Names of tensors that are not parameters unless the user names them."""
        return frozenset(n for n, role in self.roles.items() if not role.trains)

    def copy(self) -> Prepared:
        """Return a copy whose graph can be changed; the tensors are shared."""
        unused = {
            n: ir.Value(name=x.name, type=x.type, shape=x.shape, const_value=x.const_value)
            for n, x in self.unused.items()
        }
        return dataclasses.replace(self, model=self.model.clone(), unused=unused)

    def restrict(self, target: str | Target) -> Target:
        """Return the target without operators that are newer than the file.

        A runtime that loads the file may be too old for them.
        """
        target = find(target)
        if self.opset < _ROTARY_EMBEDDING_OPSET:
            target = target.without("fuse-rotary-embedding")
        return target


def constant_names(model: ir.Model) -> frozenset[str]:
    """Return the names of initializers that are marked as constants."""
    return frozenset(n for n, x in model.graph.initializers.items() if x.meta.get(_CONSTANT))


def mark_constants(model: ir.Model, names: Iterable[str]) -> None:
    """Mark initializers as constants, not parameters; ignore names that the graph lacks."""
    for name in names:
        if name in model.graph.initializers:
            model.graph.initializers[name].meta[_CONSTANT] = True
