"""How `prepare` normalizes functions, constants and padding."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onnxtrain.autodiff.gradients import load_normalized
from onnxtrain.graph.io import load
from onnxtrain.graph.io.writer import finalize
from onnxtrain.importer import Prepared, prepare
from tests.cases.evaluate import stock

HEAD = '<ir_version: 10, opset_import: ["" : 21]>\n'


def parse(text: str, head: str = HEAD) -> onnx.ModelProto:
    return onnx.parser.parse_model(head + text)


def kinds(model: ir.Model | Prepared) -> list[str]:
    return [n.op_type for n in model.graph.all_nodes()]


def same_results(model: onnx.ModelProto, *values: np.ndarray) -> Prepared:
    """Return the prepared model after comparing its results with the original."""
    work = prepare(load(model))
    for ours, theirs in zip(stock(finalize(work.model))(values), stock(model)(values), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)
    return work


NESTED = """<ir_version: 10, opset_import: ["" : 21, "own" : 1]>
g (float[N,3] x) => (float[N,3] y, float[N,3] z)
<float[3] w = {1.0, -2.0, 3.0}>
{
    y = own.steep <slope = 0.25> (x, w)
    z = own.steep (x, w)
}
<domain: "own", opset_import: ["" : 21, "own" : 1]>
steep <slope: float = 0.5> (a, b) => (c)
{
    h = Mul(a, b)
    c = own.leak <alpha: float = @slope> (h)
}
<domain: "own", opset_import: ["" : 21]>
leak <alpha> (a) => (c)
{
    h = LeakyRelu <alpha: float = @alpha> (a)
    one = Constant <value_float = 1.0> ()
    c = Add(h, one)
}"""

IN_BRANCH = """<ir_version: 10, opset_import: ["" : 21, "own" : 1]>
g (bool c, float[2] x) => (float[2] y)
{
    y = If (c) <
        then_branch = p () => (float[2] a) { a = own.twice(x) },
        else_branch = q () => (float[2] b) { h = own.twice(x) b = own.twice(h) }
    >
}
<domain: "own", opset_import: ["" : 21]>
twice (a) => (b) { b = Add(a, a) }"""


def test_nested_functions_with_attributes_are_inlined() -> None:
    x = np.array([[1, 2, -3], [-4, 5, 6]], np.float32)
    work = same_results(onnx.parser.parse_model(NESTED), x)
    assert not work.model.functions
    assert set(work.model.opset_imports) == {""}
    slopes = [n.attributes["alpha"].as_float() for n in work.graph if n.op_type == "LeakyRelu"]
    assert slopes == [0.25, 0.5]
    assert next(iter(work.graph.initializers)) == "w"
    assert work.constants == set(work.graph.initializers) - {"w"}
    assert "2 local function(s) inlined" in work.repairs


def test_functions_in_branches_are_inlined() -> None:
    x = np.array([1, -2], np.float32)
    for condition in (True, False):
        work = same_results(onnx.parser.parse_model(IN_BRANCH), np.array(condition), x)
        assert {n.domain for n in work.graph.all_nodes()} == {""}


CONSTANTS = {
    "value": ("value = float[2] {1.5, 2.5}", np.float32([1.5, 2.5])),
    "value_float": ("value_float = 1.5", np.float32(1.5)),
    "value_floats": ("value_floats = [1.5, 2.5]", np.float32([1.5, 2.5])),
    "value_int": ("value_int = 3", np.int64(3)),
    "value_ints": ("value_ints = [3, 4]", np.int64([3, 4])),
}


@pytest.mark.parametrize("kind", CONSTANTS)
def test_constants_become_initializers(kind: str) -> None:
    attribute, expected = CONSTANTS[kind]
    name = "int64" if expected.dtype.kind == "i" else "float"
    model = parse(
        f"g ({name}[2] x) => ({name}[2] y) {{ c = Constant <{attribute}> () y = Add(x, c) }}"
    )
    work = same_results(model, np.array([1, 2], expected.dtype))
    assert kinds(work) == ["Add"]
    (value,) = work.graph.initializers.values()
    assert value.name in work.constants
    assert value.dtype == ir.DataType.from_numpy(expected.dtype)
    np.testing.assert_array_equal(value.const_value.numpy(), expected)


@pytest.mark.parametrize("kind", ["value_string", "value_strings"])
def test_non_numeric_constants_are_kept(kind: str) -> None:
    model = parse(
        "g (float[2] x) => (float[2] y) { c = Constant <value_float = 0.0> () y = Relu(x) }"
    )
    attribute = model.graph.node[0].attribute[0]
    attribute.Clear()
    attribute.name = kind
    if kind == "value_string":
        attribute.type, attribute.s = onnx.AttributeProto.STRING, b"a"
    else:
        attribute.type = onnx.AttributeProto.STRINGS
        attribute.strings.extend([b"a", b"b"])
    assert kinds(prepare(load(model)).model) == ["Relu"]


def test_initializers_of_subgraphs_are_moved_to_the_main_graph() -> None:
    model = parse("""g (bool c, float[2] x) => (float[2] y) {
        y = If (c) <
            then_branch = p () => (float[2] a) <float[2] k = {1.0, 2.0}> { a = Add(x, k) },
            else_branch = q () => (float[2] b) <float[2] k = {3.0, 4.0}> { b = Mul(x, k) }
        >
    }""")
    x = np.array([1, -2], np.float32)
    for condition in (True, False):
        work = same_results(model, np.array(condition), x)
        assert len(work.graph.initializers) == 2
        (node,) = work.graph
        assert not any(a.as_graph().initializers for a in node.attributes.values())


def test_cast_like_becomes_cast() -> None:
    work = same_results(
        parse("g (float[2] x, int32[1] t) => (int32[2] y) { y = CastLike(x, t) }"),
        np.array([1.7, -2.2], np.float32),
        np.array([0], np.int32),
    )
    assert kinds(work) == ["Cast"]
    assert "CastLike became Cast: 1 node(s)" in work.repairs


def test_shape_arithmetic_is_folded() -> None:
    model = parse("""g (float[2,3,4] x) => (float[2,12] y) {
        s = Shape(x)
        zero = Constant <value_int = 0> ()
        b = Gather(s, zero)
        axes = Constant <value_ints = [0]> ()
        c = Unsqueeze(b, axes)
        rest = Constant <value_ints = [-1]> ()
        t = Concat <axis = 0> (c, rest)
        y = Reshape(x, t)
    }""")
    assert kinds(same_results(model, np.ones((2, 3, 4)))) == ["Reshape"]


WINDOWS = {
    "conv": "y = Conv <{a}> (x, w)",
    "max": "y = MaxPool <{a}, kernel_shape = [3, 2]> (x)",
    "average": "y = AveragePool <{a}, kernel_shape = [3, 2]> (x)",
    "average-padded": "y = AveragePool <{a}, kernel_shape = [3, 2], count_include_pad = 1> (x)",
    "lp": "y = LpPool <{a}, kernel_shape = [3, 2]> (x)",
    "transpose": "y = ConvTranspose <{a}> (x, w)",
}
MODES = ("NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER")


@pytest.mark.parametrize("sizes", ["static", "symbolic"])
@pytest.mark.parametrize("strides", ["[1, 1]", "[2, 2]"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("window", WINDOWS)
def test_auto_pad(window: str, mode: str, strides: str, sizes: str) -> None:
    attributes = f'auto_pad = "{mode}", strides = {strides}'
    shape = "1,2,7,6" if sizes == "static" else "n,2,h,w"
    node = WINDOWS[window].format(a=attributes)
    model = parse(
        f"g (float[{shape}] x, float[2,2,3,2] w) => (float[p,q,r,s] y) {{ {node} }}",
    )
    rng = np.random.default_rng(1)
    work = same_results(model, rng.standard_normal((1, 2, 7, 6)), rng.standard_normal((2, 2, 3, 2)))
    (node,) = (n for n in work.graph if n.outputs[0].is_graph_output())
    left = node.attributes.get("auto_pad")
    explicit = left is None or left.as_string() == "NOTSET"
    # With a stride, SAME_* depends on the size; the gradient rule of pooling handles it.
    assert explicit or (mode.startswith("SAME") and sizes == "symbolic" and strides == "[2, 2]")


# onnxruntime rejects a dilated Conv with SAME_* and returns too small a MaxPool output.
@pytest.mark.parametrize("strides", [(1, 1), (2, 3)])
@pytest.mark.parametrize("mode", ["SAME_UPPER", "SAME_LOWER"])
@pytest.mark.parametrize(
    "node",
    [
        "Conv <{a}, dilations = [2, 1]> (x, w)",
        "MaxPool <{a}, kernel_shape = [3, 2], dilations = [1, 2]> (x)",
    ],
    ids=["conv", "max"],
)
def test_dilated_auto_pad(node: str, mode: str, strides: tuple[int, int]) -> None:
    reach = (5, 2) if node.startswith("Conv") else (3, 3)
    pads = []
    for size, extent, stride in zip((7, 6), reach, strides, strict=True):
        total = max((-(-size // stride) - 1) * stride + extent - size, 0)
        half = (total // 2, total - total // 2)
        pads.append(half if mode == "SAME_UPPER" else half[::-1])
    text = "g (float[1,2,7,6] x, float[2,2,3,2] w) => (float[p,q,r,s] y) {{ y = {} }}"
    auto = parse(text.format(node.format(a=f'auto_pad="{mode}", strides={list(strides)}')))
    padded = [a for a, _ in pads] + [b for _, b in pads]
    explicit = parse(text.format(node.format(a=f"pads={padded}, strides={list(strides)}")))
    rng = np.random.default_rng(1)
    values = rng.standard_normal((1, 2, 7, 6)), rng.standard_normal((2, 2, 3, 2))
    (y,) = stock(finalize(prepare(load(auto)).model))(values)
    assert y.shape[2:] == tuple(-(-n // s) for n, s in zip((7, 6), strides, strict=True))
    np.testing.assert_array_equal(y, stock(explicit)(values)[0])


MLP = """g (float[N,2] x) => (float[N,2] y)
<float[2,2] weight = {1.0, 2.0, 3.0, 4.0}, float[2] b = {0.0, 0.0}, float[2] a = {0.0, 0.0},
 float scale = {1.0}>
{
    h = MatMul(x, weight)
    i = Add(h, b)
    j = Add(i, a)
    t = Transpose(weight)
    k = MatMul(j, t)
    one = Constant <value_float = 1.0> ()
    l = Mul(k, one)
    y = Mul(l, scale)
}"""


def test_parameters_keep_names_and_order() -> None:
    work = prepare(load(parse(MLP)))
    given = [n for n in work.graph.initializers if n not in work.constants]
    assert given == ["weight", "b", "a", "scale"]


def test_the_same_model_gives_the_same_bytes() -> None:
    model = onnx.parser.parse_model(NESTED)
    once, again = (finalize(load_normalized(model).model).SerializeToString() for _ in range(2))
    assert once == again
    assert model == onnx.parser.parse_model(NESTED)
