"""fuse_running_stats: running statistics are updated together."""

from __future__ import annotations

import collections

import numpy as np
import onnx
import onnx.parser
import onnx.shape_inference
import onnx_ir as ir
import pytest

from onnxtrain import thresholds
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.simplify import simplify
from onnxtrain.optimize.normalization import fuse_running_stats
from onnxtrain.runtime import session as runtime


def averages(sizes: list[int], extra: str = "") -> ir.Model:
    """Return a model with an average of each size, of an old value and what a batch gives."""
    takes = ", ".join(f"float[{n}] old{i}, float[{n}] x{i}" for i, n in enumerate(sizes))
    gives = ", ".join(f"float[{n}] new{i}" for i, n in enumerate(sizes))
    parts = ["float kept = {0.9}"]
    parts += [f"float part{i} = {{{0.1 + i / 100}}}" for i in range(len(sizes))]
    lines = [
        f"a{i} = Mul(old{i}, kept) r{i} = Exp(x{i}) b{i} = Mul(r{i}, part{i}) "
        f"new{i} = Add(a{i}, b{i})"
        for i in range(len(sizes))
    ]
    text = (
        f'<ir_version: 10, opset_import: ["" : 21]> g ({takes}) => ({gives}) '
        f"<{', '.join(parts)}> {{ {' '.join(lines)} {extra} }}"
    )
    return ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text)))


def results(model: ir.Model) -> dict[str, np.ndarray]:
    session = runtime.create(ir.to_proto(model).SerializeToString())
    rng = np.random.default_rng(0)
    inputs = sorted(session.get_inputs(), key=lambda i: i.name)
    feeds = {i.name: rng.standard_normal(i.shape).astype(np.float32) for i in inputs}
    names = [y.name for y in session.get_outputs()]
    return dict(zip(names, runtime.run(session, names, feeds), strict=True))


def joined(model: ir.Model) -> tuple[int, collections.Counter[str]]:
    count = fuse_running_stats(model, OpBuilder(model.graph, "t/", target="cuda"))
    model.graph.sort()
    simplify(model)
    return count, collections.Counter(n.op_type for n in model.graph)


def test_vectors_of_one_length_are_averaged_together() -> None:
    sizes = [4, 4, 3, 4, 3, 3, 5]
    wanted, model = results(averages(sizes)), averages(sizes)
    count, kinds = joined(model)
    assert count == 6
    assert (kinds["Concat"], kinds["Split"], kinds["Add"]) == (4, 2, 3)
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    actual = results(model)
    assert list(actual) == list(wanted)
    for name, array in wanted.items():
        np.testing.assert_allclose(actual[name], array, rtol=1e-6, err_msg=name)


def test_groups_fit_graph_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thresholds, "CUDA_GRAPH_CONCAT_INPUTS", 4)
    wanted, model = results(averages([2] * 7)), averages([2] * 7)
    count, kinds = joined(model)
    assert (count, kinds["Split"]) == (7, 2)
    for name, array in results(model).items():
        np.testing.assert_allclose(array, wanted[name], rtol=1e-6, err_msg=name)


def test_statistics_with_readers_stay() -> None:
    extra = "after = Sin(new0)"
    model = averages([2, 2, 2], extra)
    model.graph.outputs.append(next(n.outputs[0] for n in model.graph if n.op_type == "Sin"))
    model.graph.outputs[-1].dtype = ir.DataType.FLOAT
    model.graph.outputs[-1].shape = ir.Shape([2])
    assert joined(model) == (0, collections.Counter(Mul=6, Exp=3, Add=3, Sin=1))
