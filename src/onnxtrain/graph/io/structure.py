"""The wiring of a model, by names only: scopes, order, calls, domains and opsets.

Files and in-memory models are reduced to these records, so that both pass the same checks. All
walks are loops: the nesting of the input never becomes nesting of Python calls.
"""

from __future__ import annotations

import graphlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import onnx

from onnxtrain.graph.io.imports import RUNTIME_DOMAIN
from onnxtrain.graph.io.limits import INVALID, Kind, Limits, Problems, quote

TOO_MANY_NODES = Kind(
    "more nodes than the limit", "if you trust the file: load(..., limits=Limits(nodes=...))"
)
TOO_DEEP = Kind(
    "subgraphs or function calls nested deeper than the limit",
    "if you trust the file: load(..., limits=Limits(depth=...))",
)
REDEFINED = Kind("values that are defined twice", INVALID)
DANGLING = Kind("node inputs that nothing defines", INVALID)
NO_PRODUCER = Kind("graph outputs that nothing produces", INVALID)
CYCLE = Kind("a cycle in the graph", INVALID)
RECURSIVE = Kind("local functions that call themselves", "ONNX functions cannot be recursive")
DOMAINS = Kind(
    "operators of unknown domains",
    "onnxtrain.register_vjp admits a domain by a rule for one of its operators; "
    "load(..., allow_domains={...}) admits one whose operators you only want to run",
)
LAID_OUT = Kind(
    "operators laid out for one processor",
    "onnxruntime saved the file with ORT_ENABLE_ALL: save it with ORT_ENABLE_EXTENDED, or take the "
    "file that it was made from",
)
PROCESSING = Kind(
    "operators of onnxruntime-extensions, which make inputs or tell results",
    "cut the model behind or before them, for example with onnx.utils.extract_model, and train "
    "what is left",
)
NO_OPSET = Kind("operator domains without an opset import", INVALID)
BAD_OPSET = Kind("opset imports that cannot be used", "newer opsets need a newer onnx package")

# What the ONNX project defines, and the fused operators that `prepare` takes apart.
STANDARD_DOMAINS = frozenset(
    {
        "",
        "ai.onnx.ml",
        "ai.onnx.preview",
        "ai.onnx.preview.training",
        "ai.onnx.training",
        RUNTIME_DOMAIN,
    }
)

_KNOWN_ELSEWHERE = {
    "com.microsoft.nchwc": LAID_OUT,
    "com.ms.internal.nhwc": LAID_OUT,
    "ai.onnx.contrib": PROCESSING,
    "com.microsoft.extensions": PROCESSING,
}

_LARGEST_VERSION = (1 << 31) - 1  # onnx's own functions take no more

Key = tuple[str, str, str]  # domain, name, overload of a local function


@dataclass(slots=True)
class Node:
    """A node: names only; an omitted optional input or output is ""."""

    name: str
    domain: str
    op_type: str
    overload: str
    inputs: list[str]
    outputs: list[str]
    subgraphs: list[Graph] = field(default_factory=lambda: [])

    @property
    def key(self) -> Key:
        """The local function this node would call."""
        return self.domain, self.op_type, self.overload

    def __str__(self) -> str:
        if self.name:
            return f"node {quote(self.name)} ({clip(self.op_type)})"
        outputs = ", ".join(quote(name) for name in self.outputs[:1])
        return f"node of {outputs} ({clip(self.op_type)})" if outputs else clip(self.op_type)


@dataclass(slots=True)
class Graph:
    """A graph, subgraph or function body; ``where`` starts its lines in messages."""

    where: str
    inputs: list[str] = field(default_factory=list[str])
    initializers: list[str] = field(default_factory=list[str])
    nodes: list[Node] = field(default_factory=list[Node])
    outputs: list[str] = field(default_factory=list[str])
    opsets: list[tuple[str, int]] = field(
        default_factory=list[tuple[str, int]]
    )  # of the model or function


