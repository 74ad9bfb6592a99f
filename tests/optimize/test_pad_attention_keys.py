"""pad_attention_keys: equal values, gradients and losses."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import parser
from torch import nn

import onnxtrain
from onnxtrain import thresholds
from onnxtrain.graph import attention_scores
from onnxtrain.targets import Target, find
from tests.optimize.key_padding import fill_up_short_rows, row_lengths

F = nn.functional
CUDA = find("cuda")
PLAIN = CUDA.without("pad-attention-keys")
HEAD = '<ir_version: 10, opset_import: ["": 21]>\n'
ATTENTION = """
    scale = Constant<value_float=0.5>()
    kt = Transpose<perm=[0,1,3,2]>(k)
    raw = MatMul(q, kt)
    x = Mul(raw, scale)
    {mask}
    p = Softmax<axis=-1>({scores})
    y = MatMul(p, v)
"""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    fill_up_short_rows(monkeypatch)


@pytest.fixture(params=["pass", "product"])
def closed_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "product":
        monkeypatch.setattr(thresholds, "MASK_IN_MATMUL_RATIO", 0)
    return request.param


def attention(
    queries: int, keys: int, mask: str = "", inputs: str = "", numbers: str = ""
) -> onnx.ModelProto:
    body = ATTENTION.format(mask=mask, scores="masked" if mask else "x")
    return parser.parse_model(
        f"{HEAD} g (float[2,3,{queries},4] q, float[2,3,{keys},4] k, float[2,3,{keys},4] v{inputs})"
        f" => (float[2,3,{queries},4] y) <float one = {{1}}{numbers}> {{{body}}}"
    )


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    names = [y.name for y in session.get_outputs()]
    known = {i.name for i in session.get_inputs()}
    results = session.run(names, {n: x for n, x in feeds.items() if n in known})
    return {n: np.asarray(y) for n, y in zip(names, results, strict=True)}


def feeds_of(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    rng, feeds = np.random.default_rng(0), {}
    for value in model.graph.input:
        kind = value.type.tensor_type
        shape = [d.dim_value for d in kind.shape.dim]
        if kind.elem_type == onnx.TensorProto.BOOL:
            feeds[value.name] = rng.random(shape) < 0.7
            feeds[value.name][..., 0] = True
        else:
            feeds[value.name] = rng.standard_normal(shape).astype(np.float32)
    return feeds


def gradients(model: onnx.ModelProto, target: str | Target) -> onnx.ModelProto:
    kinds = {i.name: i.type.tensor_type.elem_type for i in model.graph.input}
    return onnxtrain.vjp(
        model, [n for n, kind in kinds.items() if kind == onnx.TensorProto.FLOAT], target=target
    )


def same_gradients(
    model: onnx.ModelProto, length: int, feeds: dict[str, np.ndarray] | None = None
) -> onnx.ModelProto:
    """Check all gradients with and without the pass, and that rows are as long as they should."""
    onnx.checker.check_model(model, full_check=True)
    whole, plain = (gradients(model, t) for t in (CUDA, PLAIN))
    onnx.checker.check_model(whole, full_check=True)
    assert row_lengths(whole) == {length}
    feeds = feeds_of(plain) | (feeds or {})
    expected = run(plain, feeds)
    actual = run(whole, feeds)
    assert list(actual) == list(expected)
    assert len(expected) > 3
    for name, value in expected.items():
        assert np.isfinite(value).all()
        np.testing.assert_allclose(actual[name], value, rtol=1e-6, atol=1e-6, err_msg=name)
    return whole


SIZES = [(5, 5, 8), (13, 13, 16), (7, 197, 200), (197, 9, 12)]


@pytest.mark.parametrize(("queries", "keys", "length"), SIZES)
def test_attention_without_a_mask(queries: int, keys: int, length: int, closed_by: str) -> None:
    whole = same_gradients(attention(queries, keys), length)
    sums = [n for n in whole.graph.node if n.op_type == "Add"]
    assert len(sums) == (closed_by == "pass")


@pytest.mark.parametrize(
    ("scale", "closed_by_features"), [("0.5", True), ("-0.5", False), (None, False)]
)
@pytest.mark.parametrize("place", ["q", "k", "scores"])
def test_features_mask_keys_unless_a_scale_is_negative(
    scale: str | None, closed_by_features: bool, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thresholds, "MASK_IN_MATMUL_RATIO", 0)
    more = {
        "q": "a = Mul(q, factor) raw = MatMul(a, kt)",
        "k": "a = Mul(kt, factor) raw = MatMul(q, a)",
        "scores": "a = MatMul(q, kt) raw = Mul(a, factor)",
    }
    factor = f"factor = Constant<value_float={scale}>()" if scale else ""
    model = attention(5, 5, inputs="" if scale else ", float factor")
    source = onnx.printer.to_text(model).replace("raw = MatMul (q, kt)", factor + more[place])
    whole = same_gradients(parser.parse_model(source), 8, {"factor": np.array(-2.0, np.float32)})
    sums = [n for n in whole.graph.node if n.op_type == "Add"]
    # In front of the product, features are put in behind a factor that may be below zero.
    assert len(sums) == (not closed_by_features and place == "scores")


def test_forward_derivatives(closed_by: str) -> None:
    model = attention(5, 13)
    whole, plain = (onnxtrain.jvp(model, ["q", "k", "v"], target=t) for t in (CUDA, PLAIN))
    assert row_lengths(whole) == {16}, closed_by
    feeds = feeds_of(plain)
    expected, actual = run(plain, feeds), run(whole, feeds)
    assert len(expected) == 2
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name], value, rtol=1e-6, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("keys", [4, 8, 12])
def test_aligned_rows_stay(keys: int) -> None:
    same_gradients(attention(5, keys), keys)


def causal(size: int, closed: float) -> str:
    rows = np.where(np.tri(size, dtype=bool), 0.0, closed)
    return ",".join(f"{n:g}" for n in rows.ravel())


@pytest.mark.parametrize("closed", [-1e30, -3.4e38, -1e4])
def test_a_causal_mask(closed: float) -> None:
    numbers = f", float[1,1,5,5] mask = {{{causal(5, closed)}}}"
    whole = same_gradients(attention(5, 5, "masked = Add(x, mask)", numbers=numbers), 8)
    sums = [n for n in whole.graph.node if n.op_type == "Add"]
    assert len(sums) == 1, "the mask closes the new keys as well"


def test_fully_masked_rows_stay() -> None:
    # All scores of the row are the same large number: each key has the same probability.
    rows = np.where(np.tri(5, k=-1, dtype=bool), 0.0, -3.4028234e38).ravel()
    numbers = f", float[1,1,5,5] mask = {{{','.join(f'{n:.9g}' for n in rows)}}}"
    same_gradients(attention(5, 5, "masked = Add(x, mask)", numbers=numbers), 8)


@pytest.mark.parametrize("shape", ["2,1,5,5", "2,1,1,5", "5", "1,3,5,5", "2,1,5,1"])
@pytest.mark.parametrize("order", ["x, mask", "mask, x"])
def test_a_mask_that_is_an_input(shape: str, order: str) -> None:
    model = attention(5, 5, f"masked = Add({order})", f", float[{shape}] mask")
    same_gradients(model, 8)


@pytest.mark.parametrize("hidden", ["x, low", "low, x"])
@pytest.mark.parametrize("low", ["-1e4", "-3.4e38", "input"])
def test_a_mask_by_where(hidden: str, low: str) -> None:
    inputs, numbers = ", bool[2,1,5,5] seen", f", float low = {{{low}}}"
    if low == "input":
        inputs, numbers = f"{inputs}, float low", ""
    model = attention(5, 5, f"masked = Where(seen, {hidden})", inputs, numbers)
    same_gradients(model, 8)


def test_a_mask_before_a_scale() -> None:
    mask = "added = Add(x, mask) masked = Mul(added, negative)"
    model = attention(5, 5, mask, ", float[2,1,5,5] mask", ", float negative = {-0.5}")
    same_gradients(model, 8)


def test_two_masks_with_a_reshape_in_between() -> None:
    mask = """
        biased = Add(x, bias)
        apart = Reshape(biased, windows)
        hidden = Add(apart, mask)
        masked = Reshape(hidden, together)
    """
    inputs = ", float[1,3,5,5] bias, float[1,2,1,5,5] mask"
    numbers = ", int64[5] windows = {1,2,3,5,5}, int64[4] together = {2,3,5,5}"
    same_gradients(attention(5, 5, mask, inputs, numbers), 8)


def test_scores_with_other_readers_stay() -> None:
    model = attention(
        5, 5, "twice = Add(x, x) masked = Mul(twice, half)", "", ", float half = {0.5}"
    )
    same_gradients(model, 5)


def test_symbolic_sizes_stay() -> None:
    model = attention(5, 5)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    made = gradients(model, CUDA)
    assert row_lengths(made) <= {5}
    assert "Concat" not in {n.op_type for n in made.graph.node}


def test_short_sequences_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thresholds, "PADDED_ATTENTION_KEYS", 6)
    same_gradients(attention(5, 5), 5)
    monkeypatch.setattr(thresholds, "PADDED_ATTENTION_KEYS", 3)
    monkeypatch.setattr(thresholds, "PADDED_ATTENTION_SCORES", 2 * 3 * 5 * 5 + 1)
    same_gradients(attention(5, 5), 5)


def test_other_targets_do_not_pad() -> None:
    for target in ("cpu", "wasm", "webgpu", "portable"):
        assert not find(target).prefers("pad-attention-keys")
        assert row_lengths(gradients(attention(5, 5), target)) <= {5}


@pytest.mark.parametrize("keys", [13, 16])
def test_fused_attention_reads_unpadded_keys(
    keys: int, closed_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        attention_scores, "FUSED_ATTENTION_DTYPES", (ir.DataType.FLOAT, ir.DataType.BFLOAT16)
    )
    monkeypatch.setattr(thresholds, "REMATERIALIZE_BYTES", 1)
    source = onnx.printer.to_text(attention(13, keys)).replace(",4]", ",8]").replace(", 4]", ", 8]")
    model = onnx.parser.parse_model(
        source.replace("y = MatMul", "o = MatMul")
        .replace("(p, v)", "(p, v) y = Neg (o)")
        .replace("raw = MatMul (q, kt)", "kk = Mul (kt, scale) raw = MatMul (q, kk)")
    )
    whole = same_gradients(model, 16)
    assert sum(n.op_type == "Attention" for n in whole.graph.node) == 1
