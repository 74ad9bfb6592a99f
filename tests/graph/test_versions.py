"""Models of all opsets compute the same after conversion to the working opset."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from onnxtrain.autodiff.gradients import load_normalized
from onnxtrain.errors import PrepareError
from onnxtrain.graph.io import load
from onnxtrain.graph.io.writer import finalize
from onnxtrain.importer.opset import to_working_opset
from tests.cases import attention
from tests.cases.base import OpCase, ir_version
from tests.cases.checks import feeds
from tests.cases.evaluate import reference, stock

IR_OF = {7: 3, 8: 3, 9: 4, 10: 5, 11: 6, 12: 7, 13: 7}
BN = "float[2,3,4] x, float[3] s, float[3] b, float[3] m, float[3] v"


def table(text: str) -> dict[str, tuple[int, str, int]]:
    """Models as ``# name opset [-> opset afterwards]`` and the text of the graph below."""
    models = {}
    for part in text.strip().removeprefix("# ").split("\n# "):
        head, _, graph = part.partition("\n")
        name, opset, *rest = head.split()
        models[name] = (int(opset), graph, int(rest[1]) if rest else 21)
    return models


OLD = table("""
# squeeze 7
    g (float[2,1,3,1] x) => (float[2,3] y) { y = Squeeze<axes=[1,3]>(x) }
# unsqueeze 9
    g (float[2,3] x) => (float[1,2,1,3] y) { y = Unsqueeze<axes=[0,2]>(x) }
# unsqueeze-13 13
    g (float[2] x) => (float[2,1] y) <int64[1] a={1}> { y = Unsqueeze(x,a) }
# reduce 7
    g (float[2,3] x) => (float[3] y) { y = ReduceSum<axes=[0],keepdims=0>(x) }
# reduce-all 9
    g (float[2,3] x) => (float[1,1] y) { y = ReduceL2(x) }
# reduce-13 13
    g (float[2,3] x) => (float[2,1] y) { y = ReduceMean<axes=[-1]>(x) }
# reduce-17 17
    g (float[2,3] x) => (float[1,3] y) { y = ReduceLogSumExp<axes=[0]>(x) }
# reduce-sum-13 13
    g (float[2,3] x) => (float[2,1] y) <int64[1] a={1}> { y = ReduceSum(x,a) }
# clip 7
    g (float[2,3] x) => (float[2,3] y) { y = Clip<min=-0.5,max=0.5>(x) }
# clip-one-sided 9
    g (float[2,3] x) => (float[2,3] y) { y = Clip<min=0.0>(x) }
# clip-11 11
    g (float[2] x) => (float[2] y) <float m={0.5}> { y = Clip(x,,m) }
# dropout 7
    g (float[2,3] x) => (float[2,3] y) { y = Dropout<ratio=0.3>(x) }
# dropout-12 12
    g (float[2] x) => (float[2] y) <float r={0.5}, bool t={0}> { y = Dropout(x,r,t) }
# batch-norm 7
    g (float[2,3,4] x, float[3] s, float[3] b, float[3] m, float[3] v) => (float[2,3,4] y) { a =
    Abs(v) y = BatchNormalization(x,s,b,m,a) }
# batch-norm-9 9
    g (float[2,3,4] x, float[3] s, float[3] b, float[3] m, float[3] v) => (float[2,3,4] y) { a =
    Abs(v) y = BatchNormalization<epsilon=0.1>(x,s,b,m,a) }
# batch-norm-14 14
    g (float[2,3,4] x, float[3] s, float[3] b, float[3] m, float[3] v) => (float[2,3,4] y,
    float[3] n, float[3] w) { a = Abs(v) y, n, w = BatchNormalization<training_mode=1>(x,s,b,m,a)
    }
# softmax 7
    g (float[N,3,4] x) => (float[N,3,4] y) { y = Softmax(x) }
# softmax-11 11
    g (float[2,3,4] x) => (float[2,3,4] y) { y = Softmax<axis=-2>(x) }
# softmax-13 13
    g (float[2,3,4] x) => (float[2,3,4] y) { y = Softmax<axis=1>(x) }
# log-softmax 9
    g (float[2,3,4] x) => (float[2,3,4] y) { y = LogSoftmax<axis=1>(x) }
# hardmax 11
    g (float[2,3,4] x) => (float[2,3,4] y) { y = Hardmax(x) }
# hardmax-batch 7
    g (float[N,3,4] x) => (float[N,3,4] y) { y = Hardmax<axis=2>(x) }
# upsample-7 7
    g (float[1,2,4,4] x) => (float[1,2,8,8] y) { y = Upsample<scales=[1.0,1.0,2.0,2.0]>(x) }
# upsample 9
    g (float[1,2,4,4] x) => (float[1,2,8,12] y) <float[4] s = {1.0,1.0,2.0,3.0}> { y =
    Upsample(x,s) }
# upsample-linear 9
    g (float[1,2,4,4] x) => (float[1,2,8,12] y) <float[4] s = {1.0,1.0,2.0,3.0}> { y =
    Upsample<mode="linear">(x,s) }
# resize-10 10
    g (float[1,2,4,4] x) => (float[1,2,8,12] y) <float[4] s = {1.0,1.0,2.0,3.0}> { y =
    Resize<mode="linear">(x,s) }
# resize-10-smaller 10
    g (float[1,2,4,4] x) => (float[1,2,2,3] y) <float[4] s={1.0,1.0,0.6,0.75}> { y = Resize(x,s) }
# resize-10-thirds 10
    g (float[1,2,4,4] x) => (float[1,2,5,6] y) <float[4] s={1.0,1.0,1.3,1.7}> { y = Resize(x,s) }
# resize-11 11
    g (float[1,2,4,4] x) => (float[1,2,8,12] y) <float[0] r={}, float[4] s={1.0,1.0,2.0,3.0}> { y
    = Resize<mode="cubic">(x,r,s) }
# pad 7
    g (float[2,3] x) => (float[3,5] y) { y = Pad<pads=[1,0,0,2],value=1.5>(x) }
# pad-reflect 10
    g (float[2,3] x) => (float[2,5] y) { y = Pad<pads=[0,1,0,1],mode="reflect">(x) }
# pad-11 11
    g (float[2,3] x) => (float[2,5] y) <int64[4] p={0,1,0,1}> { y = Pad(x,p) }
# slice 7
    g (float[4,5] x) => (float[2,3] y) { y = Slice<starts=[1,0],ends=[3,3]>(x) }
# slice-axes 9
    g (float[4,5] x) => (float[4,4] y) { y = Slice<starts=[-4],ends=[99],axes=[1]>(x) }
# split 7
    g (float[2,6] x) => (float[2,2] a, float[2,4] b) { a, b = Split<axis=1,split=[2,4]>(x) }
# split-equal 11
    g (float[2,6] x) => (float[2,3] a, float[2,3] b) { a, b = Split<axis=1>(x) }
# split-13 13
    g (float[2,6] x) => (float[1,6] a, float[1,6] b) { a, b = Split(x) }
# top-k 7
    g (float[2,6] x) => (float[2,3] a, int64[2,3] b) { a, b = TopK<axis=1,k=3>(x) }
# top-k-10 10
    g (float[N,6] x) => (float[N,3] a, int64[N,3] b) <int64[1] k={3}> { a, b = TopK(x,k) }
# gemm 7
    g (float[2,3] x, float[3,4] w, float[4] b) => (float[2,4] y) { y = Gemm(x,w,b) }
# gemm-9 9
    g (float[3,2] x, float[3,4] w, float[1] b) => (float[2,4] y) { y =
    Gemm<transA=1,beta=2.0>(x,w,b) }
# scatter 9
    g (float[3,3] x, float[1,3] u) => (float[3,3] y) <int64[1,3] i={2,0,1}> { y = Scatter(x,i,u) }
# scatter-11 11
    g (float[3,3] x, float[1,3] u) => (float[3,3] y) <int64[1,3] i={2,0,1}> { y =
    ScatterElements<axis=0>(x,i,u) }
# normalise 9
    g (float[2,3,2,2] x) => (float[2,3,2,2] y) { y = MeanVarianceNormalization(x) }
# average-pool 10
    g (float[1,2,4,4] x) => (float[1,2,2,2] y) { y =
    AveragePool<kernel_shape=[3,3],strides=[2,2],ceil_mode=1,count_include_pad=1>(x) }
# max-pool 8
    g (float[1,2,4,4] x) => (float[1,2,2,2] y) { y = MaxPool<kernel_shape=[2,2],strides=[2,2]>(x)
    }
# lp-pool 7
    g (float[1,2,4,4] x) => (float[1,2,3,3] y) { y = LpPool<kernel_shape=[2,2]>(x) }
# lstm 7
    g (float[3,1,2] x, float[1,8,2] w, float[1,8,2] r) => (float[3,1,1,2] y) { y =
    LSTM<hidden_size=2>(x,w,r) }
# grid-sample 16
    g (float[1,1,4,4] x, float[1,2,2,2] q) => (float[1,1,2,2] y) { y =
    GridSample<mode="bicubic">(x,q) }
# roi-align 10
    g (float[1,1,6,6] x) => (float[1,1,2,2] y) <float[1,4] r = {0.0,0.0,4.0,4.0}, int64[1] i =
    {0}> { y = RoiAlign<output_height=2,output_width=2>(x,r,i) }
# dft 17
    g (float[1,4,1] x) => (float[1,4,2] y) { y = DFT<axis=1>(x) }
# group-norm 18
    g (float[N,4,3] x, float[2] s, float[2] b) => (float[N,4,3] y) { y =
    GroupNormalization<num_groups=2>(x,s,b) }
# constant 9
    g (float[2] x) => (float[2] y) { c = Constant<value=float[2] {1.0,2.0}>() y = Add(x,c) }
# in-branches 9
    g (bool c, float[1,1,2,2] x) => (float[1,1,4,4] y) <float[4] s={1.0,1.0,2.0,2.0}> { y =
    If(c)<then_branch = a () => (float[1,1,4,4] p) { p = Upsample<mode="linear">(x,s)
    },else_branch = b () => (float[1,1,4,4] q) { t = Clip<max=0.0>(x) q = Upsample(t,s) }> }
# in-loop 11
    g (float[2,3] x) => (float[2,3] y) <int64 n={3}, bool t={1}> { y = Loop(n,t,x)<body = b (int64
    i, bool c, float[2,3] s) => (bool d, float[2,3] r) { d = Identity(c) u =
    Unsqueeze<axes=[1]>(s) q = Squeeze<axes=[1]>(u) h = Hardmax<axis=0>(q) r = Sub(s,h) }> }
""")


