"""Registry of operator expansions: one operator computed by others.

An expansion is a function over the builder, registered for an operator and for the condition under
which it replaces that operator::

    @expansion("com.microsoft::BiasGelu", when=TRAINING)
    def bias_gelu(op, x, bias):
        return op.Gelu(op.Add(x, bias))

The roles of its weights belong in ``INPUT_ROLES`` of :mod:`onnxtrain.importer.parameters`;
without an entry they are frozen.

The function receives the node's inputs by position (``None`` where omitted), attributes by keyword
if its signature names them, and ``node`` on request. Attributes without a value get the schema's
default, else the default of the signature (fused operators of ``com.microsoft`` have no schema). It
returns the replacement of each output, or ``None`` if it does not apply to this node.

The conditions, in the order in which a model meets them:

``TRAINING``
    Before differentiation: the operator has no gradient rule. One expansion per operator.
``STRAIGHT_THROUGH``
    Like ``TRAINING``, but only for models trained straight through their quantizers. Integer
    arithmetic becomes float arithmetic between quantizers. Elsewhere the node stays, and its
    result keeps every bit.
``on_target(lacks=...)``, ``on_target(prefers=...)``
    After differentiation: the runtime that the graph is generated for has no kernel, or a slow one.
``LOWERING``
    In ``onnxtrain.lower``: the older opset or the profile of the runtime has no such operator.
    Expansions of one operator are tried in the order of registration, so the cheapest comes first.
    They may emit any operator of the working opset; what the profile lacks of those is expanded
    in turn.

One file per family holds all expansions of an operator, whatever their condition.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Any, NoReturn

import onnx_ir as ir

from onnxtrain.errors import LoweringError, OnnxTrainError, PrepareError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.call_by_signature import call_by_signature, describe_unhandled, signature_of
from onnxtrain.graph.nodes import op_key
from onnxtrain.graph.shapes.inference import infer_shapes
from onnxtrain.targets import Target


class Stage(enum.Enum):
    """A condition that depends on the stage of the pipeline alone."""

    TRAINING = enum.auto()
    STRAIGHT_THROUGH = enum.auto()
    LOWERING = enum.auto()


TRAINING, STRAIGHT_THROUGH, LOWERING = Stage.TRAINING, Stage.STRAIGHT_THROUGH, Stage.LOWERING
_BEFORE_DIFFERENTIATION = (TRAINING, STRAIGHT_THROUGH)


@dataclasses.dataclass(frozen=True)
class TargetCondition:
    """A condition on the target that the graph is generated for; see :func:`on_target`."""

    lacks: str | None
    prefers: str | None
    min_opset: int

    def holds(self, target: Target, opset: int) -> bool:
        """Return whether the expansion applies for a target at an opset."""
        lacks = self.lacks is None or target.lacks(self.lacks)
        prefers = self.prefers is None or target.prefers(self.prefers)
        return lacks and prefers and opset >= self.min_opset


def on_target(
    *, lacks: str | None = None, prefers: str | None = None, min_opset: int = 0
) -> TargetCondition:
    """Return the condition that a target lacks a capability, or has a preference.

    Args:
        lacks: a name of ``targets.LACKS``.
        prefers: a name of ``targets.PREFERS``.
        min_opset: the oldest opset at which the expansion is needed.
    """
    return TargetCondition(lacks, prefers, min_opset)


Function = Callable[..., Any]
When = Stage | TargetCondition


@dataclasses.dataclass(frozen=True)
class Expansion:
    """One registered function and the condition under which it is used."""

    function: Function
    when: When


EXPANSIONS: dict[str, list[Expansion]] = {}
"""All expansions by operator, keyed ``"Op"`` or ``"domain::Op"``."""


def expansion(*ops: str, when: When) -> Callable[[Function], Function]:
    """Register an expansion of operators keyed ``"Op"`` or ``"domain::Op"``."""

    def register(function: Function) -> Function:
        for op in ops:
            if when in _BEFORE_DIFFERENTIATION and is_decomposed(op):
                raise ValueError(f"{op} already has an expansion for training")
            EXPANSIONS.setdefault(op, []).append(Expansion(function, when))
        return function

    return register


def _find(key: str, *stages: When) -> list[Function]:
    return [e.function for e in EXPANSIONS.get(key, ()) if e.when in stages]


def training_expansions() -> dict[str, Function]:
    """Return the expansions before differentiation, by operator."""
    found = ((key, _find(key, *_BEFORE_DIFFERENTIATION)) for key in EXPANSIONS)
    return {key: functions[0] for key, functions in found if functions}


def is_decomposed(key: str) -> bool:
    """Return whether an operator has an expansion before differentiation."""
    return bool(_find(key, *_BEFORE_DIFFERENTIATION))


def is_straight_through(key: str) -> bool:
    """Return whether an operator is expanded only to train straight through its quantizers."""
    return bool(_find(key, STRAIGHT_THROUGH))


def target_expansions(target: Target, opset: int) -> dict[str, Function]:
    """Return the expansions that a target needs at an opset, sorted by operator."""
    return {
        key: e.function
        for key in sorted(EXPANSIONS)  # the order decides the names of new values
        for e in EXPANSIONS[key]
        if isinstance(e.when, TargetCondition) and e.when.holds(target, opset)
    }


def lowerings(op_type: str) -> list[Function]:
    """Return the expansions for older opsets and smaller runtimes, cheapest first."""
    return _find(op_type, LOWERING)


def apply_lowering(function: Function, op: OpBuilder, node: ir.Node) -> list[Any] | None:
    """Call an expansion on a node; return the replacements, ``None`` if it does not apply."""
    unknown = describe_unhandled(function, node, "lowering")
    if unknown is not None:
        raise LoweringError(f"{S.describe(node)} {unknown}")
    try:
        replacements = call_by_signature(function, op, node, context={"node": node})
    except OnnxTrainError:
        raise
    except S.INVALID_NODE_ERRORS as error:
        raise LoweringError(S.invalid_node_message(node, error)) from error
    if replacements is None:
        return None
    return list(replacements) if isinstance(replacements, tuple | list) else [replacements]


def raise_unsupported(node: ir.Node, why: str) -> NoReturn:
    """Raise an error that names a node which its expansion does not express, and why."""
    raise PrepareError(f"node {node.name!r}: {S.describe(node)}: {why}")


# These have optional inputs in front of required ones, so an omitted input is not an error.
_OPTIONAL_BEFORE_REQUIRED = frozenset({"com.microsoft::EmbedLayerNormalization"})


def decompose(
    model: ir.Model,
    only: Callable[[str], bool],
    keep: Callable[[ir.Node], bool] = lambda node: False,
) -> list[str]:
    """Apply the expansions before differentiation, in place; return a line per operator.

    Args:
        model: the model to rewrite.
        only: whether the operator of a key is expanded.
        keep: whether a node stays although its operator is expanded.

    Raises:
        PrepareError: if a node has attributes or outputs that its expansion does not express.
    """
    counts: dict[str, int] = {}

    def selected(node: ir.Node) -> bool:
        return is_decomposed(op_key(node)) and only(op_key(node)) and not keep(node)

    if not any(selected(node) for node in model.graph.all_nodes()):
        return []
    builder = OpBuilder(model.graph, prefix="prepare/")

    def rewrite(node: ir.Node) -> bool:
        if not selected(node):
            return False
        graph = node.graph
        assert isinstance(graph, ir.Graph)
        op = OpBuilder(graph, builder.prefix, before=node, parent=builder)
        (function,) = _find(op_key(node), *_BEFORE_DIFFERENTIATION)
        outputs = _call(function, op, node)
        if outputs is None:
            return False
        counts[op_key(node)] = counts.get(op_key(node), 0) + 1
        replacements = list(outputs) if isinstance(outputs, tuple | list) else [outputs]
        _replace(graph, op, node, replacements)
        return True

    # Shapes are inferred along the way: an expansion reads those of its inputs.
    infer_shapes(model.graph, model.opset_imports[""], rewrite)
    return [f"{key}: {n} node(s) rewritten into standard operators" for key, n in counts.items()]


def _call(function: Function, op: OpBuilder, node: ir.Node) -> Any:
    unknown = describe_unhandled(function, node, "decomposition")
    if unknown is not None:
        raise PrepareError(f"node {node.name!r}: {S.describe(node)} {unknown}")
    missing = _missing_arguments(function, op, node)
    if missing:
        raise PrepareError(
            f"node {node.name!r}: {S.describe(node)} lacks what its operator needs: {missing}"
        )
    try:
        return call_by_signature(function, op, node, context={"node": node})
    except OnnxTrainError:
        raise
    except S.INVALID_NODE_ERRORS as error:
        raise PrepareError(S.invalid_node_message(node, error)) from error


def _missing_arguments(function: Function, op: OpBuilder, node: ir.Node) -> str:
    """Return the required inputs and attributes that a node does not have."""
    signature = signature_of(function)
    attributes = signature.needed - {"node"} - S.attributes_of(node, op.opset).keys()
    inputs = []
    if op_key(node) not in _OPTIONAL_BEFORE_REQUIRED:
        required = node.inputs[: signature.required - 1]
        inputs = [f"input {i}" for i, x in enumerate(required) if x is None]
    return ", ".join([*inputs, *sorted(attributes)])


def _replace(graph: ir.Graph, op: OpBuilder, node: ir.Node, values: list[ir.Value | None]) -> None:
    """Redirect the uses of a node's outputs to ``values`` and remove the node."""
    for i, old in enumerate(node.outputs):
        new = values[i] if i < len(values) else None
        if not old.name or not (old.uses() or old.is_graph_output()):
            continue
        if new is None:
            raise PrepareError(
                f"node {node.name!r}: {S.describe(node)}: output {i} ({old.name}) cannot be "
                "expressed in standard operators\nhint: remove its consumers from the model"
            )
        if old.is_graph_output():
            new = op.Identity(new)
            name, old.name = old.name, op.names.fresh(f"{old.name}.replaced")
            new.name = name
        new.type = new.type or old.type
        if new.shape is None:
            new.shape = old.shape
        old.replace_all_uses_with(new, replace_graph_outputs=True)
    graph.remove(node, safe=True)
