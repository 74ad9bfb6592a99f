"""Randomly corrupted files: `load` succeeds or raises LoadError."""

from __future__ import annotations

import time
from pathlib import Path

import onnx_ir as ir
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onnxtrain.errors import LoadError, OnnxTrainError
from onnxtrain.graph.io import load
from tests.corrupt_bytes import KINDS, damage
from tests.graph import small_models as small
from tests.graph.small_models import parse

SEEDS = [parse(text).SerializeToString() for text in small.ALL.values()]
SEEDS.append(small.external_model(location="w.bin").SerializeToString())
SEEDS.append(small.nested_ifs(5).SerializeToString())


@st.composite
def corrupted(draw: st.DrawFn) -> bytes:
    data = bytearray(draw(st.sampled_from(SEEDS)))
    for _ in range(draw(st.integers(1, 4))):
        if not data:
            break
        kind = draw(st.sampled_from([*KINDS, "insert", "splice"]))
        if kind == "splice":
            data += draw(st.sampled_from(SEEDS))  # protobuf merges the two messages
        else:
            damage(draw, data, kind)
    return bytes(data)


@settings(
    max_examples=1500,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=corrupted())
def test_corrupted_files_load_or_raise(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(bytes(12))
    path = tmp_path / "model.onnx"
    path.write_bytes(data)
    start = time.thread_time()  # of this thread alone: what else the machine does takes none of it
    try:
        model = load(path)
    except OnnxTrainError:
        return
    finally:
        assert time.thread_time() - start < 3
    # A loaded model can be saved and loaded again, and all its weights can be read.
    for value in model.graph.initializers.values():
        assert value.const_value is not None
        assert value.const_value.numpy().size == value.const_value.size
    again = ir.to_proto(load(ir.to_proto(model).SerializeToString()))
    assert again == ir.to_proto(model)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300))
def test_random_bytes_raise(data: bytes) -> None:
    with pytest.raises(LoadError):
        load(data)
