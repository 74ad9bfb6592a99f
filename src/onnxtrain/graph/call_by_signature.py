"""Call gradient rules, lowerings and decompositions with the arguments their signatures name.

Each of these functions receives the builder, then the node's inputs by position (``None`` where
omitted), then the keyword-only parameters of its signature::

    def softmax(op, x, *, axis, node): ...

The value of a keyword is the first of these that exists: the caller's context (``node``, or ``y``
for a gradient rule), an attribute of the node, the attribute's default in the ONNX schema, the
default in the signature, ``None``.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder


@dataclasses.dataclass(frozen=True)
class Signature:
    """Parameters of a gradient rule, lowering or decomposition."""

    keywords: Mapping[str, Any]
    """Keyword-only parameters and their defaults, ``None`` if a parameter has no default."""
    positional: int | None
    """Number of positional parameters, the builder included; ``None`` for ``*args``."""
    required: int = 0
    """Number of positional parameters without a default."""
    needed: frozenset[str] = frozenset()
    """Keyword-only parameters without a default."""


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
# Weak keys: a lowering may be a bound method whose object holds a whole model.
_SIGNATURES: WeakKeyDictionary[Callable[..., Any], Signature] = WeakKeyDictionary()


def signature_of(function: Callable[..., Any]) -> Signature:
    """Return a function's signature, cached."""
    try:
        signature = _SIGNATURES.get(function)
        if signature is None:
            signature = _SIGNATURES[function] = _read_signature(function)
    except TypeError:  # the function is unhashable or does not support weak references
        return _read_signature(function)
    return signature


def _read_signature(function: Callable[..., Any]) -> Signature:
    parameters = inspect.signature(function).parameters.values()
    keywords = {
        p.name: None if p.default is p.empty else p.default
        for p in parameters
        if p.kind is p.KEYWORD_ONLY
    }
    variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    positional = [p for p in parameters if p.kind in _POSITIONAL]
    return Signature(
        keywords,
        None if variadic else len(positional),
        sum(p.default is p.empty for p in positional),
        frozenset(p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty),
    )


def call_by_signature(
    function: Callable[..., Any],
    op: OpBuilder,
    node: ir.Node,
    *first: Any,
    context: Mapping[str, Any],
) -> Any:
    """Call a function with a node's inputs and attributes; return its result.

    Args:
        function: called with ``op``, ``first``, the node's inputs and the keywords it declares.
        op: the builder.
        node: the node whose inputs and attributes are passed.
        first: arguments before the inputs; for a gradient rule, the gradient of the output.
        context: keyword arguments that are not attributes, by name.
    """
    wanted = signature_of(function).keywords
    keywords = {name: context[name] for name in wanted if name in context}
    if len(keywords) < len(wanted):
        attributes = S.attributes_of(node, op.opset)
        for name, default in wanted.items():
            if name not in keywords:
                value = attributes.get(name)
                keywords[name] = default if value is None else value
    return function(op, *first, *node.inputs, **keywords)


def describe_unhandled(function: Callable[..., Any], node: ir.Node, kind: str) -> str | None:
    """Return a clause that names what a function does not handle of a node, ``None`` if nothing.

    A function with a ``node`` parameter handles every attribute. ``kind`` names the function in the
    clause, such as ``"gradient rule"``.
    """
    signature = signature_of(function)
    unknown = set(node.attributes) - signature.keywords.keys()
    if unknown and "node" not in signature.keywords:
        return f"has attributes that its {kind} does not support: {', '.join(sorted(unknown))}"
    if signature.positional is not None and len(node.inputs) > signature.positional - 1:
        return f"has more inputs than its {kind} supports"
    if len(node.inputs) < signature.required - 1:
        return f"has fewer inputs than its {kind} requires"
    return None
