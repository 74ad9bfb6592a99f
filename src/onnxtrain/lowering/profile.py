"""Profiles of runtimes: the operators, versions, types and ranks that they support.

A :class:`Profile` is read from a JSON file (:mod:`onnxtrain.profiles`), or from the operator list
of a reduced onnxruntime build: lines ``domain;opset[,opset...];Op,Op...``, where types in braces
behind an operator are ignored. ``unsupported_nodes`` lists the nodes of a model that a runtime
rejects, with the reason. :class:`LoweringTarget` is an opset together with a profile.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain import profiles
from onnxtrain.errors import ProfileError, expected_one_of
from onnxtrain.graph import shapes as S
from onnxtrain.graph.nodes import is_standard, nodes
from onnxtrain.graph.shapes.inference import infer_shapes
from onnxtrain.importer.opset import NEWEST_OPSET
from onnxtrain.lowering.opset_converters import Draft, NotConvertibleError, convert_node


@dataclass(frozen=True)
class Profile:
    """One runtime: its operators with their versions, types, ranks and attributes."""

    name: str
    version: str = ""
    opset: tuple[int, int] = (7, NEWEST_OPSET)
    """Oldest and newest supported opset."""
    prefer: int = 17
    """Default opset of lowered models."""
    ir: tuple[int, int] = (3, 13)
    initializers_as_inputs: bool = False
    control_flow: tuple[str, ...] = ()
    max_rank: Mapping[str, int] = field(default_factory=dict)
    dtypes: Mapping[str, list[str]] = field(default_factory=dict)
    ops: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    avoid: tuple[str, ...] = ()
    quirks: tuple[str, ...] = ()
    source: str = ""
    probed: str = ""


@functools.cache
def find(name: str) -> Profile:
    """Return a profile by name.

    Raises:
        ProfileError: if the name is unknown.
    """
    if name not in profiles.names():
        choices = expected_one_of(name, profiles.names())
        raise ProfileError(f"unknown profile: {name!r} {choices}")
    return parse(profiles.read(name))


def parse(data: Mapping[str, Any]) -> Profile:
    """Return a profile from parsed JSON."""
    known = set(Profile.__dataclass_fields__) | {"domains", "functions", "comments"}
    unknown = sorted(set(data) - known)
    if unknown or "name" not in data:
        what = f"unknown keys: {', '.join(unknown)}" if unknown else "the key 'name' is missing"
        raise ProfileError(f"not a profile: {what}\nhint: see docs/lowering.md for the format")
    values = {k: v for k, v in data.items() if k in Profile.__dataclass_fields__}
    for key in ("ir", "control_flow", "avoid", "quirks"):
        if key in values:
            values[key] = tuple(values[key])
    if "opset" in values:
        values["opset"] = tuple(values["opset"]["ai.onnx"])
    return Profile(**values)


def unsupported_reason(profile: Profile, d: Draft, opset: int) -> str | None:
    """Return why a runtime cannot run a node in this form, ``None`` if it can."""
    if d.op_type in profile.control_flow or d.op_type == "Constant":
        return None
    entry = profile.ops.get(d.op_type)
    if entry is None:
        return f"{profile.name} has no {d.op_type}"
    if d.op_type in profile.avoid:
        return f"{profile.name} should avoid {d.op_type}"
    schema = S.schema_of(d.op_type, opset)
    since = entry.get("since")
    if since and schema is not None and not profiles.covers(since, schema.since_version):
        return f"{profile.name} has no {d.op_type} of version {schema.since_version}"
    return _attributes(profile, d, entry) or _values(profile, d, entry)


def _attributes(profile: Profile, d: Draft, entry: Mapping[str, Any]) -> str | None:
    for name, allowed in entry.get("attrs", {}).items():
        value = d.get(name)
        if value is not None and value not in allowed:
            return f"{profile.name} has no {d.op_type} with {name}={value!r}"
    most_in, most_out = entry.get("arity", (None, None))  # used inputs and outputs
    used = [i for i, y in enumerate(d.node.outputs) if y.uses() or y.is_graph_output()]
    if most_in is not None and len(d.inputs) > most_in:
        return f"{profile.name} has no {d.op_type} with {len(d.inputs)} inputs"
    if most_out is not None and used and used[-1] >= most_out:
        return f"{profile.name} has no output {used[-1]} of {d.op_type}"
    for i in entry.get("const_inputs", ()):
        x = d.input(i)
        if isinstance(x, ir.Value) and x.const_value is None:
            return f"{profile.name} needs a constant input {i} of {d.op_type}"
    return None


def dtypes_of(profile: Profile, op_type: str) -> tuple[list[str] | None, tuple[int, ...]]:
    """Return the types of an operator (``None`` for all), and the inputs that may have any type.

    The runtime reads those inputs at load time.
    """
    entry = profile.ops.get(op_type, {})
    dtypes = entry.get("dtypes") or profile.dtypes.get(op_type) or profile.dtypes.get("*")
    return dtypes, tuple(entry.get("any_dtype", ()))


def max_rank_of(profile: Profile, op_type: str) -> int | None:
    """Return the highest supported rank of an operator, ``None`` for any."""
    return profile.max_rank.get(op_type, profile.max_rank.get("*"))


def _values(profile: Profile, d: Draft, entry: Mapping[str, Any]) -> str | None:
    ranks = entry.get("ranks")
    highest = max_rank_of(profile, d.op_type)
    dtypes, free = dtypes_of(profile, d.op_type)
    for i, x in enumerate([*d.inputs, *d.node.outputs]):
        if x is None or isinstance(x, np.ndarray) or not x.name:
            continue
        rank = None if x.shape is None else len(x.shape)
        batch = entry.get("batch")  # the only batch size with right results
        if i == 0 and batch is not None and (S.dims_of(x) or (None,))[0] != batch:
            return f"{profile.name} has {d.op_type} of batch {batch} only"
        if i == 0 and ranks and rank is not None and rank not in ranks:
            return f"{profile.name} has no {d.op_type} of rank {rank}"
        if highest is not None and rank is not None and rank > highest:
            return f"{profile.name} has no tensors of rank {rank} in {d.op_type}"
        if dtypes and i not in free and x.dtype is not None and x.dtype.name.lower() not in dtypes:
            return f"{profile.name} has no {x.dtype.name.lower()} in {d.op_type}"
    return None


_BRACES = re.compile(r"\{[^{}]*\}")


def read_config(text: str, name: str) -> Profile:
    """Return the profile of a build from the text of its ``required_operators.config``."""
    by_opset: dict[int, set[str]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.split("#", 1)[0].strip()
        if not line or line.startswith("!"):  # "!" lines are about types for the whole build
            continue
        while _BRACES.search(line):
            line = _BRACES.sub("", line)
        parts = [p.strip() for p in line.split(";")]
        if len(parts) != 3 or not re.fullmatch(r"\d+(,\d+)*", parts[1].replace(" ", "")):
            raise ProfileError(
                f"{name}, line {number}: not an operator list: {line!r}\n"
                "hint: domain;opset;Op,Op,... as create_reduced_build_config.py writes it"
            )
        if parts[0] not in ("ai.onnx", ""):
            continue
        ops = {o.strip() for o in parts[2].split(",") if o.strip()}
        for opset in parts[1].split(","):
            by_opset.setdefault(int(opset), set()).update(ops)
    if not by_opset:
        raise ProfileError(f"{name}: lists no operators of ai.onnx")
    # A reduced build has the kernels of the listed opsets only.
    newest = max(by_opset)
    return Profile(
        name=name,
        opset=(newest, newest),
        prefer=newest,
        control_flow=tuple(sorted(by_opset[newest] & {"If", "Loop", "Scan"})),
        ops={o: {} for o in sorted(by_opset[newest])},
        source=name,
    )


def write_config(model: ir.Model) -> str:
    """Return the text of a ``required_operators.config`` for a model."""
    opset = model.opset_imports.get("", 0)
    ops = sorted({n.op_type for n in nodes(model.graph, subgraphs=True)})
    return f"ai.onnx;{opset};{','.join(ops)}\n"


@dataclass(frozen=True)
class UnsupportedNode:
    """A node (or the model) that the runtime rejects, and why."""

    node: str
    what: str
    why: str

    def __str__(self) -> str:
        return f"node {self.node!r}: {self.what}: {self.why}" if self.node else self.why


def unsupported_nodes(model: ir.Model, profile: Profile) -> list[UnsupportedNode]:
    """Return the nodes of a loaded model that a runtime rejects, with reasons."""
    opset = model.opset_imports.get("", 0)
    obstacles: list[UnsupportedNode] = []
    low, high = profile.opset
    if not low <= opset <= high:
        why = f"opset {opset}; {profile.name} reads {low} to {high}"
        obstacles.append(UnsupportedNode("", "", why))
    low, high = profile.ir
    if not low <= model.ir_version <= high:
        why = f"IR version {model.ir_version}; {profile.name} reads {low} to {high}"
        obstacles.append(UnsupportedNode("", "", why))
    infer_shapes(model.graph, opset)
    for node in model.graph.all_nodes():
        if not is_standard(node):
            why: str | None = f"an operator of domain {node.domain!r}"
        else:
            d = Draft(node.op_type, list(node.inputs), dict(node.attributes), node, opset)
            why = unsupported_reason(profile, d, opset)
        if why is not None:
            name = node.name or next((y.name for y in node.outputs if y.name), "") or ""
            obstacles.append(UnsupportedNode(name, S.describe(node), why))
    return obstacles


_IR_VERSIONS = {7: 3, 8: 3, 9: 4, 10: 5, 11: 6, 12: 7, 13: 7, 14: 7, 15: 8, 16: 8, 17: 8, 18: 8}
_IR_VERSIONS |= {19: 9, 20: 9, 21: 10, 22: 10, 23: 11, 24: 12, 25: 12, 26: 13}
OLDEST, NEWEST = min(_IR_VERSIONS), max(_IR_VERSIONS)


@dataclass(frozen=True)
class LoweringTarget:
    """What a model is lowered to: an opset, and optionally a profile."""

    opset: int
    working: int
    """The opset of the model while it is lowered."""
    profile: Profile | None = None
    sizes: list[str] = field(default_factory=list)
    """Symbolic input sizes, for error messages."""

    @property
    def title(self) -> str:
        """Return the opset and runtime, for error messages."""
        where = f"opset {self.opset}"
        return f"{self.profile.name} ({where})" if self.profile is not None else where

    @property
    def ir_version(self) -> int:
        """Return the IR version of the opset's release, clamped to what the profile supports."""
        version = _IR_VERSIONS[self.opset]
        if self.profile is not None:
            low, high = self.profile.ir
            version = min(max(version, low), high)
        return version

    @property
    def initializers_as_inputs(self) -> bool:
        """Return whether every initializer must be a graph input."""
        required = self.profile is not None and self.profile.initializers_as_inputs
        return required or self.ir_version < 4

    def obstacle(self, node: ir.Node) -> str | None:
        """Return why the target cannot run a node, ``None`` if it can."""
        try:
            draft = convert_node(node, min(self.opset, self.working), self.working)
        except NotConvertibleError as error:
            return str(error)
        return None if self.profile is None else unsupported_reason(self.profile, draft, self.opset)
