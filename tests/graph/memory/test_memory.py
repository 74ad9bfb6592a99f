"""Run order, lifetimes and arena agree with onnxruntime."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.memory_usage import (
    Arena,
    Sizes,
    file_order,
    lifetimes,
    order_for_memory,
    peak_bytes,
    run_order,
)

FLOAT = ir.DataType.FLOAT


def graph_of(*, late: bool = False) -> ir.Graph:
    """Return a chain of matmuls whose inputs are read again at the end, in reverse."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="g")
    op = OpBuilder(graph)
    x = op.input("x", FLOAT, ["n", 8])
    kept = [x]
    for _ in range(4):
        kept.append(op.Add(op.Exp(kept[-1]), 1.0))
    wide = [op.Concat(h, h, h, h, axis=0) for h in kept] if late else []
    y = kept[-1]
    for i, h in enumerate(reversed(kept)):
        y = op.Mul(y, h)
        if late:
            y = op.Add(y, op.ReduceSum(wide[-1 - i], [0], keepdims=1))
    y.name = "y"
    graph.outputs.append(y)
    return graph


def test_nodes_run_in_the_predicted_order(tmp_path: Path) -> None:
    graph = graph_of(late=True)
    names = [n.name for n in run_order(list(graph))]
    assert names != [n.name for n in graph]
    options = onnxruntime.SessionOptions()
    options.enable_profiling, options.profile_file_prefix = True, str(tmp_path / "p")
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    model = ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString()
    session = onnxruntime.InferenceSession(model, options)
    session.run(None, {"x": np.ones((2, 8), np.float32)})
    events = json.loads(Path(session.end_profiling()).read_text())
    suffix = "_kernel_time"
    ran = [e["name"].removesuffix(suffix) for e in events if e["name"].endswith(suffix)]
    assert [n for n in ran if n in names] == names


def test_order_with_the_lower_peak_is_used() -> None:
    graph = graph_of(late=True)
    own = list(graph)
    sizes = Sizes(other=32)
    peaks = [peak_bytes(run_order(nodes), sizes, {"y"}) for nodes in (own, file_order(own))]
    assert peaks[0] != peaks[1]
    order_for_memory(graph)
    assert peak_bytes(run_order(list(graph)), sizes, {"y"}) == min(peaks)


def test_lifetimes_end_with_the_last_reader_and_views_need_nothing() -> None:
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="g")
    op = OpBuilder(graph)
    a = op.Exp(op.input("x", FLOAT, [4, 8]))
    b = op.Reshape(a, [8, 4])
    c = op.Relu(b)  # the last reader: in the place of what it reads
    y = op.Transpose(c, perm=[1, 0])
    graph.outputs.append(y)
    events = lifetimes(list(graph), Sizes(), elsewhere={y.name or ""})
    new = {k: v for e in events for k, v in e.new.items()}
    assert new == {a.name: 4 * 8 * 4}
    assert events[-1].free == [a.name]
    assert peak_bytes(list(graph), Sizes(), {y.name or ""}) == 4 * 8 * 4


def test_symbolic_sizes_are_replaced_and_unknown_ones_recorded() -> None:
    sizes = Sizes({"n": 3}, other=2)
    assert sizes.elements(["n", "4*n", 5]) == 3 * 12 * 5
    assert sizes.elements(["m", 5]) == 10
    value = ir.Value(name="v", type=ir.TensorType(FLOAT))
    assert sizes(value) == 0
    assert sizes.unknown == {"v"}


def test_the_arena_reuses_joins_and_never_shrinks() -> None:
    arena = Arena()
    first, second = arena.allocate(300_000), arena.allocate(300_000)
    touched = arena.touched
    arena.release(first)
    arena.release(second)
    assert arena.in_use == 0
    again = arena.allocate(600_000)  # fits where both were, joined
    assert arena.touched == pytest.approx(touched, abs=8192)
    arena.release(again)
    arena.allocate(8 << 20)
    assert arena.touched > touched + (8 << 20)
    assert arena.peak_in_use >= 8 << 20
