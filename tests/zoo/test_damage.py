"""Randomly damaged architectures are differentiated or refused with a named error."""

from __future__ import annotations

from functools import cache

import onnx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import onnxtrain
from onnxtrain.errors import OnnxTrainError
from tests.corrupt_bytes import KINDS, damage

from .export import export
from .models import ZOO


@cache
def _file(name: str) -> bytes:
    return export(ZOO[name]).model.SerializeToString()


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    data = bytearray(_file(draw(st.sampled_from(["lenet", "gru"]))))
    for _ in range(draw(st.integers(1, 3))):
        damage(draw, data, draw(st.sampled_from(KINDS)))
    return bytes(data)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=damaged())
def test_damaged_architectures(data: bytes) -> None:
    result = _attempt(data)
    if isinstance(result, OnnxTrainError):
        assert str(result)
    else:
        assert {n.domain for n in result.graph.node} == {""}


def _attempt(data: bytes) -> onnx.ModelProto | OnnxTrainError:
    try:
        return onnxtrain.vjp(data)
    except OnnxTrainError as error:
        return error
