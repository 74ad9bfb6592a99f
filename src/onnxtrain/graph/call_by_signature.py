"""Call a function on a node: its signature says what it wants.

Gradient rules, lowerings and decompositions are functions over the builder. Each receives the
builder, the node's inputs by position (``None`` where omitted) and, by keyword, what the
keyword-only parameters of its signature name::

    def softmax(op, x, *, axis, node): ...

A keyword is a word of the caller's context (``node``, or ``y`` for a gradient rule), else an
attribute of the node, else the attribute's default in the ONNX schema, else the default in the
signature, else ``None``.
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
    """What a function over the builder wants of a node."""

    keywords: Mapping[str, Any]
    """Keyword-only parameters with their defaults, ``None`` for those that have none."""
    positional: int | None
    """How many positional parameters there are, the builder's among them; ``None``: any number."""
    required: int = 0
    """How many of them have no default."""
    needed: frozenset[str] = frozenset()
    """The keywords that have no default."""


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
# Weak, for a lowering may be a bound method, whose object holds a model.
_SIGNATURES: WeakKeyDictionary[Callable[..., Any], Signature] = WeakKeyDictionary()


def signature_of(function: Callable[..., Any]) -> Signature:
    """Return what a function wants; the signature is read once."""
    try:
        signature = _SIGNATURES.get(function)
        if signature is None:
            signature = _SIGNATURES[function] = _read_signature(function)
    except TypeError:  # an object that cannot be hashed, or not be referred to weakly
        return _read_signature(function)
    return signature


def _read_signature(function: Callable[..., Any]) -> Signature:
    parameters = inspect.signature(function).parameters.values()
    keywords = {
        p.name: None if p.default is p.empty else p.default
        for p in parameters
        if p.kind is p.KEYWORD_ONLY
    }
    any_number = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    positional = [p for p in parameters if p.kind in _POSITIONAL]
    return Signature(
        keywords,
        None if any_number else len(positional),
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
    """Return what a function makes of a node.

    Args:
        function: called with ``op``, ``first``, the node's inputs, and the keywords it asks for.
        op: the builder.
        node: whose inputs and attributes are passed.
        first: what goes in front of the inputs: for a gradient rule, the gradient of the output.
        context: keywords that are not attributes, by name.
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
    """Return a clause on what of a node a function would not see, ``None`` if it sees all.

    A function that asks for ``node`` sees all attributes. ``kind`` is what to call the function.
    """
    signature = signature_of(function)
    unknown = set(node.attributes) - signature.keywords.keys()
    if unknown and "node" not in signature.keywords:
        return f"has attributes that its {kind} does not know: {', '.join(sorted(unknown))}"
    if signature.positional is not None and len(node.inputs) > signature.positional - 1:
        return f"has more inputs than its {kind} knows"
    if len(node.inputs) < signature.required - 1:
        return f"has fewer inputs than its {kind} needs"
    return None
