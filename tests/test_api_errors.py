"""Errors of the public functions, and rules that users register."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

import onnxtrain
from onnxtrain import errors
from onnxtrain.autodiff import rule_registry
from tests.cases.evaluate import reference, stock
from tests.small_nets import LOSS, NET, PARAMETERS, names, numbers, parse

# -- errors --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrt", "message"),
    [
        ("fc.wieght", r"no such value in `wrt`: 'fc.wieght'\nhint: the model has .*fc\.weight"),
        (["table", "nope", "x?"], r"no such value in `wrt`: 'nope', 'x\?'"),
        ([], r"`wrt` is empty"),
        ("axes", r"no such value in `wrt`: 'axes'"),
        ("h", r"no such value in `wrt`: 'h'"),
    ],
    ids=str,
)
def test_unknown_names_in_wrt(wrt, message: str) -> None:
    for function in (onnxtrain.vjp, onnxtrain.jvp, onnxtrain.parameters, onnxtrain.explain):
        with pytest.raises(errors.PrepareError, match=message):
            function(parse(NET), wrt)


def test_integers_have_no_gradient() -> None:
    with pytest.raises(
        errors.UndifferentiableError, match=r"only float tensors have gradients, got ids: INT64"
    ):
        onnxtrain.vjp(parse(NET), "ids")
    with pytest.raises(
        errors.UndifferentiableError, match=r"only float tensors have gradients, got best: INT64"
    ):
        onnxtrain.vjp(parse(NET), None, "best")
    assert list(onnxtrain.parameters(parse(NET), "*")) == [*PARAMETERS, "unused"]


def test_unknown_output() -> None:
    with pytest.raises(
        errors.PrepareError, match=r"no such output in `outputs`: 'nrom'\nhint: .*norm"
    ):
        onnxtrain.vjp(parse(NET), None, "nrom")
    with pytest.raises(errors.PrepareError, match=r"no such output in `of`: 'lss'\nhint: .*loss"):
        onnxtrain.grad(parse(LOSS), None, "lss")


def test_of_must_have_one_element() -> None:
    with pytest.raises(
        errors.UndifferentiableError,
        match=r"grad requires an output with one element, got y: FLOAT\[N,2\]",
    ):
        onnxtrain.grad(parse(LOSS), None, "y")
    with pytest.raises(errors.PrepareError, match=r"found several outputs: y, norm, best"):
        onnxtrain.grad(parse(NET))


def test_unknown_target() -> None:
    for function in (onnxtrain.vjp, onnxtrain.grad, onnxtrain.jvp):
        with pytest.raises(
            errors.PrepareError, match=r"unknown target: 'tpu' \(expected one of cpu"
        ):
            function(parse(LOSS), target="tpu")


def test_a_model_without_parameters() -> None:
    with pytest.raises(errors.UndifferentiableError, match="the model has no trainable parameters"):
        onnxtrain.vjp(parse("g (float[2] x) => (float[2] y) { y = Neg(x) }"))


def test_a_model_without_float_outputs() -> None:
    with pytest.raises(errors.UndifferentiableError, match=r"no float output: y: INT64\[2\]"):
        onnxtrain.vjp(parse("g (float[2] x) => (int64[2] y) { y = Cast <to = 7> (x) }"), "x")


# -- operators without a rule ----------------------------------------------------------------

CUSTOM = """<ir_version: 10, opset_import: ["" : 21, "acme" : 1]>
g (float[N,2] x) => (float[N,2] y, float[N,2] z)
<float[2] w = {1.0,2.0}> {
    h = Mul(x, w)
    t = acme.Twice <factor = 3.0> (h)
    [named] u = acme.Thrice (h, w)
    y = Add(t, u)
    z = Neg(x)
}"""


class Twice(OpRun):
    op_domain = "acme"

    def _run(self, x, factor=2.0):
        return (x * np.float32(factor),)


class Thrice(OpRun):
    op_domain = "acme"

    def _run(self, x, w):
        return (x * w,)


@pytest.fixture
def own_rules() -> Iterator[None]:
    before = dict(rule_registry.USER_RULES)
    yield
    rule_registry.USER_RULES.clear()
    rule_registry.USER_RULES.update(before)


def custom() -> onnx.ModelProto:
    text = CUSTOM.replace("[named] ", "")
    model = onnx.parser.parse_model(text)
    model.graph.node[2].name = "named"
    for name in ("h", "t", "u"):
        value = model.graph.value_info.add(name=name)
        value.type.CopyFrom(model.graph.input[0].type)
    return model


def test_every_node_without_a_rule_is_named(own_rules: None) -> None:
    onnxtrain.register_vjp("acme::Unrelated")(lambda op, dy, x: dy)  # lets the domain in
    with pytest.raises(errors.UndifferentiableError) as caught:
        onnxtrain.vjp(custom())
    hint = (
        "hint: leave the parameters upstream of these nodes out of `wrt`, "
        "or register a rule with onnxtrain.register_vjp"
    )
    assert str(caught.value).splitlines() == [
        "no gradient rule for 2 operator(s) on the path to 'y', 'z': acme::Thrice, acme::Twice",
        "  node 't': acme::Twice(h: FLOAT[N,2])",
        "  node 'named': acme::Thrice(h: FLOAT[N,2], w: FLOAT[2])",
        hint,
    ]
    # What does not lead through them can be differentiated.
    made = onnxtrain.vjp(custom(), "x", "z")
    assert names(made.graph.output) == ["y", "z", "x_grad"]


def test_explain_names_them_too(own_rules: None) -> None:
    onnxtrain.register_vjp("acme::Unrelated")(lambda op, dy, x: dy)
    report = onnxtrain.explain(custom())
    assert not report.differentiable
    assert [n.name for n in report.nodes if n.how == "missing"] == ["t", "named"]
    assert "not differentiable: 2 node(s) lack a rule" in str(report)


def test_an_unknown_domain_is_refused_unless_admitted() -> None:
    with pytest.raises(errors.LoadError, match="acme"):
        onnxtrain.vjp(custom())
    with pytest.raises(errors.UndifferentiableError, match="no gradient rule for 2 operator"):
        onnxtrain.vjp(onnxtrain.load(custom(), allow_domains={"acme"}))


def test_rules_of_the_user(own_rules: None) -> None:
    @onnxtrain.register_vjp("acme::Twice")
    def twice(op, dy, x, *, factor):
        return op.Mul(dy, factor)

    @onnxtrain.register_vjp("acme::Thrice")
    def thrice(op, dy, x, w):
        return op.Mul(dy, w), op.sum_to(op.Mul(dy, x), w)

    made = onnxtrain.vjp(custom(), ["x", "w"], "y")
    x, dy = numbers((3, 2), (3, 2))
    w = np.float32([1, 2])
    run = ReferenceEvaluator(made, new_ops=[Twice, Thrice])
    y, _, dx, dw = run.run(None, {"x": x, "w": w, "y_grad": dy})
    h = x * w
    np.testing.assert_allclose(y, 3 * h + h * w, rtol=1e-6)
    dh = dy * (3 + w)
    np.testing.assert_allclose(dx, dh * w, rtol=1e-5)
    np.testing.assert_allclose(dw, (dh * x + dy * h).sum(0), rtol=1e-5)


def test_a_rule_of_the_user_goes_first(own_rules: None) -> None:
    model = parse("g (float[2] x) => (float[2] y) { y = Relu(x) }")
    onnxtrain.register_vjp("Relu")(lambda op, dy, x: op.Mul(dy, 10.0))
    x, dy = numbers((2,), (2,))
    np.testing.assert_allclose(stock(onnxtrain.vjp(model, "x"))([x, dy])[1], 10 * dy)


def test_several_outputs_in_a_rule_of_the_user(own_rules: None) -> None:
    model = parse(
        "g (float[4] x) => (float[2] a, float[2] b) { a, b = Split <num_outputs = 2> (x) }"
    )

    @onnxtrain.register_vjp("Split", multi=True)
    def split(op, dys, x, sizes=None, *, outputs):
        assert len(dys) == len(outputs) == 2
        return op.Concat(*(op.Neg(dy) for dy in dys), axis=0)

    x, da, db = numbers((4,), (2,), (2,))
    np.testing.assert_allclose(stock(onnxtrain.vjp(model, "x"))([x, da, db])[2], [*-da, *-db])


QUANTIZED = """g (float[4] x) => (float[4] y) <float s = {0.1}, uint8 z = {128}> {
    q = QuantizeLinear(x, s, z)  d = DequantizeLinear(q, s, z)  y = Mul(d, d) }"""


def test_quantization_is_refused_without_a_rule() -> None:
    with pytest.raises(errors.UndifferentiableError, match="node 'q': QuantizeLinear") as caught:
        onnxtrain.vjp(parse(QUANTIZED), "x")
    assert "onnxtrain.register_vjp('QuantizeLinear')" in str(caught.value)
    assert not onnxtrain.explain(parse(QUANTIZED), "x").differentiable


def test_straight_through(own_rules: None) -> None:
    onnxtrain.register_vjp("QuantizeLinear")(lambda op, dy, x, scale, zero=None: op.Div(dy, scale))
    made = onnxtrain.vjp(parse(QUANTIZED), "x")
    x, dy = np.float32([0.32, -0.5, 1.04, 0.0]), np.float32([1, 2, 3, 4])
    y, dx = stock(made)([x, dy])
    rounded = np.round(x, 1)
    np.testing.assert_allclose(y, rounded**2, rtol=1e-5)
    np.testing.assert_allclose(dx, 2 * rounded * dy, rtol=1e-4)


def test_a_rule_that_gives_the_wrong_shape_is_caught(own_rules: None) -> None:
    model = parse("g (float[2,3] x) => (float[3,2] y) { y = Transpose(x) }")
    onnxtrain.register_vjp("Transpose")(lambda op, dy, x: dy)
    with pytest.raises(AssertionError, match="rule for Transpose"):
        onnxtrain.vjp(model, "x")


def test_an_invalid_result_is_our_error(own_rules: None) -> None:
    onnxtrain.register_vjp("Relu")(lambda op, dy, x: op.Cast(dy, to=99))
    model = parse("g (float[2] x) => (float[2] y) { y = Relu(x) }")
    with pytest.raises(errors.OnnxTrainError):
        onnxtrain.vjp(model, "x")


def test_float64_and_float16_stay_what_they_are() -> None:
    for kind, dtype in (("double", np.float64), ("float16", np.float16)):
        text = f"g ({kind}[3] x) => ({kind} s) {{ e = Exp(x)  s = ReduceSum <keepdims = 0> (e) }}"
        x = np.array([0.5, -1.0, 0.25], dtype)
        made = onnxtrain.grad(parse(text), "x")
        run = reference(made) if dtype == np.float64 else stock(made)
        _, dx = run([x])
        assert dx.dtype == dtype
        np.testing.assert_allclose(dx, np.exp(x), rtol=1e-3)
