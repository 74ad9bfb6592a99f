"""What a float tensor of a file is for: a parameter that trains, or a constant, with the reason."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

import onnx_ir as ir

_ROLES = "onnxtrain.roles"  # key in Model.meta: name of a tensor -> its role
_KINDS = "onnxtrain.kinds"  # key in Model.meta: name of a tensor -> its kind by use
_SHOWN = 6  # names in a line of a report


@dataclasses.dataclass(frozen=True)
class Role:
    """The part that a tensor plays."""

    kind: str
    """``weight``, ``bias``, ``normalisation``, ``embedding``, ``constant`` ..."""
    why: str
    """How it is used, in words."""
    trains: bool
    """Whether it is a parameter unless the user says otherwise."""

    def __str__(self) -> str:
        return self.why if self.kind in self.why else f"{self.kind}: {self.why}"


def parameter(kind: str, why: str) -> Role:
    """Return the role of something that training changes."""
    return Role(kind, why, True)


def constant(why: str, kind: str = "constant") -> Role:
    """Return the role of something that training leaves alone."""
    return Role(kind, why, False)


def roles_of(model: ir.Model) -> Mapping[str, Role]:
    """Return the roles that were noted for a model's tensors, by name."""
    return model.meta.get(_ROLES, {})


def note_roles(model: ir.Model, roles: Mapping[str, Role]) -> None:
    """Record the roles of a model's tensors."""
    model.meta[_ROLES] = dict(roles)


def note_kinds(model: ir.Model, by_use: Mapping[str, str]) -> None:
    """Record what each tensor is for by its use, whatever the maker of the file says."""
    model.meta[_KINDS] = dict(by_use)


def kinds(model: ir.Model) -> Mapping[str, str]:
    """Return what each tensor is for by its use: ``weight``, ``bias``, ``normalisation`` ..."""
    return model.meta.get(_KINDS, {})


def summary(roles: Mapping[str, Role], names: Iterable[str]) -> list[str]:
    """Return a line for each reason why some of ``names`` are no parameters."""
    by_reason: dict[str, list[str]] = {}
    for name in names:
        role = roles.get(name)
        if role is not None and not role.trains:
            by_reason.setdefault(role.why, []).append(name)
    lines = []
    for why, members in sorted(by_reason.items(), key=lambda entry: (-len(entry[1]), entry[0])):
        more = f" and {len(members) - _SHOWN} more" if len(members) > _SHOWN else ""
        lines.append(f"not trained, {why}: {len(members)}: {', '.join(members[:_SHOWN])}{more}")
    return lines
