"""coalesce_broadcast_dims: equal values, and shapes for which kernels are fast."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import parser

from onnxtrain import thresholds
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.simplify import simplify
from onnxtrain.optimize.layout import coalesce_broadcast_dims

HEAD = '<ir_version: 10, opset_import: ["": 21]>\n'


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thresholds, "COALESCED_BROADCAST_ELEMENTS", 8)


def flattened(text: str) -> tuple[int, onnx.ModelProto, onnx.ModelProto]:
    """Return the changes, and the model before and after."""
    before = parser.parse_model(HEAD + text)
    onnx.checker.check_model(before, full_check=True)
    model = ir.from_proto(onnx.shape_inference.infer_shapes(before, data_prop=True))
    changed = coalesce_broadcast_dims(model, OpBuilder(model.graph, "t/", target="cuda"))
    simplify(model)
    after = ir.to_proto(model)
    onnx.checker.check_model(after, full_check=True)
    return changed, before, after


def results(proto: onnx.ModelProto, size: int = 3) -> list[np.ndarray]:
    session: Any = onnxruntime.InferenceSession(
        proto.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    rng, feeds = np.random.default_rng(0), {}
    for x in session.get_inputs():
        drawn = rng.standard_normal([d if isinstance(d, int) else size for d in x.shape])
        feeds[x.name] = drawn > 0 if "bool" in x.type else drawn.astype(np.float32)
    return session.run(None, feeds)


def same_results(before: onnx.ModelProto, after: onnx.ModelProto) -> None:
    for a, b in zip(results(before), results(after), strict=True):
        np.testing.assert_array_equal(a, b)


def operands(proto: onnx.ModelProto, kind: str) -> list[list[list[int | str]]]:
    """Return the sizes of the operands of each node of a kind."""
    graph = onnx.shape_inference.infer_shapes(proto, data_prop=True).graph
    dims: dict[str, list[int | str]] = {t.name: list(t.dims) for t in graph.initializer}
    for v in (*graph.value_info, *graph.input, *graph.output):
        dims[v.name] = [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim]
    return [[dims[x] for x in n.input] for n in graph.node if n.op_type == kind]


@pytest.mark.parametrize("kind", ["Add", "Sub", "Mul", "Div"])
@pytest.mark.parametrize(
    ("a", "b", "joined"),
    [
        ("2,3,4,5", "2,3,4,1", [[24, 5], [24, 1]]),
        ("2,3,4,5", "1,1,4,5", [[6, 20], [20]]),
        ("2,3,4,5", "4,5", [[6, 20], [20]]),
        ("2,3,4", "1,3,4", [[2, 12], [12]]),
        ("2,3,4", "2,3,1", [[6, 4], [6, 1]]),
        ("2,1,3,4", "2,1,3,1", [[6, 4], [6, 1]]),
        ("1,2,3,4", "2,3,1", [[6, 4], [6, 1]]),
        ("2,3,4,5", "2,1,4,5", [[2, 3, 20], [2, 1, 20]]),
        ("2,3,4,5", "1,3,4,1", [[2, 12, 5], [12, 1]]),
    ],
)
def test_axes_are_coalesced(kind: str, a: str, b: str, joined: list[list[int]]) -> None:
    changed, before, after = flattened(
        f"g (float[{a}] a, float[{b}] b) => (float[{a}] y) {{ z = {kind}(a, b) y = Tanh(z) }}"
    )
    assert changed == 1
    assert operands(after, kind) == [joined]
    same_results(before, after)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("2,3,4", "4"),  # one axis already
        ("2,3,4", "1,3,1"),
        ("2,3,4", "2,3,4"),
        ("2,3,4", "1,1,1"),
        ("2,3,4", "2,1,4"),  # nothing to join
        ("n,3,m", "n,3,1"),  # a view infers one size at most
        ("1,2,3", "1,2,1"),  # too small
    ],
)
def test_fast_kernels_stay(a: str, b: str) -> None:
    changed, _, after = flattened(
        f"g (float[{a}] a, float[{b}] b) => (float[{a}] y) {{ z = Sub(a, b) y = Tanh(z) }}"
    )
    assert changed == 0
    assert [n.op_type for n in after.graph.node] == ["Sub", "Tanh"]


def test_a_symbolic_size_is_inferred_by_the_view() -> None:
    changed, before, after = flattened(
        "g (float[n,4,5] a, float[n,4,1] b) => (float[n,4,5] y) { z = Sub(a, b) y = Tanh(z) }"
    )
    assert changed == 1
    assert [len(d) for d in operands(after, "Sub")[0]] == [2, 2]
    same_results(before, after)


def test_the_broadcast_operand_moves_to_the_right() -> None:
    text = "g (float[{}] a, float[2,3,4] b) => (float[2,3,4] y) {{ z = {}(a, b) y = Tanh(z) }}"
    for dims, joined in (("4", [[2, 3, 4], [4]]), ("2,3,1", [[6, 4], [6, 1]])):
        changed, before, after = flattened(text.format(dims, "Mul"))
        assert changed > 0
        assert operands(after, "Mul") == [joined]
        same_results(before, after)
    _, before, after = flattened(text.format("4", "Sub"))  # the order of a difference counts
    assert operands(after, "Sub") == [[[4], [6, 4]]]
    same_results(before, after)


def test_where_has_fewer_axes() -> None:
    changed, before, after = flattened(
        "g (bool[1,1,4,5] c, float[2,3,4,5] a, float b) => (float[2,3,4,5] y)"
        "{ z = Where(c, a, b) y = Tanh(z) }"
    )
    assert changed == 1
    assert operands(after, "Where") == [[[20], [6, 20], []]]
    same_results(before, after)


def test_nodes_in_between_need_no_views() -> None:
    """As in the gradient of a normalization: sizes are known at the ends only."""
    changed, before, after = flattened("""
        g (float[2,3,4] x, float[2,3,4] r, float[2,3,1] m, float[2,3,1] s, float[4] w)
        => (float[2,3,4] y, float[2,3,1] e) <int64[1] last = {-1}> {
            a = Sub(x, m)
            b = Mul(a, w)
            c = Add(b, r)
            d = Neg(c)
            f = Mul(d, s)
            y = Tanh(f)
            e = ReduceMean(c, last)
        }""")
    assert changed == 5
    kinds = [n.op_type for n in after.graph.node]
    # In: x, r, m, s. Out: what Tanh and the mean read.
    assert kinds.count("Reshape") == 6
    for kind in ("Sub", "Mul", "Add"):
        assert all(len(d[0]) == 2 for d in operands(after, kind))
    same_results(before, after)


def test_operators_that_need_the_axes_stay_between() -> None:
    changed, before, after = flattened("""
        g (float[2,3,4] x, float[2,3,1] m, float[1,3,1] s) => (float[2,3,4] y) {
            a = Sub(x, m)
            b = Mul(a, s)
            c = Div(b, m)
            y = Tanh(c)
        }""")
    assert changed == 2
    assert operands(after, "Mul") == [[[2, 3, 4], [1, 3, 1]]]
    same_results(before, after)


def test_outputs_keep_their_names_and_shapes() -> None:
    changed, before, after = flattened(
        "g (float[2,3,4] a, float[2,3,1] b) => (float[2,3,4] y, float[2,3,4] z)"
        "{ y = Sub(a, b) c = Mul(a, b) z = Tanh(c) }"
    )
    assert changed == 1
    assert [y.name for y in after.graph.output] == ["y", "z"]
    same_results(before, after)


@pytest.mark.parametrize(
    ("mask", "axis", "fused"),
    [
        ("1,1,4,5", -1, True),
        ("4,5", 3, True),
        ("2,3,1,5", -1, True),
        ("2,1,4,5", -1, False),
        ("1,1,4,5", 2, False),
        ("2,3,4,1", -1, False),
    ],
)
def test_a_mask_that_onnxruntime_fuses_into_softmax_stays(
    mask: str, axis: int, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"""g (float[2,3,4,5] x, float[{mask}] m) => (float[2,3,4,5] y) {{
        z = Add(x, m) p = Softmax<axis={axis}>(z) y = Neg(p) }}"""
    changed, before, after = flattened(text)
    assert changed == (0 if fused else 1)
    same_results(before, after)
    monkeypatch.setattr(thresholds, "FUSED_SOFTMAX_COLUMNS", 4)
    assert flattened(text)[0] == 1, "its kernel takes no more columns"


def test_constants_are_stored_in_coalesced_shape() -> None:
    text = "g (float[2,3,4,5] x) => (float[2,3,4,5] y) { z = Abs(x) y = Tanh(z) }"
    model = ir.from_proto(onnx.shape_inference.infer_shapes(parser.parse_model(HEAD + text)))
    op = OpBuilder(model.graph, "t/", target="cuda")
    last = model.graph[-1]
    op.position = last
    last.replace_input_with(0, op.Add(last.inputs[0], op.const(np.ones((1, 1, 4, 5), np.float32))))
    assert coalesce_broadcast_dims(model, op) == 1
    simplify(model)
    assert [n.op_type for n in model.graph] == ["Abs", "Reshape", "Add", "Reshape", "Tanh"]
    made = ir.to_proto(model)
    assert operands(made, "Add") == [[[6, 20], [20]]]
    x = np.random.default_rng(0).standard_normal((2, 3, 4, 5)).astype(np.float32)
    session: Any = onnxruntime.InferenceSession(made.SerializeToString())
    np.testing.assert_allclose(session.run(None, {"x": x})[0], np.tanh(np.abs(x) + 1), rtol=1e-6)
