"""Sums of padded tensors that tile the result become one Concat."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.io.writer import finalize
from onnxtrain.graph.simplify import simplify
from onnxtrain.runtime import session as runtime


def _sum(spans: list[tuple[int, int]], total: int, *, extra: bool = False) -> ir.Model:
    xs = [ir.val(f"x{i}", ir.DataType.FLOAT, ["n", b - a]) for i, (a, b) in enumerate(spans)]
    if extra:
        xs.append(ir.val("all", ir.DataType.FLOAT, ["n", total]))
    graph = ir.Graph(xs, [], nodes=[], opset_imports={"": 21}, name="g")
    op = OpBuilder(graph)
    parts = [op.Pad(x, [0, a, 0, total - b]) for x, (a, b) in zip(xs, spans, strict=False)]
    parts += xs[len(spans) :]
    y = parts[0]
    for part in parts[1:]:
        y = op.Add(y, part)
    y.name = "y"
    graph.outputs.append(y)
    return ir.Model(graph, ir_version=10)


def _run(model: ir.Model) -> np.ndarray:
    rng = np.random.default_rng(0)
    feeds = {
        x.name or "": rng.normal(size=(3, int(x.shape[1]))).astype(np.float32)  # type: ignore
        for x in model.graph.inputs
    }
    session = runtime.create(finalize(model).SerializeToString())
    return runtime.run(session, None, feeds)[0]


@pytest.mark.parametrize(
    ("spans", "extra", "kinds"),
    [
        ([(0, 2), (2, 5)], False, {"Concat"}),
        ([(3, 5), (0, 1), (1, 3)], False, {"Concat"}),
        ([(0, 2), (3, 5)], False, {"Pad", "Add"}),
        ([(0, 3), (2, 5)], False, {"Pad", "Add"}),
        ([(0, 2), (2, 4)], False, {"Pad", "Add"}),
        ([(0, 2), (2, 5)], True, {"Concat", "Add"}),
    ],
)
def test_padded_tensors_become_a_concat_if_they_tile(
    spans: list[tuple[int, int]], extra: bool, kinds: set[str]
) -> None:
    model = _sum(spans, 5, extra=extra)
    want = _run(model.clone())
    simplify(model)
    assert {node.op_type for node in model.graph} == kinds
    np.testing.assert_array_equal(_run(model), want)
