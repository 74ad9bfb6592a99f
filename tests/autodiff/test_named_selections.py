"""Named selections of parameters: "bias", "norm" and "last:N"."""

from __future__ import annotations

import pytest

import onnxtrain
from onnxtrain.errors import PrepareError
from tests.adapters.decoders import write
from tests.small_nets import parse

NET = """g (float[N,3] x) => (float[N,2] y)
<float[3,4] w1 = {1,2,3,4,5,6,7,8,9,1,2,3}, float[4] b1 = {1,2,3,4}, float[4] s = {1,1,2,1},
 float[4] t = {0.1,0.2,0.3,0.4}, float[4,2] w2 = {1,2,3,4,5,6,7,8}, float[2] b2 = {1,2}>
{
    a = MatMul(x, w1)  b = Add(a, b1)  c = LayerNormalization <axis = -1> (b, s, t)
    d = MatMul(c, w2)  y = Add(d, b2)
}"""


def trained(model: object, train: object, **options: object) -> set[str]:
    artifacts = onnxtrain.build(model, loss="mse", optimizer="sgd", train=train, **options)  # type: ignore[arg-type]
    return {p.name for p in artifacts.manifest.parameters}


@pytest.mark.parametrize(
    ("selection", "names"),
    [
        ("bias", {"b1", "t", "b2"}),
        ("norm", {"s", "t"}),
        ("last:1", {"w2", "b2"}),
        ("last:2", {"w1", "b1", "s", "t", "w2", "b2"}),
        (["norm", "w1"], {"s", "t", "w1"}),
    ],
)
def test_train_selects_parameters(selection, names):
    assert trained(parse(NET), selection) == names


def test_freeze_excludes_a_selection():
    assert trained(parse(NET), None, freeze="norm") == {"w1", "b1", "w2", "b2"}


def test_explain_lists_selections():
    report = onnxtrain.explain(parse(NET))
    assert report.selections == {
        "bias": "3 tensor(s), 10 elements",
        "norm": "2 tensor(s), 8 elements",
        "last:1": "2 tensor(s), 10 elements, of 2 layers",
    }
    assert "selection bias: 3 tensor(s)" in str(report)
    assert set(onnxtrain.explain(parse(NET), wrt="bias").parameters) == {"b1", "t", "b2"}


def test_last_selects_the_last_block_by_name(tmp_path):
    path = write(tmp_path).path
    report = onnxtrain.explain(path, wrt="last:1")
    assert {n.split(".")[2] for n in report.parameters if ".layers." in n} == {"1"}
    assert {"lm_head.MatMul.weight", "model.norm.weight"} <= set(report.parameters)
    assert "of 2 blocks" in report.selections["last:1"]
    norms = onnxtrain.explain(path, wrt="norm").parameters
    assert set(norms) == {"model.norm.weight"} | {
        f"model.layers.{i}.{n}_layernorm.weight"
        for i in range(2)
        for n in ("input", "post_attention")
    }


def test_a_parameter_with_the_name_takes_precedence():
    text = NET.replace("b1", "bias")
    assert trained(parse(text), "bias") == {"bias"}


def test_an_input_with_the_name_takes_precedence():
    model = parse("g (float[2] bias, float[2] x) => (float[2] y) { y = Mul(bias, x) }")
    assert [y.name for y in onnxtrain.vjp(model, wrt="bias").graph.output] == ["y", "bias_grad"]


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        ("last:3", "selects 3 layers, but the model has 2"),
        ("last:0", "must select at least one layer"),
        ("lst:1", "no such parameter"),
    ],
)
def test_invalid_selections_are_refused(selection, message):
    with pytest.raises(PrepareError, match=message):
        trained(parse(NET), selection)


def test_an_empty_selection_is_refused():
    text = "g (float[N,2] x) => (float[N,2] y) <float[2,2] w = {1,2,3,4}> { y = MatMul(x, w) }"
    with pytest.raises(PrepareError, match="'bias' matches no parameter"):
        trained(parse(text), "bias")
    assert trained(parse(text), "last:1") == {"w"}
