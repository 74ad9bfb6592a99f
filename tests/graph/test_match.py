"""Graph patterns: what matches, in which order, and why something does not."""

from __future__ import annotations

import logging

import onnx_ir as ir
import pytest

from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.match import Match, Pattern, checked, pattern


@pattern
def swish(op, x):
    return op.Mul(x, op.Sigmoid(x))


@pytest.fixture
def op() -> OpBuilder:
    return OpBuilder(ir.Graph([], [], nodes=[], opset_imports={"": 21}))


def value(op: OpBuilder, name: str) -> ir.Value:
    return op.input(name, ir.DataType.FLOAT, [2, 4])


def node(x: ir.Value) -> ir.Node:
    made = x.producer()
    assert made is not None
    return made


@pytest.mark.parametrize("swapped", [False, True])
def test_operands_of_commutative_operators_match_in_both_orders(
    op: OpBuilder, swapped: bool
) -> None:
    x = value(op, "x")
    s = op.Sigmoid(x)
    match = swish.match(node(op.Mul(s, x) if swapped else op.Mul(x, s)))
    assert match is not None
    assert match["x"] is x


def test_a_variable_is_the_same_value_everywhere(op: OpBuilder) -> None:
    x, y = value(op, "x"), value(op, "y")
    product = node(op.Mul(y, op.Sigmoid(x)))
    assert swish.match(product) is None
    assert "is not y" in swish.explain(product) or "is not x" in swish.explain(product)


def test_operands_of_other_operators_keep_their_order(op: OpBuilder) -> None:
    x = value(op, "x")
    one_minus = Pattern(lambda op, x: op.Sub(1.0, x))
    assert one_minus.match(node(op.Sub(op.const(1.0), x))) is not None
    other = node(op.Sub(x, op.const(1.0)))
    assert one_minus.explain(other) == "x is not the constant 1.0"


def test_bound_variables_and_users(op: OpBuilder) -> None:
    x, y = value(op, "x"), value(op, "y")
    s = op.Sigmoid(x)
    op.Mul(y, s)
    product = node(op.Mul(s, x))
    match = swish.find_user(s, x=x)
    assert match is not None
    assert match.root is product
    assert swish.match(product, x=y) is None


def test_values_with_other_readers(op: OpBuilder) -> None:
    once = Pattern(lambda op, x: op.Relu(op.Neg(x).once()))
    negative = op.Neg(value(op, "x"))
    relu = node(op.Relu(negative))
    assert once.match(relu) is not None
    op.Abs(negative)
    assert once.explain(relu) == f"{negative.name} has other readers"


def test_attributes_with_their_defaults(op: OpBuilder) -> None:
    x = value(op, "x")
    last = Pattern(lambda op, x: op.Softmax(x, axis=lambda a: a in (-1, 1)))
    assert last.match(node(op.Softmax(x))) is not None
    other = node(op.Softmax(x, axis=0))
    assert last.explain(other) == f"axis of {other.name} is 0"


def test_all_outputs_of_a_node(op: OpBuilder) -> None:
    def swap(op, x):
        a, b = op.Split(x, ..., axis=1, _outputs=2)
        return op.Concat(b, a, axis=1)

    x = value(op, "x")
    a, b = op.Split(x, [2, 2], axis=1, _outputs=2)
    c, _ = op.Split(x, [2, 2], axis=1, _outputs=2)
    assert Pattern(swap).match(node(op.Concat(b, a, axis=1))) is not None
    assert Pattern(swap).match(node(op.Concat(a, b, axis=1))) is None
    assert Pattern(swap).match(node(op.Concat(b, c, axis=1))) is None
    three = op.Split(x, [1, 1, 2], axis=1, _outputs=3)
    mixed = node(op.Concat(three[1], three[0], axis=1))
    assert "has 3 outputs" in Pattern(swap).explain(mixed)


def test_optional_inputs_and_constants(op: OpBuilder) -> None:
    x, y = (value(op, n) for n in "xy")
    z = op.input("z", ir.DataType.FLOAT, [4])
    without_bias = Pattern(lambda op, a, b: op.Gemm(a, b))
    any_bias = Pattern(lambda op, a, b: op.Gemm(a, b, ...))
    gemm = node(op.Gemm(x, y, z, transA=1))
    assert "more inputs" in without_bias.explain(gemm)
    assert any_bias.match(gemm) is not None
    first = Pattern(lambda op, x: op.Unsqueeze(x, [0]))
    assert first.match(node(op.Unsqueeze(x, [0]))) is not None
    assert first.match(node(op.Unsqueeze(x, [1]))) is None


def test_a_failed_check_tries_the_other_order(op: OpBuilder) -> None:
    def is_input(match: Match) -> bool | str:
        return match["a"].producer() is None or "a is computed"

    @checked(is_input)
    def product(op, a, b):
        return op.Mul(a, b)

    x = value(op, "x")
    y = op.Neg(x)
    match = product.match(node(op.Mul(y, x)))
    assert match is not None
    assert match["a"] is x
    assert product.explain(node(op.Mul(y, y))) == "a is computed"


def test_sources_of_values_are_compared(op: OpBuilder) -> None:
    x = value(op, "x")
    copy = op.Identity(x)

    def without_identity(v: ir.Value) -> ir.Value:
        made = v.producer()
        if made is None or made.op_type != "Identity" or made.inputs[0] is None:
            return v
        return made.inputs[0]

    product = node(op.Mul(copy, op.Sigmoid(x)))
    assert swish.match(product) is None
    assert Pattern(lambda op, x: op.Mul(x, op.Sigmoid(x)), source=without_identity).match(product)


def test_named_values_and_their_nodes(op: OpBuilder) -> None:
    named = Pattern(lambda op, x: op.Relu(op.Neg(x).named("negative")))
    x = value(op, "x")
    negative = op.Neg(x)
    match = named.match(node(op.Relu(negative)))
    assert match is not None
    assert match["negative"] is negative
    assert match.node("negative") is node(negative)


def test_near_misses_are_logged(op: OpBuilder, caplog: pytest.LogCaptureFixture) -> None:
    x = value(op, "x")
    with caplog.at_level(logging.DEBUG, "onnxtrain.optimize"):
        assert swish.match(node(op.Relu(x))) is None
        assert not caplog.records
        assert swish.match(node(op.Mul(x, op.Tanh(x)))) is None
    assert "swish does not match" in caplog.text
    assert "computed by Tanh, not by Sigmoid" in caplog.text