@dataclass(slots=True)
class Structure:
    """A whole model."""

    graph: Graph
    functions: dict[Key, Graph] = field(default_factory=dict[Key, Graph])


@dataclass(slots=True)
class _Scope:
    """A graph seen from inside: what it defines, and the node of the outer graph that holds it."""

    graph: Graph
    outer: _Scope | None
    holder: int  # index of the holding node in outer.graph.nodes
    depth: int
    made_by: dict[str, int] = field(default_factory=dict[str, int])  # -1: an input or initializer


def plain_domain(domain: str) -> str:
    """``domain`` with the long name of the default domain replaced by the empty one."""
    return "" if domain == "ai.onnx" else domain


def clip(name: str) -> str:
    """``name`` as `quote` would show it, without the quotes."""
    return quote(name)[1:-1]


def check(
    model: Structure, limits: Limits, problems: Problems, allow_domains: Collection[str]
) -> bool:
    """Note all that is wrong; return back whether the nodes are already in order."""
    sorted_already = True
    for body in (model.graph, *model.functions.values()):
        scopes = list(_scopes(body))
        for scope in scopes:
            _define(scope, problems)
        sorted_already &= _check_uses(scopes, problems)
        _check_domains(body, scopes, model, allow_domains, problems)
    _check_expansion(model, limits, problems)
    return sorted_already


def _scopes(body: Graph) -> Iterator[_Scope]:
    """Every graph in ``body``, outer ones first."""
    pending = [_Scope(body, None, -1, 0)]
    while pending:
        scope = pending.pop()
        yield scope
        for index, node in enumerate(scope.graph.nodes):
            pending += [_Scope(sub, scope, index, scope.depth + 1) for sub in node.subgraphs]


def _define(scope: _Scope, problems: Problems) -> None:
    """Fill ``made_by``: each name once per graph, and no node output that hides an outer value."""
    graph, made_by = scope.graph, scope.made_by
    for name in graph.inputs:
        if name in made_by:
            problems.add(REDEFINED, f"{graph.where}two inputs {quote(name)}")
        made_by[name] = -1
    seen: set[str] = set()
    for name in graph.initializers:  # an input may have an initializer: its default value
        if name in seen:
            problems.add(REDEFINED, f"{graph.where}two initializers {quote(name)}")
        seen.add(name)
        made_by[name] = -1
    for index, node in enumerate(graph.nodes):
        for name in node.outputs:
            if not name:
                continue
            if _find(scope, name) is not None:
                problems.add(REDEFINED, f"{graph.where}{quote(name)}, again by {node}")
            made_by[name] = index


def _find(scope: _Scope, name: str) -> _Scope | None:
    inner: _Scope | None = scope
    while inner is not None and name not in inner.made_by:
        inner = inner.outer
    return inner


def _check_uses(scopes: list[_Scope], problems: Problems) -> bool:
    for scope in scopes:
        where = scope.graph.where
        for node in scope.graph.nodes:
            for name in node.inputs:
                if name and _find(scope, name) is None:
                    problems.add(DANGLING, f"{where}{quote(name)} of {node}")
        for name in scope.graph.outputs:
            if name not in scope.made_by:
                problems.add(NO_PRODUCER, f"{where}{quote(name)}")
    unsorted = {id(s): s for s, user, maker in _edges(scopes) if maker >= user}
    if not unsorted:
        return True
    # Only now are the edges worth keeping.
    needs: dict[int, dict[int, set[int]]] = {key: {} for key in unsorted}
    for scope, user, maker in _edges(scopes):
        if id(scope) in needs:
            needs[id(scope)].setdefault(user, set()).add(maker)
    for key, scope in unsorted.items():
        try:
            graphlib.TopologicalSorter(needs[key]).prepare()
        except graphlib.CycleError as error:
            around: list[int] = error.args[1]
            names = [str(scope.graph.nodes[index]) for index in around]
            shown = names if len(names) <= 6 else [*names[:5], "..."]
            problems.add(CYCLE, scope.graph.where + " -> ".join(shown))
    return False


