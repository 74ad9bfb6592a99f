"""Function bodies that the ONNX standard gives for its operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

import onnx

from onnxtrain.graph import shapes as S

# Bodies that are worse than useless: Softplus overflows above 88, Range is a Loop,
# LayerNormalization is 25 nodes of shape arithmetic.
UNUSABLE = frozenset({"LayerNormalization", "Range", "Softplus"})


class _Schema(Protocol):
    """What onnx's stubs leave out of ``OpSchema``."""

    @property
    def has_function(self) -> bool: ...
    @property
    def has_context_dependent_function(self) -> bool: ...
    @property
    def context_dependent_function_opset_versions(self) -> list[int]: ...
    def get_context_dependent_function_with_opset_version(
        self, opset: int, node: bytes, types: list[bytes], /
    ) -> bytes: ...


def has_body(op_type: str, opset: int) -> bool:
    """Return whether the standard gives a usable function body for an operator."""
    schema = S.schema_of(op_type, opset)
    if schema is None or op_type in UNUSABLE:
        return False
    full = cast(_Schema, schema)
    return full.has_function or full.has_context_dependent_function


def body_by_types(
    node: onnx.NodeProto, types: Sequence[onnx.TypeProto], opset: int
) -> onnx.FunctionProto | None:
    """Return the body that depends on the types of a node's inputs, ``None`` if there is no such.

    The attributes' defaults are written into ``node``, as the body reads them there.
    """
    schema = S.schema_of(node.op_type, opset)
    if schema is None:
        return None
    full = cast(_Schema, schema)
    versions = [v for v in full.context_dependent_function_opset_versions if v <= opset]
    if not full.has_context_dependent_function or not versions:
        return None
    given = {a.name for a in node.attribute}
    for name, attribute in schema.attributes.items():
        if name not in given and attribute.default_value.type:
            node.attribute.append(attribute.default_value)
    text = full.get_context_dependent_function_with_opset_version(
        max(versions), node.SerializeToString(), [t.SerializeToString() for t in types]
    )
    return onnx.FunctionProto.FromString(text)
