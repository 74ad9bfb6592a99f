"""``prepare``: bring a loaded model to the normal form and collect facts about its tensors.

The normal form has no local functions, the working opset, constants as initializers, explicit
padding, no fused operators, no sequences of known structure, and inferred shapes with unified
symbolic sizes. Each operator has one variant: no ``auto_pad``, no ``CastLike``, no legacy inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from onnxtrain import expand  # noqa: F401 - fills the table
from onnxtrain.expand.expansions import decompose, is_straight_through
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.nodes import nodes
from onnxtrain.graph.opset_imports import load_repairs
from onnxtrain.graph.shapes import dims as D
from onnxtrain.graph.shapes import dims_of, is_float, schema_of
from onnxtrain.graph.shapes.dims import Dim
from onnxtrain.graph.shapes.inference import infer_shapes, is_generated_symbol
from onnxtrain.graph.shapes.unknown import record_input_sizes
from onnxtrain.graph.simplify import remove_dead, remove_identities
from onnxtrain.importer.branches_and_loops import (
    add_squeeze_axes,
    drop_empty_squeeze_axes,
    inline_known_branches,
    restore_loop_state_shapes,
)
from onnxtrain.importer.constants import (
    drop_accuracy_level,
    expose_weights,
    fold_constants,
    fuse_sigmoid,
    lift_constants,
)
from onnxtrain.importer.functions import inline_bodies, inline_functions
from onnxtrain.importer.opset import OPSET, to_working_opset
from onnxtrain.importer.parameters import classify_parameters, kinds_by_use
from onnxtrain.importer.prepared import Prepared
from onnxtrain.importer.sequences import resolve_sequences

_WINDOW_OPS = frozenset(
    {"Conv", "AveragePool", "LpPool", "MaxPool", "ConvTranspose", "ConvInteger"}
)


def normalize_operators(model: ir.Model) -> list[str]:
    """Remove ``auto_pad``, CastLike and implicit inputs, in place; return lines for the report."""
    changed: dict[str, int] = {}
    _explicit_conditions(model)
    for node in nodes(model.graph, subgraphs=True):
        if node.op_type == "CastLike" and _cast_like(node):
            changed["CastLike became Cast"] = changed.get("CastLike became Cast", 0) + 1
        elif node.op_type in _WINDOW_OPS and _explicit_padding(node):
            key = f"auto_pad of {node.op_type} made explicit"
            changed[key] = changed.get(key, 0) + 1
    return [f"{what}: {n} node(s)" for what, n in changed.items()]


def _explicit_conditions(model: ir.Model) -> None:
    """Add a condition to Loops without states: serialization drops an absent last input."""
    op = OpBuilder(model.graph, "prepare/")
    for node in nodes(model.graph, "Loop", subgraphs=True):
        if len(node.inputs) < 2 or (len(node.inputs) == 2 and node.inputs[1] is None):
            node.resize_inputs(2)
            node.replace_input_with(1, op.const(True))


def _cast_like(node: ir.Node) -> bool:
    like = node.inputs[1]
    if like is None or like.dtype is None:
        return False
    graph = node.graph
    assert graph is not None
    attributes = [a for n, a in node.attributes.items() if n == "saturate"]
    cast = ir.Node(
        "",
        "Cast",
        [node.inputs[0]],
        attributes=[ir.AttrInt64("to", int(like.dtype)), *attributes],
        num_outputs=1,
        name=node.name,
        version=node.version,
    )
    graph.insert_before(node, cast)
    old, new = node.outputs[0], cast.outputs[0]
    new.name, new.type, new.shape = old.name, old.type, old.shape
    old.name = f"{old.name}.replaced"
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    graph.remove(node, safe=True)
    return True


def _explicit_padding(node: ir.Node) -> bool:
    attribute = node.attributes.get("auto_pad")
    mode = "NOTSET" if attribute is None else attribute.as_string()
    if mode == "NOTSET":
        return False
    x = node.inputs[0]
    dims = None if x is None else S.dims_of(x)
    if dims is None:
        return False
    n = len(dims) - 2
    if mode == "VALID":
        pads = [0] * 2 * n
    else:
        same_pads = _same_pads(node, dims, n, upper=mode == "SAME_UPPER")
        if same_pads is None:
            return False
        pads = same_pads
    node.attributes.pop("auto_pad")
    node.attributes["pads"] = ir.AttrInt64s("pads", pads)
    return True


def _same_pads(node: ir.Node, dims: Sequence[Dim], n: int, *, upper: bool) -> list[int] | None:
    """Return the padding for which ``output = ceil(input / stride)``."""
    if "output_shape" in node.attributes or node.attributes.get("ceil_mode", _DEFAULT_INT).value:
        return None
    w = node.inputs[1] if len(node.inputs) > 1 else None
    kernel = _ints(node, "kernel_shape")
    if not kernel and w is not None:
        kernel = D.static_sizes((S.dims_of(w) or ())[2:])
    strides, dilations = _ints(node, "strides") or [1] * n, _ints(node, "dilations") or [1] * n
    extra = _ints(node, "output_padding") or [0] * n
    if not kernel:
        return None
    before: list[int] = []
    after: list[int] = []
    for size, k, s, d, e in zip(dims[2:], kernel, strides, dilations, extra, strict=True):
        extent = (k - 1) * d + 1
        if node.op_type == "ConvTranspose":
            # Transposed: the output is exactly input * stride.
            total = max(extent + e - s, 0)
        elif isinstance(size, int):
            total = max((-(-size // s) - 1) * s + extent - size, 0)
        elif s == 1:
            total = extent - 1
        else:
            return None
        small, large = total // 2, total - total // 2
        before.append(small if upper else large)
        after.append(large if upper else small)
    return before + after


def _ints(node: ir.Node, name: str) -> list[int] | None:
    attribute = node.attributes.get(name)
    return None if attribute is None else list(attribute.as_ints())


_DEFAULT_INT = ir.AttrInt64("none", 0)


_MAX_SMALL_INTEGERS = 64  # elements; larger tensors are not pads, axes or shapes


def prepare(
    model: ir.Model,
    *,
    inline: Callable[[str], bool] = lambda op_type: False,
    keep: Callable[[ir.Node], bool] = lambda node: False,
    straight_through: bool = False,
    infer_from_consumers: bool = True,
    weights_exposed: bool = False,
) -> Prepared:
    """Return the model in the normal form; the argument must not be used any more.

    Args:
        model: a model from ``load``.
        inline: whether to inline the standard's function body of an operator.
        keep: whether a node of another domain stays as it is.
        straight_through: whether to replace integer arithmetic by floats between quantizers.
        infer_from_consumers: whether consumers may decide an unknown shape.
        weights_exposed: whether ``expose_weights`` was called on the model.
    """
    repairs: list[str] = list(load_repairs(model))
    opset = model.opset_imports.get("", model.opset_imports.get("ai.onnx", OPSET))
    if model.functions:
        repairs.append(f"{len(model.functions)} local function(s) inlined")
        model = inline_functions(model)
        weights_exposed = False  # weights of the functions are new in the graph
    if not weights_exposed:
        model, exposed = expose_weights(model)
        repairs += exposed
    roles = classify_parameters(model)
    kinds = kinds_by_use(model, roles)
    given = set(model.graph.initializers)
    model = _at_working_opset(model, repairs, keep, straight_through=straight_through)
    repairs += _decompose_nonstandard(model, keep, straight_through=straight_through)
    repairs += inline_known_branches(model, given, infer_from_consumers=infer_from_consumers)
    if infer_from_consumers:
        repairs += add_squeeze_axes(model)
        repairs += restore_loop_state_shapes(model)
    repairs += resolve_sequences(model)
    model = _inline_function_bodies(model, repairs, inline)
    repairs += normalize_operators(model)
    repairs += fuse_sigmoid(model)
    constants, unused = _fold_and_prune(model, given)
    return Prepared(
        model,
        opset,
        roles=roles,
        constants=frozenset(constants),
        kinds=kinds,
        unused=unused,
        repairs=tuple(repairs),
    )


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
        model, fused=lambda key: straight_through or not is_straight_through(key), keep=keep
    )
    after = model.opset_imports[""]
    if before != after:
        repairs.append(f"opset {before} brought to {after}")
    record_input_sizes(model.graph)
    lift_constants(model)
    drop_empty_squeeze_axes(model)
    _name_nodes(model)
    repairs += drop_accuracy_level(model)
    return model


def _decompose_nonstandard(
    model: ir.Model, keep: Callable[[ir.Node], bool], *, straight_through: bool
) -> list[str]:
    """Decompose operators of other domains and infer types, in place."""
    opset = model.opset_imports[""]

    def wanted(key: str) -> bool:
        return straight_through if is_straight_through(key) else not _is_standard(key, opset)

    rewritten = decompose(model, only=wanted, keep=keep)
    if not rewritten:  # otherwise `decompose` has inferred types and shapes
        infer_shapes(model.graph, opset)
    return rewritten


def _inline_function_bodies(
    model: ir.Model, repairs: list[str], inline: Callable[[str], bool]
) -> ir.Model:
    """Return the model with the function bodies of operators that ``inline`` accepts."""
    opset = model.opset_imports[""]
    repairs += decompose(model, only=lambda key: inline(key) and _is_standard(key, opset))
    model = inline_bodies(model, inline)
    lift_constants(model)
    _name_nodes(model)
    infer_shapes(model.graph, opset)
    return model


def _fold_and_prune(model: ir.Model, given: set[str]) -> tuple[set[str], dict[str, ir.Value]]:
    """Fold constants, drop dead nodes, in place; return new constants and unused parameters."""
    constants = set(model.graph.initializers) - given  # added by this pipeline
    folded = fold_constants(model, constants | _small_integers(model, given))
    constants |= folded
    # Folding made computed bounds, pads and shapes static.
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
    """Return integer initializers of the file that may determine axes, pads and shapes."""
    whole = {n: x for n, x in model.graph.initializers.items() if n in given}
    return {
        n
        for n, x in whole.items()
        if x.dtype is not None and x.dtype.is_integer() and not x.is_graph_input()
        if x.const_value is not None and x.const_value.size <= _MAX_SMALL_INTEGERS
    }


def _has_unknown_ranks(model: ir.Model) -> bool:
    return any(
        y.shape is None and isinstance(y.type, ir.TensorType)
        for node in model.graph
        for y in node.outputs
    )


def _has_unknown_sizes(model: ir.Model) -> bool:
    """Return whether shape inference had to invent a symbol for an unknown dimension."""
    for node in model.graph:
        for y in node.outputs:
            for i, d in enumerate(dims_of(y) or ()):
                if is_generated_symbol(d) or (
                    isinstance(d, str) and d == D.symbol(f"{y.name}.{i}")
                ):
                    return True
    return False


def _name_nodes(model: ir.Model) -> None:
    """Name unnamed nodes after their first output, for error messages."""
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