def parse(opset: int, text: str, ir: int | None = None) -> onnx.ModelProto:
    ir = ir or IR_OF.get(opset) or ir_version(opset)
    model = onnx.parser.parse_model(f'<ir_version: {ir}, opset_import: ["" : {opset}]>\n{text}')
    if ir < 4:  # where initializers had to be inputs
        for tensor in model.graph.initializer:
            value = model.graph.input.add(name=tensor.name)
            value.type.tensor_type.elem_type = tensor.data_type
            for size in tensor.dims:
                value.type.tensor_type.shape.dim.add(dim_value=size)
    return model


def draw(model: onnx.ModelProto) -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    known = {t.name for t in model.graph.initializer}
    arrays = []
    for value in model.graph.input:
        kind = value.type.tensor_type
        shape = [d.dim_value or 2 for d in kind.shape.dim]
        if value.name not in known:
            is_bool = kind.elem_type == onnx.TensorProto.BOOL
            arrays.append(np.ones(shape, bool) if is_bool else rng.standard_normal(shape))
    return arrays


def same(ours: list[np.ndarray], theirs: list[np.ndarray]) -> None:
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_allclose(a, b, atol=2e-6)


@pytest.mark.parametrize("name", OLD)
def test_upgraded_model_agrees_with_the_original(name: str) -> None:
    model = parse(*OLD[name][:2])
    values = draw(model)
    raised = finalize(load_normalized(model).model)
    assert (raised.opset_import[0].version, raised.ir_version) == (21, 10)
    same(stock(raised)(values), stock(model)(values))


