"""How each operator is differentiated: of the ONNX standard, and of onnxruntime's own domain."""

from __future__ import annotations

import dataclasses

import onnx

from onnxtrain.autodiff import rules  # noqa: F401 - fills the registry
from onnxtrain.autodiff.registry import NO_GRADIENT, RULES, ZERO
from onnxtrain.errors import PrepareError
from onnxtrain.graph.io.imports import RUNTIME_DOMAIN
from onnxtrain.graph.prepare.decompose import DECOMPOSITIONS, INTEGER, has_decomposition
from onnxtrain.graph.prepare.function_bodies import has_body
from onnxtrain.graph.prepare.runtime_operators import OPERATORS as MOVED
from onnxtrain.graph.prepare.versions import NEWEST_OPSET

# Deprecated operators, which raising the opset replaces.
_SUCCESSORS = {"Scatter": "ScatterElements", "Upsample": "Resize"}


@dataclasses.dataclass(frozen=True)
class OperatorReport:
    """One operator: since which opset, how it is differentiated, and why if it is not."""

    name: str
    since: int
    how: str
    """``rule``, ``body``, ``decomposed``, ``zero``, ``frozen``, ``none`` or ``missing``."""
    why: str


def operators(domain: str = "") -> list[OperatorReport]:
    """Return one line per operator of a domain, sorted by name.

    Raises:
        PrepareError: if it is neither the standard domain nor onnxruntime's own.

    >>> {o.name: o.how for o in operators()}["MatMul"]
    'rule'
    >>> {o.name: o.how for o in operators("com.microsoft")}["GroupQueryAttention"]
    'decomposed'
    """
    if domain == RUNTIME_DOMAIN:
        return _runtime_operators()
    if domain not in ("", "ai.onnx"):
        raise PrepareError(
            f"nothing is known of domain {domain!r}\nhint: ai.onnx or {RUNTIME_DOMAIN}"
        )
    newest: dict[str, onnx.defs.OpSchema] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        if schema.domain != "" or schema.since_version > NEWEST_OPSET:
            continue
        known = newest.get(schema.name)
        if known is None or schema.since_version > known.since_version:
            newest[schema.name] = schema
    return [_report(newest[name]) for name in sorted(newest)]


def _runtime_operators() -> list[OperatorReport]:
    """Return what happens to each operator of onnxruntime's own domain."""
    prefix = f"{RUNTIME_DOMAIN}::"
    keys = {k for k in (*DECOMPOSITIONS, *NO_GRADIENT) if k.startswith(prefix)}
    names = sorted(k.removeprefix(prefix) for k in keys)
    # Those that only move here from the standard domain, where onnxruntime puts them.
    return [_runtime_report(n, prefix + n) for n in names if n not in MOVED]


def _runtime_report(name: str, key: str) -> OperatorReport:
    if key in RULES:
        return OperatorReport(name, 1, "rule", "decomposed for targets that lack it")
    if key in INTEGER:
        return OperatorReport(
            name, 1, "frozen", f"{NO_GRADIENT[key]}; decomposed with straight_through=True"
        )
    if key in DECOMPOSITIONS:
        return OperatorReport(name, 1, "decomposed", "")
    how = "frozen" if "integers" in NO_GRADIENT[key] else "none"
    return OperatorReport(name, 1, how, NO_GRADIENT[key])


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
