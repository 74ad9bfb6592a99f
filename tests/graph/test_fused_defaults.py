"""Attribute defaults of fused operators are those of onnxruntime's schemas."""

from __future__ import annotations

import re
from typing import Any

import onnx
import onnx_ir as ir
import pytest
from onnxruntime.capi import onnxruntime_pybind11_state as ort

from onnxtrain import expand  # noqa: F401 - fills the table
from onnxtrain.expand.expansions import training_expansions
from onnxtrain.graph.call_by_signature import signature_of

# Attributes whose default a decomposition does not need: unsupported, or ``None`` by default.
_EMPTY = (None, 0, "", b"", "NOTSET")


def _schemas() -> dict[str, dict[str, Any]]:
    schemas: dict[str, Any] = {}
    for schema in ort.get_all_operator_schema():
        key = f"{schema.domain}::{schema.name}" if schema.domain else schema.name
        if key not in schemas or schemas[key].since_version < schema.since_version:
            schemas[key] = schema
    return {key: dict(schema.attributes) for key, schema in schemas.items()}


SCHEMAS = _schemas()
FUSED = sorted(k for k in training_expansions() if k.startswith("com.microsoft::") and k in SCHEMAS)


def _default(attribute: Any) -> Any:
    proto = onnx.AttributeProto.FromString(attribute._default_value)
    value = ir.serde.deserialize_attribute(proto).value if proto.type else None
    if value is None:  # the kernel's default is only in the description
        match = re.search(r"Default value is (-?[\d.]*\d)(?!\d*/)", attribute.description)
        value = float(match[1]) if match else None
    return value


def test_most_fused_operators_are_in_the_table():
    assert len(FUSED) >= 15


@pytest.mark.parametrize("key", FUSED)
def test_default_is_the_runtimes(key: str):
    ours = signature_of(training_expansions()[key]).keywords
    differing = {}
    for name, attribute in SCHEMAS[key].items():
        theirs = _default(attribute)
        if name not in ours or attribute.required or (theirs in _EMPTY and ours[name] in _EMPTY):
            continue
        if isinstance(theirs, str | bytes):
            same = ours[name] == (theirs if isinstance(theirs, str) else theirs.decode())
        else:
            same = ours[name] == pytest.approx(theirs, rel=1e-6)
        if not same:
            differing[name] = (ours[name], theirs)
    assert not differing