@pytest.mark.parametrize("kind", ["double", "float16"])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("y = Clip<min=-0.5,max=0.25>(x)", lambda x: np.clip(x, -0.5, 0.25)),
        ("y = Pad<pads=[0,0],value=1.5>(x)", lambda x: x),
        (
            "p = Pad<pads=[1,0],value=1.5>(x) y = Slice<starts=[0],ends=[4]>(p)",
            lambda x: np.append(1.5, x[:3]),
        ),
    ],
    ids=["clip", "pad", "pad-filled"],
)
def test_constants_take_the_dtype_of_the_input(kind: str, text: str, expected: Any) -> None:
    model = parse(9, f"g ({kind}[4] x) => ({kind}[4] y) {{ {text} }}")
    x = np.array([-1.0, 0.125, 0.25, 3.0], kind)
    (y,) = stock(finalize(load_normalized(model).model))([x])
    assert y.dtype == x.dtype
    np.testing.assert_array_equal(y, expected(x))


def test_training_batch_norm_from_before_its_attribute() -> None:
    text = (
        "g (float[4,3,5] x, float[3] s, float[3] b) => (float[4,3,5] y) "
        "<float[3] m={0.5,0.0,0.0}, float[3] v={1.0,2.0,1.0}> "
        "{ y, n, w, sm, sv = BatchNormalization(x,s,b,m,v) }"
    )
    model = parse(9, text)
    x, s, b = draw(model)
    (y,) = stock(finalize(load_normalized(model).model))([x, s, b])
    mean, var = x.mean((0, 2), keepdims=True), x.var((0, 2), keepdims=True)
    expected = (x - mean) / np.sqrt(var + 1e-5) * s[:, None] + b[:, None]
    np.testing.assert_allclose(y, expected, atol=1e-5)