def _edges(scopes: list[_Scope]) -> Iterator[tuple[_Scope, int, int]]:
    """(scope, using node, making node); what a subgraph reads counts as read by its holder."""
    for scope in scopes:
        for index, node in enumerate(scope.graph.nodes):
            for name in node.inputs:
                inner, user = scope, index
                while name and name not in inner.made_by:
                    if inner.outer is None:
                        break
                    inner, user = inner.outer, inner.holder
                maker = inner.made_by.get(name, -1)
                if maker >= 0:
                    yield inner, user, maker


def _check_domains(
    body: Graph,
    scopes: list[_Scope],
    model: Structure,
    allow_domains: Collection[str],
    problems: Problems,
) -> None:
    imported: dict[str, int] = {}
    for domain, version in body.opsets:
        domain, where = plain_domain(domain), f"{body.where}domain {quote(domain)}"
        if imported.setdefault(domain, version) != version:
            problems.add(BAD_OPSET, f"{where}: versions {imported[domain]} and {version}")
        newest = _newest_opset(domain)
        if not 1 <= version <= (newest or _LARGEST_VERSION):
            known = f", onnx {onnx.__version__} knows 1 to {newest}" if newest else ""
            problems.add(BAD_OPSET, f"{where}: version {version}{known}")
    missing: dict[str, Node] = {}
    if not imported:
        problems.add(NO_OPSET, f"{body.where}there are no opset imports at all")
        return
    for scope in scopes:
        for node in scope.graph.nodes:
            known = node.domain in STANDARD_DOMAINS or node.domain in allow_domains
            if not known and node.key not in model.functions:
                kind = _KNOWN_ELSEWHERE.get(node.domain, DOMAINS)
                problems.add(kind, f"{scope.graph.where}{quote(node.domain)}: {node}")
            elif node.domain not in imported and node.domain != RUNTIME_DOMAIN:
                missing.setdefault(node.domain, node)
    for domain, node in missing.items():
        problems.add(NO_OPSET, f"{body.where}domain {quote(domain)}, used by {node}")


def _newest_opset(domain: str) -> int | None:
    if domain == "":
        return onnx.defs.onnx_opset_version()
    if domain == "ai.onnx.ml":
        return onnx.defs.onnx_ml_opset_version()
    return None


def _check_expansion(model: Structure, limits: Limits, problems: Problems) -> None:
    """Count as if all functions were inlined: a few lines that call each other twice explode."""
    bodies: dict[Key | None, Graph] = {**model.functions, None: model.graph}
    calls: dict[Key | None, list[tuple[Key, int]]] = {}
    size: dict[Key | None, int] = {}
    depth: dict[Key | None, int] = {}
    for key, body in bodies.items():
        calls[key], size[key], depth[key] = [], 0, 0
        for scope in _scopes(body):
            size[key] += len(scope.graph.nodes)
            depth[key] = max(depth[key], scope.depth)
            for node in scope.graph.nodes:
                if node.key in model.functions:
                    calls[key].append((node.key, scope.depth + 1))
    called = {key: {callee for callee, _ in callees} for key, callees in calls.items()}
    try:
        order = list(graphlib.TopologicalSorter(called).static_order())
    except graphlib.CycleError as error:
        names = [quote("::".join(part for part in key if part)) for key in error.args[1][:6]]
        problems.add(RECURSIVE, " -> ".join(names))
        return
    for key in order:
        for callee, level in calls[key]:
            size[key] = min(size[key] + size[callee], limits.nodes + 1)
            depth[key] = max(depth[key], level + depth[callee])
    if max(size.values()) > limits.nodes:
        raise problems.refusal(
            TOO_MANY_NODES, f"over {limits.nodes} nodes once the local functions are inlined"
        )
    deepest = max(depth.values())
    if deepest > limits.depth:
        detail = f"{deepest} levels once the local functions are inlined"
        raise problems.refusal(TOO_DEEP, f"{detail}, the limit is {limits.depth}")
