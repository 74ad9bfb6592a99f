"""What would happen if a model were differentiated, node by node."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from onnxtrain.autodiff.differentiate import (
    differentiable_inputs,
    differentiate,
    needed_for,
    reached_from,
)
from onnxtrain.autodiff.load_normalized import load_normalized, own_domains
from onnxtrain.autodiff.memory_estimate import Memory, estimate
from onnxtrain.autodiff.named_selections import listed
from onnxtrain.autodiff.registry import (
    NO_GRADIENT,
    ZERO,
    find_rule,
    is_refused,
    is_stopped,
    key_of,
)
from onnxtrain.autodiff.selection import batch_statistics, select_wrt, trainable
from onnxtrain.errors import OnnxTrainError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.io import Source, load
from onnxtrain.graph.nodes import stops_gradient
from onnxtrain.graph.prepare import constant_names, repairs_of, unused_parameters
from onnxtrain.graph.roles import Role, roles_of
from onnxtrain.graph.shapes.specialise import specialise


@dataclasses.dataclass(frozen=True)
class NodeReport:
    """One node of the prepared graph."""

    name: str
    op: str
    how: str
    """``rule``, ``zero``, ``constant`` (nothing to differentiate) or ``missing``."""
    why: str
    signature: str


@dataclasses.dataclass(frozen=True)
class Report:
    """What :func:`explain` found."""

    nodes: tuple[NodeReport, ...]
    parameters: dict[str, str]
    """Trainable initializers that get a gradient: name -> dtype, shape and role."""
    roles: dict[str, str]
    """What each parameter is for: ``weight``, ``bias``, ``embedding`` ..."""
    frozen: dict[str, str]
    """Float initializers that get none, with the reason."""
    lost: tuple[str, ...]
    """Names asked for that the prepared graph does not have."""
    repairs: tuple[str, ...]
    """What was changed to reach the normal form."""
    opset: int
    memory: Memory
    """What training would take, estimated from shapes."""
    refusal: str = ""
    """What stands in the way although every node has a rule; empty if nothing does."""
    selections: dict[str, str] = dataclasses.field(default_factory=dict)
    """Words that `train` takes for some of the parameters, with what they stand for."""

    @property
    def differentiable(self) -> bool:
        """Return whether there is a parameter, and a gradient all the way to it."""
        missing = any(n.how == "missing" for n in self.nodes)
        return bool(self.parameters) and not missing and not self.refusal

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data, ready for JSON."""
        return {**dataclasses.asdict(self), "differentiable": self.differentiable}

    def __str__(self) -> str:
        lines = [f"opset {self.opset}, {len(self.nodes)} nodes"]
        lacking = sum(n.how == "missing" for n in self.nodes)
        lines.append(self._verdict(lacking))
        counts = Counter((n.how, n.op) for n in self.nodes)
        for how in ("missing", "rule", "zero", "constant"):
            kinds = [
                f"{op} x{n}" if n > 1 else op for (h, op), n in sorted(counts.items()) if h == how
            ]
            if kinds:
                lines.append(f"  {how}: {', '.join(kinds)}")
        lines += [f"  missing {n.name!r}: {n.signature}" for n in self.nodes if n.how == "missing"]
        lines.append(f"parameters: {len(self.parameters)}")
        lines += [
            f"  {name}: {shape}, {self.roles[name]}" for name, shape in self.parameters.items()
        ]
        lines += [f"selection {word}: {what}" for word, what in self.selections.items()]
        for title, entries in (("frozen", self.frozen.items()),):
            if entries:
                lines.append(f"{title}: {len(entries)}")
                lines += [f"  {name}: {why}" for name, why in entries]
        lines.append(f"memory: {self.memory}")
        if self.lost:
            lines.append(f"lost: {', '.join(self.lost)}")
        if self.repairs:
            lines.append("repairs:")
            lines += [f"  {line}" for line in self.repairs]
        return "\n".join(lines)

    def _verdict(self, lacking: int) -> str:
        if lacking:
            return f"not differentiable: {lacking} node(s) lack a rule"
        if self.refusal:
            return "not differentiable: " + self.refusal.replace("\n", "\n  ")
        return "differentiable" if self.parameters else "nothing to differentiate: no parameters"