def test_model_that_cannot_be_upgraded_raises() -> None:
    text = f"g ({BN}) => (float[2,3,4] y) {{ y = BatchNormalization<spatial=0>(x,s,b,m,v) }}"
    with pytest.raises(PrepareError, match="cannot convert the model from opset 7 to 21"):
        to_working_opset(load(parse(7, text)))


def test_ir_3_initializers_are_parameters() -> None:
    model = parse(8, "g (float[N,2] x) => (float[N,2] y) <float[2] w={1.0,2.0}> { y = Mul(x,w) }")
    assert [v.name for v in model.graph.input] == ["x", "w"]
    work = load_normalized(model).model
    assert [x.name for x in work.graph.inputs] == ["x"]
    assert list(work.graph.initializers) == ["w"]


NEW = table("""
# types-only 22 -> 21
    g (float[1,2,5,5] x, float[2,2,3,3] w) => (float[1,2,3,3] y) { y = Conv(x,w) }
# bfloat16 22 -> 22
    g (bfloat16[1,2,5] x, bfloat16[2,2,3] w) => (bfloat16[1,2,3] y) { y = Conv(x,w) }
# bfloat16-relu 22 -> 21
    g (bfloat16[2] x) => (bfloat16[2] y) { y = Relu(x) }
# swish 24 -> 21
    g (float[2] x) => (float[2] y) { y = Swish<alpha=0.5>(x) }
# rounding 24 -> 21
    g (float[2] x) => (double[2] y) { y = Cast<to=11,round_mode="up">(x) }
# default-given 23 -> 21
    g (float s) => (float[1] y) <int8[1] q={1}> { y = DequantizeLinear<output_dtype=0>(q,s) }
# attribute 23 -> 23
    g (float s) => (float16[1] y) <int8[1] q={1}> { y = DequantizeLinear<output_dtype=10>(q,s) }
# two-bits 25 -> 25
    g (int2[2] x) => (float[2] y) { y = Cast<to=1>(x) }
# in-branch 24 -> 21
    g (bool c, float[2] x) => (float[2] y) { y = If(c)<then_branch = a () => (float[2] p) { p =
    Swish(x) },else_branch = b () => (float[2] q) { q = Neg(x) }> }
# newest 28 -> 21
    g (float[2] x) => (float[2] y) { y = Swish(x) }
""")


@pytest.mark.parametrize("name", NEW)
def test_newer_models_are_downgraded_or_keep_their_opset(name: str) -> None:
    opset, text, expected = NEW[name]
    work = load_normalized(parse(opset, text)).model
    assert work.opset_imports[""] == expected
    assert {n.version for n in work.graph.all_nodes()} == {expected}
    assert work.ir_version == (10 if expected == 21 else max(ir_version(opset), 11))
    finalize(work)


@pytest.mark.parametrize("name", ["swish", "in-branch", "types-only"])
def test_downgraded_model_agrees_with_the_original(name: str) -> None:
    opset, text, _ = NEW[name]
    model = parse(opset, text)
    values = draw(model)
    same(stock(finalize(load_normalized(model).model))(values), reference(model)(values))


# onnxruntime 1.31 rejects a mask shorter than the keys and does not support windows.
NOT_IN_RUNTIME = ("Attention-short-bias", "Attention-window")
# The reference evaluator returns softcapped scores where raw ones are requested.
NOT_IN_REFERENCE = ("Attention-raw-scores",)


@pytest.mark.parametrize("case", attention.CASES, ids=repr)
def test_attention_agrees_with_both_evaluators(case: OpCase) -> None:
    model = case.build()
    work = finalize(load_normalized(model).model)
    assert work.opset_import[0].version == 21
    ours = stock(work)(feeds(case))
    if case.name not in NOT_IN_REFERENCE:
        same(ours, reference(model)(feeds(case)))
    if case.name not in NOT_IN_RUNTIME:
        same(ours, stock(model)(feeds(case)))


@pytest.mark.parametrize("opset", [23, 24, 25, 26])
def test_masked_scores_in_the_qk_output_are_infinite(opset: int) -> None:
    text = (
        "g (float[1,1,2,3] q, float[1,1,3,3] k, float[1,1,3,3] v)"
        "=> (float[1,1,2,3] y, float[1,1,2,3] s)"
        "{ y,,,s = Attention<is_causal=1,qk_matmul_output_mode=2>(q,k,v) }"
    )
    model = parse(opset, text)
    values = draw(model)
    y, s = stock(finalize(load_normalized(model).model))(values)
    assert np.array_equal(np.isneginf(s[0, 0]), [[False, True, True], [False, False, True]])
    same([y, s], reference(model)(values))
