"""Report how a model would be differentiated, node by node, and how each operator is supported."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import onnx
import onnx_ir as ir

from onnxtrain.autodiff import rules  # noqa: F401 - fills the registry
from onnxtrain.autodiff.differentiate import (
    blocking_nodes,
    differentiable_inputs,
    differentiate,
    reachable_values,
)
from onnxtrain.autodiff.gradient_nodes import GRADIENT, TRAINING_DOMAIN
from onnxtrain.autodiff.gradients import normalize, registered_domains
from onnxtrain.autodiff.rule_registry import (
    NO_GRADIENT,
    RULES,
    ZERO_GRADIENT,
    blocks_gradient,
    find_rule,
    is_not_differentiable,
)
from onnxtrain.autodiff.selection import (
    available_selectors,
    batch_statistics,
    select_wrt,
    trainable,
)
from onnxtrain.errors import OnnxTrainError, PrepareError
from onnxtrain.expand.expansions import (
    is_decomposed,
    is_straight_through,
    training_expansions,
)
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.io import Source, load
from onnxtrain.graph.nodes import op_key, stops_gradient
from onnxtrain.graph.opset_imports import RUNTIME_DOMAIN
from onnxtrain.graph.shapes.unknown import specialize
from onnxtrain.importer.functions import PREVIEW_DOMAIN, has_body
from onnxtrain.importer.opset import RUNTIME_OPERATORS as MOVED
from onnxtrain.importer.parameters import Role

# Deprecated operators, which raising the opset replaces.
_SUCCESSORS = {"Scatter": "ScatterElements", "Upsample": "Resize"}


@dataclasses.dataclass(frozen=True)
class OperatorReport:
    """One operator: its first opset, how it is differentiated, or why it is not."""

    name: str
    since: int
    how: str
    """``rule``, ``body``, ``decomposed``, ``zero``, ``frozen``, ``none`` or ``missing``."""
    why: str


_STANDARD = ("", "ai.onnx", PREVIEW_DOMAIN, TRAINING_DOMAIN)


def operators(domain: str = "") -> list[OperatorReport]:
    """Return one line per operator of a domain, sorted by name.

    Raises:
        PrepareError: the domain is neither of the standard nor onnxruntime's.

    >>> {o.name: o.how for o in operators()}["MatMul"]
    'rule'
    >>> {o.name: o.how for o in operators("com.microsoft")}["GroupQueryAttention"]
    'decomposed'
    """
    if domain == RUNTIME_DOMAIN:
        return _runtime_operators()
    if domain not in _STANDARD:
        expected = ", ".join((*_STANDARD[1:], RUNTIME_DOMAIN))
        raise PrepareError(f"unknown domain: {domain!r} (expected one of {expected})")
    newest: dict[str, onnx.defs.OpSchema] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        if schema.domain != domain.removesuffix("ai.onnx"):
            continue
        known = newest.get(schema.name)
        if known is None or schema.since_version > known.since_version:
            newest[schema.name] = schema
    return [_report(newest[name]) for name in sorted(newest)]


def _runtime_operators() -> list[OperatorReport]:
    """Return how each operator of onnxruntime's own domain is handled."""
    prefix = f"{RUNTIME_DOMAIN}::"
    keys = {k for k in (*training_expansions(), *NO_GRADIENT) if k.startswith(prefix)}
    names = sorted(k.removeprefix(prefix) for k in keys)
    # Except operators that onnxruntime writes into the standard domain: the importer moves them.
    return [_runtime_report(n, prefix + n) for n in names if n not in MOVED]


def _runtime_report(name: str, key: str) -> OperatorReport:
    if key in RULES:
        return OperatorReport(name, 1, "rule", "decomposed for targets that lack it")
    if is_straight_through(key):
        return OperatorReport(
            name, 1, "frozen", f"{NO_GRADIENT[key]}; decomposed with straight_through=True"
        )
    if is_decomposed(key):
        return OperatorReport(name, 1, "decomposed", "")
    how = "frozen" if "integers" in NO_GRADIENT[key] else "none"
    return OperatorReport(name, 1, how, NO_GRADIENT[key])