def explain(
    model: Source,
    wrt: str | Sequence[str] | None = None,
    *,
    dims: Mapping[str, int] | None = None,
) -> Report:
    """Return for each node whether and how it is differentiated, and the fate of each parameter.

    Args:
        model: anything :func:`onnxtrain.load` takes.
        wrt: as in :func:`onnxtrain.vjp`.
        dims: sizes to fix, as in :func:`onnxtrain.build`; others count as one in the estimate of
            memory.
    """
    original = specialise(load(model, allow_domains=own_domains()), dims or {})
    declared = [n for n, x in original.graph.initializers.items() if S.is_float(x)]
    work = load_normalized(original)
    graph = work.graph
    wanted = trainable(work) if wrt is None else select_wrt(work, wrt)
    live = reached_from(list(graph), wanted)
    refused = _refused(graph, live)
    statistics = batch_statistics(graph)
    hidden, parts = constant_names(work), roles_of(work)
    frozen: dict[str, str] = {}
    for name, x in graph.initializers.items():
        if name in hidden or x in wanted or not S.is_float(x):
            continue
        if x in statistics:
            frozen[name] = "running statistics of BatchNormalization"
        elif wrt is not None:
            frozen[name] = "not in wrt"
        elif name in parts and not parts[name].trains:
            frozen[name] = parts[name].why
        else:
            frozen[name] = "no differentiable path to a float output"
    unused = unused_parameters(work)
    frozen.update({n: "no node reads it" for n, x in unused.items() if x not in wanted})
    nodes = tuple(_node(n, live, refused) for n in graph)
    present = {*graph.initializers, *unused, *(x.name for x in graph.inputs)}
    return Report(
        nodes=nodes,
        parameters={x.name or "": _shape(x) for x in wanted},
        roles={x.name or "": _kind(parts, x) for x in wanted},
        frozen=frozen,
        lost=tuple(n for n in declared if n not in present),
        repairs=repairs_of(work),
        opset=work.opset_imports[""],
        memory=_memory(graph, wanted, dims or {}),
        refusal="" if any(n.how == "missing" for n in nodes) else _trial(work, wanted),
        selections=listed(work, trainable(work)),
    )


def _memory(graph: ir.Graph, wanted: Sequence[ir.Value], dims: Mapping[str, int]) -> Memory:
    memory = estimate(graph, wanted)
    return dataclasses.replace(memory, sizes={**dims, **memory.sizes})


def _kind(parts: Mapping[str, Role], x: ir.Value) -> str:
    role = parts.get(x.name or "")
    return "input" if role is None else role.kind


def _trial(work: ir.Model, wanted: Sequence[ir.Value]) -> str:
    """Return why the gradient cannot be made, by making it; empty if it can."""
    copy = work.clone()
    graph = copy.graph
    known = {x.name: x for x in (*graph.inputs, *graph.initializers.values())}
    wrt = [known[x.name] for x in wanted if x.name in known]
    outputs = [y for y in graph.outputs if S.is_float(y)]
    if not wrt or not outputs:
        return ""
    op = OpBuilder(graph, "grad/")
    try:
        differentiate(op, {y: op.zeros_like(y) for y in outputs}, wrt)
    except OnnxTrainError as error:
        return str(error)
    return ""


def _refused(graph: ir.Graph, live: set[ir.Value]) -> set[ir.Node]:
    """Return the nodes on the way to a float output through which nothing can be differentiated."""
    nodes = [n for n in graph if not is_stopped(n) or is_refused(n)]
    flowing = needed_for(nodes, [y for y in graph.outputs if S.is_float(y)])
    return {n for n in flowing if is_refused(n) and live.intersection(n.inputs)}


def _node(node: ir.Node, live: set[ir.Value], refused: set[ir.Node]) -> NodeReport:
    how, why = ("missing", NO_GRADIENT[key_of(node)]) if node in refused else _how(node, live)
    return NodeReport(node.name or "", key_of(node), how, why, S.describe(node))


def _how(node: ir.Node, live: set[ir.Value]) -> tuple[str, str]:
    key = key_of(node)
    if not any(x in live for x in differentiable_inputs(node)):
        return "constant", "does not depend on a parameter"
    if stops_gradient(node):
        return "zero", "its name says that no gradient passes"
    if find_rule(node) is not None:
        if not any(y in live for y in node.outputs):
            return "constant", "the results are not floats"
        return "rule", ""
    if key in ZERO:
        return "zero", ZERO[key]
    if key in NO_GRADIENT:
        return "constant", NO_GRADIENT[key]
    if not any(y in live for y in node.outputs):
        return "constant", "the results are not floats"
    return "missing", "no gradient rule"


def _shape(x: ir.Value) -> str:
    return S.describe_value(x).removeprefix(f"{x.name}: ")
