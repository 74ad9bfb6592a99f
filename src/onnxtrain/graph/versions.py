"""One working opset: older models are raised to it, newer ones come down where they can."""

from __future__ import annotations

import onnx
import onnx.version_converter
import onnx_ir as ir

from onnxtrain.errors import PrepareError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.bodies import inline_bodies
from onnxtrain.graph.decompose import decompose, has_decomposition
from onnxtrain.graph.old_batch_norm import convert_around_training
from onnxtrain.graph.protos import through_proto

OPSET = 21
IR_VERSION = 10
NEWEST_OPSET = 26
NEWEST_IR = 13


def to_working_opset(model: ir.Model) -> ir.Model:
    """Give the model at the working opset, or at its own if it cannot come down.

    Raises:
        PrepareError: if it is newer than what runtimes accept, or an old operator has no successor.
    """
    opset = model.opset_imports.get("", model.opset_imports.get("ai.onnx", 0))
    if "ai.onnx" in model.opset_imports:
        del model.opset_imports["ai.onnx"]
    model.opset_imports[""] = opset or OPSET
    if not opset or opset == OPSET:
        pass
    elif opset < OPSET:
        model = _raise(model)
    else:
        model = _come_down(model, opset)
    newest = model.opset_imports[""]
    model.ir_version = IR_VERSION if newest == OPSET else min(max(model.ir_version, 11), NEWEST_IR)
    for node in model.graph.all_nodes():
        node.version = newest if node.domain in ("", "ai.onnx") else node.version
        node.domain = "" if node.domain == "ai.onnx" else node.domain
    return model


def _raise(model: ir.Model) -> ir.Model:
    model.ir_version = max(model.ir_version, 8)  # below 4, initializers must be inputs
    try:
        return through_proto(model, lambda proto: convert_around_training(proto, _convert))
    except (RuntimeError, onnx.version_converter.ConvertError) as error:
        raise PrepareError(
            f"the model cannot be raised from opset {model.opset_imports['']} to {OPSET}: "
            f"{S.first_line(error)}\nhint: export it again with opset 13 or newer"
        ) from error


def _convert(proto: onnx.ModelProto) -> onnx.ModelProto:
    return onnx.version_converter.convert_version(proto, OPSET)


def _come_down(model: ir.Model, opset: int) -> ir.Model:
    model = inline_bodies(
        model, lambda op_type: _is_new(op_type) and not has_decomposition(op_type)
    )
    decompose(model, only=_is_new)
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
    """Tell whether a node means the same at the working opset: only types were added since."""
    if node.domain not in ("", "ai.onnx"):
        return True
    new, old = S.schema_of(node.op_type, opset), S.schema_of(node.op_type, OPSET)
    if new is None or old is None:
        return new is None
    if new.since_version == old.since_version:
        return True
    added = set(node.attributes) - set(old.attributes)
    if node.op_type in ("Cast", "CastLike") and added == {"round_mode"}:
        node.attributes.pop("round_mode")  # matters for float8e8m0 only
        added = set()
    if added or len(node.inputs) > old.max_input or len(node.outputs) > old.max_output:
        return False
    return all(_type_fits(x, old) for x in (*node.inputs, *node.outputs) if x is not None)


def _type_fits(x: ir.Value, schema: onnx.defs.OpSchema) -> bool:
    """Tell whether the working opset knows a value's element type at all (int2, float4 ...)."""
    return x.dtype is None or x.dtype not in _LATE_TYPES


_LATE_TYPES = frozenset(
    t for t in ir.DataType if t.name in ("FLOAT4E2M1", "FLOAT8E8M0", "INT2", "UINT2")
)
