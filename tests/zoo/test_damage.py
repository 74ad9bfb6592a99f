"""Exported architectures damaged at random are differentiated or refused, nothing else happens."""

from __future__ import annotations

from functools import cache

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import onnxtrain
from onnxtrain.errors import OnnxTrainError

from .export import export
from .models import ZOO


@cache
def _file(name: str) -> bytes:
    return export(ZOO[name]).model.SerializeToString()


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    data = bytearray(_file(draw(st.sampled_from(["lenet", "gru"]))))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(data) - 1))
        match draw(st.sampled_from(["flip", "set", "cut", "repeat"])):
            case "flip":
                data[at] ^= 1 << draw(st.integers(0, 7))
            case "set":
                data[at] = draw(st.integers(0, 255))
            case "cut":
                del data[at : at + draw(st.integers(1, 40))]
            case "repeat":
                data[at:at] = data[at : at + draw(st.integers(1, 40))]
    return bytes(data)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=damaged())
def test_damaged_architectures(data: bytes) -> None:
    try:
        model = onnxtrain.vjp(data)
    except OnnxTrainError as error:
        assert str(error)
        return
    assert {n.domain for n in model.graph.node} == {""}
