"""Calls of gradient rules, lowerings and decompositions by their signatures."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from typing import Any

import onnx_ir as ir
import pytest

from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.call_by_signature import call_by_signature, describe_unhandled, signature_of


def builder() -> OpBuilder:
    return OpBuilder(ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="g"))


def node(op_type: str, count: int, domain: str = "", **attributes: Any) -> ir.Node:
    inputs = [ir.val(f"x{i}", ir.DataType.FLOAT, [2]) for i in range(count)]
    given = [ir.convenience.convert_attribute(k, v) for k, v in attributes.items()]
    return ir.Node(domain, op_type, inputs, given)


def test_inputs_by_position_and_keywords_by_name() -> None:
    one = node("Gemm", 2, alpha=2.0)

    def function(op, first, a, b, c=None, *, alpha, beta, transA, y):
        return first, a, b, c, alpha, beta, transA, y

    made = call_by_signature(function, builder(), one, "dy", context={"y": "context"})
    assert made == ("dy", one.inputs[0], one.inputs[1], None, 2.0, 1.0, 0, "context")


@pytest.mark.parametrize(("given", "gets"), [({}, 3.0), ({"alpha": 2.0}, 2.0)])
def test_signature_default_without_schema(given, gets) -> None:
    def function(op, x, *, alpha=3.0, beta):
        return alpha, beta

    one = node("Swirl", 1, "acme", **given)
    assert call_by_signature(function, builder(), one, context={}) == (gets, None)


def test_context_takes_precedence_over_attributes() -> None:
    def function(op, x, *, axis):
        return axis

    one = node("Softmax", 1, axis=1)
    assert call_by_signature(function, builder(), one, context={"axis": "mine"}) == "mine"


def test_describe_unhandled() -> None:
    def one(op, x):
        return x

    def with_axis(op, x, *, axis):
        return x

    def with_node(op, *inputs, node):
        return inputs

    softmax = node("Softmax", 1, axis=1)
    unsupported = "has attributes that its lowering does not support: axis"
    assert describe_unhandled(one, softmax, "lowering") == unsupported
    assert describe_unhandled(with_axis, softmax, "lowering") is None
    two = node("Add", 2)
    assert describe_unhandled(one, two, "lowering") == "has more inputs than its lowering supports"
    assert describe_unhandled(with_node, node("Sum", 9, x=1), "lowering") is None


def test_signature_cache_is_weak() -> None:
    class Holder:
        def method(self, op, x, *, axis=4):
            return axis

    def function(op, x):
        return x

    assert signature_of(function) is signature_of(function)
    holder = Holder()
    assert call_by_signature(holder.method, builder(), node("Relu", 1), context={}) == 4
    alive = weakref.ref(holder)
    del holder
    gc.collect()
    assert alive() is None


def test_unhashable_callable() -> None:
    @dataclasses.dataclass
    class Scaled:
        by: float

        def __call__(self, op, x):
            return self.by

    assert call_by_signature(Scaled(2.0), builder(), node("Relu", 1), context={}) == 2.0
