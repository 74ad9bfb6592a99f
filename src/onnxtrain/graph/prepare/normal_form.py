"""The normal form that every later stage may assume.

Local functions inlined; the working opset; constants as initializers; padding explicit; fused
operators and static sequences resolved; shapes inferred, with symbolic sizes unified.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import onnx_ir as ir

from onnxtrain.graph.io.imports import load_repairs, note_file_opset
from onnxtrain.graph.prepare import decompositions  # noqa: F401 - fills the table
from onnxtrain.graph.prepare.branches import resolve_branches
from onnxtrain.graph.prepare.constants import fold, lift_constants
from onnxtrain.graph.prepare.decompose import INTEGER, decompose
from onnxtrain.graph.prepare.empty_axes import drop_empty_axes
from onnxtrain.graph.prepare.exact_products import exact_products
from onnxtrain.graph.prepare.function_bodies import inline_bodies
from onnxtrain.graph.prepare.hidden_weights import show_weights
from onnxtrain.graph.prepare.left_open import explicit_squeezes, pin_loop_states
from onnxtrain.graph.prepare.local_functions import inline_functions
from onnxtrain.graph.prepare.normalise import normalise
from onnxtrain.graph.prepare.sequences import resolve_sequences
from onnxtrain.graph.prepare.spelled_sigmoid import name_sigmoids
from onnxtrain.graph.prepare.versions import OPSET, to_working_opset
from onnxtrain.graph.roles import kinds_by_use, note_kinds, note_roles, roles
from onnxtrain.graph.shapes import dims as D
from onnxtrain.graph.shapes import dims_of, is_float, schema_of
from onnxtrain.graph.shapes.infer import infer_shapes, invented
from onnxtrain.graph.shapes.open_sizes import note_root
from onnxtrain.graph.simplify import remove_dead, remove_identities

_SMALL_INTEGERS = 64  # elements: more are no pads, axes or shape
_CONSTANTS = "onnxtrain.constants"  # key in Model.meta: initializers that are no parameters
_UNUSED = "onnxtrain.unused"  # key in Model.meta: float initializers that nothing reads
_REPAIRS = "onnxtrain.repairs"  # key in Model.meta: what was changed, in words


def prepare(
    model: ir.Model,
    *,
    inline: Callable[[str], bool] = lambda op_type: False,
    keep: Callable[[ir.Node], bool] = lambda node: False,
    straight_through: bool = False,
    by_readers: bool = True,
) -> ir.Model:
    """Return the model in the normal form; the argument must not be used any more.

    Args:
        model: a model from ``load``.
        inline: tells for which operators the standard's function body is to be inlined.
        keep: tells which nodes of other domains are to stay as they are.
        straight_through: whether integer arithmetic becomes floats between quantisers.
        by_readers: whether a shape that is left open may be decided by what reads it.
    """
    repairs: list[str] = list(load_repairs(model))
    opset = model.opset_imports.get("", model.opset_imports.get("ai.onnx", OPSET))
    if model.functions:
        repairs.append(f"{len(model.functions)} local function(s) inlined")
        model = inline_functions(model)
    model, shown = show_weights(model)
    repairs += shown
    parts = roles(model)
    uses = kinds_by_use(model, parts)
    given = set(model.graph.initializers)
    model = _at_working_opset(model, repairs, keep, straight_through=straight_through)
    repairs += _without_other_operators(model, keep, straight_through=straight_through)
    repairs += resolve_branches(model, given, by_readers=by_readers)
    if by_readers:
        repairs += explicit_squeezes(model)
        repairs += pin_loop_states(model)
    repairs += resolve_sequences(model)
    model = _with_bodies(model, repairs, inline)
    repairs += normalise(model)
    repairs += name_sigmoids(model)
    constants, unused = _tidy(model, given)
    note_roles(model, parts)
    note_kinds(model, uses)
    model.meta[_CONSTANTS] = frozenset(constants)
    model.meta[_UNUSED] = unused
    note_file_opset(model, opset)
    model.meta[_REPAIRS] = tuple(repairs)
    return model


def _at_working_opset(
    model: ir.Model,
    repairs: list[str],
    keep: Callable[[ir.Node], bool],
    *,
    straight_through: bool,
) -> ir.Model:
    """Return the model at the working opset, its constants initializers, its nodes named."""
    before = model.opset_imports.get("", OPSET)
    model = to_working_opset(
        model, fused=lambda key: straight_through or key not in INTEGER, keep=keep
    )
    after = model.opset_imports[""]
    if before != after:
        repairs.append(f"opset {before} brought to {after}")
    note_root(model.graph)
    lift_constants(model)
    drop_empty_axes(model)
    _name_nodes(model)
    repairs += exact_products(model)
    return model


def _without_other_operators(
    model: ir.Model, keep: Callable[[ir.Node], bool], *, straight_through: bool
) -> list[str]:
    """Decompose operators that are not of the standard, in place; types are inferred."""
    opset = model.opset_imports[""]

    def wanted(key: str) -> bool:
        return straight_through if key in INTEGER else not _is_standard(key, opset)

    rewritten = decompose(model, only=wanted, keep=keep)
    if not rewritten:  # else types and shapes were inferred on the way
        infer_shapes(model.graph, opset)
    return rewritten


def _with_bodies(model: ir.Model, repairs: list[str], inline: Callable[[str], bool]) -> ir.Model:
    """Return the model with the bodies of operators that ``inline`` tells in their place."""
    opset = model.opset_imports[""]
    repairs += decompose(model, only=lambda key: inline(key) and _is_standard(key, opset))
    model = inline_bodies(model, inline)
    lift_constants(model)
    _name_nodes(model)
    infer_shapes(model.graph, opset)
    return model


def _tidy(model: ir.Model, given: set[str]) -> tuple[set[str], dict[str, ir.Value]]:
    """Fold and remove what may be, in place; return new constants, and parameters unused now."""
    constants = set(model.graph.initializers) - given  # ours, also those of decompositions
    folded = fold(model, constants | _small_integers(model, given))
    constants |= folded
    # Bounds, pads and shapes that were computed are numbers now.
    if _has_unknown_ranks(model) or (folded and _has_unknown_sizes(model)):
        infer_shapes(model.graph, model.opset_imports[""])
    remove_identities(model)
    parameters = {n: x for n, x in model.graph.initializers.items() if n in given and is_float(x)}
    remove_dead(model)
    used = {n.domain for n in model.graph.all_nodes()}
    for domain in [d for d in model.opset_imports if d and d not in used]:
        del model.opset_imports[domain]
    unused = {n: x for n, x in parameters.items() if n not in model.graph.initializers}
    return constants, unused


def _small_integers(model: ir.Model, given: set[str]) -> set[str]:
    """Return initializers of the file that axes, pads and shapes may be computed from."""
    whole = {n: x for n, x in model.graph.initializers.items() if n in given}
    return {
        n
        for n, x in whole.items()
        if x.dtype is not None and x.dtype.is_integer() and not x.is_graph_input()
        if x.const_value is not None and x.const_value.size <= _SMALL_INTEGERS
    }


def _has_unknown_ranks(model: ir.Model) -> bool:
    return any(
        y.shape is None and isinstance(y.type, ir.TensorType)
        for node in model.graph
        for y in node.outputs
    )


def _has_unknown_sizes(model: ir.Model) -> bool:
    """Return whether a size has a name that inference made up because it knew nothing."""
    for node in model.graph:
        for y in node.outputs:
            for i, d in enumerate(dims_of(y) or ()):
                if invented(d) or (isinstance(d, str) and d == D.symbol(f"{y.name}.{i}")):
                    return True
    return False


def constant_names(model: ir.Model) -> frozenset[str]:
    """Return the names of initializers that are constants of the graph, not parameters."""
    return model.meta.get(_CONSTANTS, frozenset())


def unused_parameters(model: ir.Model) -> dict[str, ir.Value]:
    """Return the float initializers of the file that no node reads; the graph has dropped them."""
    return model.meta.get(_UNUSED, {})


def mark_constants(model: ir.Model, names: Iterable[str]) -> None:
    """Record that some initializers are constants of the graph, not parameters."""
    model.meta[_CONSTANTS] = constant_names(model) | frozenset(names)


def repairs_of(model: ir.Model) -> tuple[str, ...]:
    """Say what ``prepare`` changed."""
    return model.meta.get(_REPAIRS, ())


def _name_nodes(model: ir.Model) -> None:
    """Name nodes that have no name after their first output, so that messages can."""
    nodes = list(model.graph.all_nodes())
    taken = {n.name for n in nodes if n.name}
    for node in nodes:
        if not node.name:
            stem = next((y.name for y in node.outputs if y.name), node.op_type)
            node.name = stem
            while node.name in taken:
                node.name = f"{node.name}.{node.op_type}"
            taken.add(node.name)


def _is_standard(key: str, opset: int) -> bool:
    return "::" not in key and schema_of(key, opset) is not None
