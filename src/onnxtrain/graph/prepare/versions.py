"""One working opset: older models are raised to it, newer ones come down where they can."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx
import onnx.version_converter
import onnx_ir as ir

from onnxtrain.errors import PrepareError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.io.through_proto import REFUSALS, through_proto
from onnxtrain.graph.nodes import is_standard, nodes
from onnxtrain.graph.prepare.constants import lift_constants
from onnxtrain.graph.prepare.decompose import decompose, has_decomposition
from onnxtrain.graph.prepare.function_bodies import inline_bodies
from onnxtrain.graph.prepare.old_batch_norm import convert_around_training
from onnxtrain.graph.prepare.old_forms import convert_with_care
from onnxtrain.graph.prepare.runtime_operators import move_runtime_operators
from onnxtrain.graph.shapes.infer import infer_shapes
from onnxtrain.graph.shapes.negative_sizes import check_before_conversion

OPSET = 21
IR_VERSION = 10
NEWEST_OPSET = 26
NEWEST_IR = 13
_UNBATCHED_SCAN = 9


def to_working_opset(
    model: ir.Model,
    *,
    fused: Callable[[str], bool] = lambda key: True,
    keep: Callable[[ir.Node], bool] = lambda node: False,
) -> ir.Model:
    """Return the model at the working opset, or at its own if it cannot come down.

    Args:
        model: it is used up.
        fused: tells of a decomposition of another domain's operator whether it is to be used.
        keep: tells which nodes of other domains are to stay as they are.

    Raises:
        PrepareError: if it is newer than what runtimes accept, or an old operator has no successor.
    """
    opset = model.opset_imports.get("", model.opset_imports.get("ai.onnx", 0))
    if "ai.onnx" in model.opset_imports:
        del model.opset_imports["ai.onnx"]
    model.opset_imports[""] = opset or OPSET
    move_runtime_operators(model, opset or OPSET)
    if opset and opset != OPSET:
        check_before_conversion(model)
    if not opset or opset == OPSET:
        pass
    elif opset < OPSET:
        model = _raise(model)
    else:
        model = _come_down(model, opset, fused, keep)
    newest = model.opset_imports[""]
    model.ir_version = IR_VERSION if newest == OPSET else min(max(model.ir_version, 11), NEWEST_IR)
    for node in model.graph.all_nodes():
        node.version = newest if is_standard(node) else node.version
        node.domain = "" if node.domain == "ai.onnx" else node.domain
    return model


def _raise(model: ir.Model) -> ir.Model:
    batched = nodes(model.graph, "Scan", subgraphs=True)
    if batched and model.opset_imports[""] < _UNBATCHED_SCAN:
        raise PrepareError(
            f"Scan of opset 8 has a batch axis, which no later one has: node {batched[0].name!r}\n"
            "hint: export the model again with opset 9 or newer"
        )
    model.ir_version = max(model.ir_version, 8)  # below 4, initializers must be inputs
    try:
        return through_proto(model, lambda proto: convert_around_training(proto, _convert))
    except REFUSALS as error:
        raise PrepareError(
            f"the model cannot be raised from opset {model.opset_imports['']} to {OPSET}: "
            f"{S.first_line(error)}\nhint: export it again with opset 13 or newer"
        ) from error


def _convert(proto: onnx.ModelProto) -> onnx.ModelProto:
    return convert_with_care(proto, lambda p: onnx.version_converter.convert_version(p, OPSET))


def _come_down(
    model: ir.Model,
    opset: int,
    fused: Callable[[str], bool],
    keep: Callable[[ir.Node], bool],
) -> ir.Model:
    model = inline_bodies(
        model, lambda op_type: _is_new(op_type) and not has_decomposition(op_type)
    )
    lift_constants(model)
    decompose(model, only=lambda key: fused(key) if "::" in key else _is_new(key), keep=keep)
    infer_shapes(model.graph, opset)  # element types decide
    stuck = sorted(
        {n.op_type for n in model.graph.all_nodes() if not _same_at_working_opset(n, opset)}
    )
    if not stuck:
        model.opset_imports[""] = OPSET
        return model
    if opset > NEWEST_OPSET:
        blocked = [op for op in stuck if _since(op, opset) > NEWEST_OPSET]
        if blocked:
            raise PrepareError(
                f"opset {opset} is newer than any runtime takes ({NEWEST_OPSET}), "
                f"and these operators cannot come down: {', '.join(blocked)}\n"
                f"hint: export the model with opset {NEWEST_OPSET} or older"
            )
        model.opset_imports[""] = NEWEST_OPSET
    return model


def _is_new(op_type: str) -> bool:
    return S.schema_of(op_type, OPSET) is None


def _since(op_type: str, opset: int) -> int:
    schema = S.schema_of(op_type, opset)
    return schema.since_version if schema is not None else 0


def _same_at_working_opset(node: ir.Node, opset: int) -> bool:
    """Return whether a node means the same at the working opset: only types were added since."""
    if not is_standard(node):
        return True
    new, old = S.schema_of(node.op_type, opset), S.schema_of(node.op_type, OPSET)
    if new is None or old is None:
        return new is None
    if new.since_version == old.since_version:
        return True
    added = {
        n for n in node.attributes if n not in old.attributes and not _is_default(node, n, new)
    }
    if node.op_type in ("Cast", "CastLike"):
        added.discard("round_mode")  # matters for float8e8m0 only, which does not come down
    if added or len(node.inputs) > old.max_input or len(node.outputs) > old.max_output:
        return False
    if not _types_fit(node.inputs, old.inputs, old) or not _types_fit(
        node.outputs, old.outputs, old
    ):
        return False
    for name in [n for n in node.attributes if n not in old.attributes]:
        node.attributes.pop(name)
    return True


def _is_default(node: ir.Node, name: str, schema: onnx.defs.OpSchema) -> bool:
    attribute = schema.attributes.get(name)
    if attribute is None or not attribute.default_value.type:
        return False
    default = ir.serde.deserialize_attribute(attribute.default_value)
    return S.python_value(node.attributes[name]) == S.python_value(default)


def _types_fit(
    values: Sequence[ir.Value | None],
    formal: Sequence[onnx.defs.OpSchema.FormalParameter],
    schema: onnx.defs.OpSchema,
) -> bool:
    """Return whether the working opset allows the types: no bfloat16 in Conv, no int2 ..."""
    allowed = {c.type_param_str: c.allowed_type_strs for c in schema.type_constraints}
    for i, x in enumerate(values):
        if x is None or not isinstance(x.type, ir.TensorType) or not formal:
            continue
        kinds = allowed.get(formal[min(i, len(formal) - 1)].type_str)
        if kinds is not None and f"tensor({x.type.dtype.name.lower()})" not in kinds:
            return False
    return True
