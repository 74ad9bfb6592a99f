"""How each operator of the ONNX standard is differentiated."""

from __future__ import annotations

import dataclasses

import onnx

from onnxtrain.autodiff import rules  # noqa: F401 - fills the registry
from onnxtrain.autodiff.registry import NO_GRADIENT, RULES, ZERO
from onnxtrain.graph.prepare.decompose import has_decomposition
from onnxtrain.graph.prepare.function_bodies import has_body
from onnxtrain.graph.prepare.versions import NEWEST_OPSET

# Deprecated operators, which raising the opset replaces.
_SUCCESSORS = {"Scatter": "ScatterElements", "Upsample": "Resize"}


@dataclasses.dataclass(frozen=True)
class OperatorReport:
    """One operator: since which opset, how it is differentiated, and why if it is not."""

    name: str
    since: int
    how: str
    """``rule``, ``body``, ``decomposed``, ``zero``, ``none`` or ``missing``."""
    why: str


def operators() -> list[OperatorReport]:
    """Return one line per operator of the default domain, sorted by name.

    >>> {o.name: o.how for o in operators()}["MatMul"]
    'rule'
    """
    newest: dict[str, onnx.defs.OpSchema] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        if schema.domain != "" or schema.since_version > NEWEST_OPSET:
            continue
        known = newest.get(schema.name)
        if known is None or schema.since_version > known.since_version:
            newest[schema.name] = schema
    return [_report(newest[name]) for name in sorted(newest)]


def _report(schema: onnx.defs.OpSchema) -> OperatorReport:
    name, since = schema.name, schema.since_version
    if schema.deprecated:
        successor = _SUCCESSORS.get(name)
        how = "missing" if successor is None else "decomposed"
        return OperatorReport(
            name, since, how, "" if successor is None else f"raised to {successor}"
        )
    if name in RULES:
        return OperatorReport(name, since, "rule", "")
    if name in ZERO:
        return OperatorReport(name, since, "zero", ZERO[name])
    if name in NO_GRADIENT:
        return OperatorReport(name, since, "none", NO_GRADIENT[name])
    if has_decomposition(name):
        return OperatorReport(name, since, "decomposed", "")
    if has_body(name, NEWEST_OPSET):
        return OperatorReport(name, since, "body", "the function body of the ONNX standard")
    return OperatorReport(name, since, "missing", "")