def _report(schema: onnx.defs.OpSchema) -> OperatorReport:
    name, since = schema.name, schema.since_version
    key = name if schema.domain == "" else f"{schema.domain}::{name}"
    if key == GRADIENT:
        return OperatorReport(name, since, "decomposed", "the derivative that it defines")
    if schema.deprecated:
        successor = _SUCCESSORS.get(name)
        how = "missing" if successor is None else "decomposed"
        return OperatorReport(
            name, since, how, "" if successor is None else f"raised to {successor}"
        )
    if key in RULES:
        return OperatorReport(name, since, "rule", "")
    if key in ZERO_GRADIENT:
        return OperatorReport(name, since, "zero", ZERO_GRADIENT[key])
    if key in NO_GRADIENT:
        return OperatorReport(name, since, "none", NO_GRADIENT[key])
    if is_decomposed(key):
        return OperatorReport(name, since, "decomposed", "")
    if has_body(name, since, schema.domain):
        return OperatorReport(name, since, "body", "the function body of the ONNX standard")
    return OperatorReport(name, since, "missing", "")


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
    """The result of :func:`explain`."""

    nodes: tuple[NodeReport, ...]
    parameters: dict[str, str]
    """Trainable initializers that get a gradient: name -> dtype and shape."""
    roles: dict[str, str]
    """Role of each parameter: ``weight``, ``bias``, ``embedding`` ..."""
    frozen: dict[str, str]
    """Float initializers without a gradient, with the reason."""
    lost: tuple[str, ...]
    """Float initializers of the file that the prepared graph does not have."""
    repairs: tuple[str, ...]
    """Changes that brought the model to the normal form."""
    opset: int
    elements: int
    """Elements of all trainable parameters; :func:`onnxtrain.plan` predicts the memory."""
    refusal: str = ""
    """Why the model cannot be differentiated although every node has a rule; empty if it can."""
    selections: dict[str, str] = dataclasses.field(default_factory=dict)
    """Selectors that ``train`` accepts for this model, each with what it selects."""

    @property
    def differentiable(self) -> bool:
        """Return whether there is a parameter with a gradient."""
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
        lines.append(f"parameters: {len(self.parameters)} ({self.elements:,} elements)")
        lines += [
            f"  {name}: {shape}, {self.roles[name]}" for name, shape in self.parameters.items()
        ]
        lines += [f"selection {word}: {what}" for word, what in self.selections.items()]
        for title, entries in (("frozen", self.frozen.items()),):
            if entries:
                lines.append(f"{title}: {len(entries)}")
                lines += [f"  {name}: {why}" for name, why in entries]
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
    """Report how each node is differentiated and which tensors get a gradient.

    Args:
        model: anything :func:`onnxtrain.load` takes.
        wrt: as in :func:`onnxtrain.vjp`.
        dims: sizes to fix, as in :func:`onnxtrain.build`.
    """
    original = specialize(load(model, allow_domains=registered_domains()), dims or {})
    declared = [n for n, x in original.graph.initializers.items() if S.is_float(x)]
    work = normalize(original)
    graph = work.graph
    wanted = trainable(work) if wrt is None else select_wrt(work, wrt)
    live = reachable_values(list(graph), wanted)
    refused = _refused(graph, live)
    statistics = batch_statistics(graph)
    constants, roles = work.constants, work.roles
    frozen: dict[str, str] = {}
    for name, x in graph.initializers.items():
        if name in constants or x in wanted or not S.is_float(x):
            continue
        if x in statistics:
            frozen[name] = "running statistics of BatchNormalization"
        elif wrt is not None:
            frozen[name] = "not in wrt"
        elif name in roles and not roles[name].trains:
            frozen[name] = roles[name].why
        else:
            frozen[name] = "no differentiable path to a float output"
    frozen.update({n: "no node reads it" for n, x in work.unused.items() if x not in wanted})
    nodes = tuple(_node(n, live, refused) for n in graph)
    present = {*graph.initializers, *work.unused, *(x.name for x in graph.inputs)}
    return Report(
        nodes=nodes,
        parameters={x.name or "": _shape(x) for x in wanted},
        roles={x.name or "": _kind(roles, x) for x in wanted},
        frozen=frozen,
        lost=tuple(n for n in declared if n not in present),
        repairs=work.repairs,
        opset=work.model.opset_imports[""],
        elements=sum(x.const_value.size for x in wanted if x.const_value is not None),
        refusal="" if any(n.how == "missing" for n in nodes) else _dry_run(work.model, wanted),
        selections=available_selectors(work, trainable(work)),
    )


def _kind(parts: Mapping[str, Role], x: ir.Value) -> str:
    role = parts.get(x.name or "")
    return "input" if role is None else role.kind


def _dry_run(work: ir.Model, wanted: Sequence[ir.Value]) -> str:
    """Differentiate a copy; return the error message, empty if it succeeds."""
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
    """Return the nodes on a path to a float output that cannot be differentiated."""
    nodes = [n for n in graph if not blocks_gradient(n) or is_not_differentiable(n)]
    return set(blocking_nodes(nodes, live, [y for y in graph.outputs if S.is_float(y)]))


def _node(node: ir.Node, live: set[ir.Value], refused: set[ir.Node]) -> NodeReport:
    how, why = ("missing", NO_GRADIENT[op_key(node)]) if node in refused else _how(node, live)
    return NodeReport(node.name or "", op_key(node), how, why, S.describe(node))


def _how(node: ir.Node, live: set[ir.Value]) -> tuple[str, str]:
    key = op_key(node)
    if not any(x in live for x in differentiable_inputs(node)):
        return "constant", "does not depend on a parameter"
    if stops_gradient(node):
        return "zero", "its name stops gradients"
    if find_rule(node) is not None:
        if not any(y in live for y in node.outputs):
            return "constant", "the results are not floats"
        return "rule", ""
    if key in ZERO_GRADIENT:
        return "zero", ZERO_GRADIENT[key]
    if key in NO_GRADIENT:
        return "constant", NO_GRADIENT[key]
    if not any(y in live for y in node.outputs):
        return "constant", "the results are not floats"
    return "missing", "no gradient rule"


def _shape(x: ir.Value) -> str:
    return S.describe_value(x).removeprefix(f"{x.name}: ")
