"""Values that a recomputed block saves: `values_to_save` finds the cheapest set."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir
import pytest

from onnxtrain.autodiff.recompute import REREAD_COST, values_to_save

WIDTH = 64


def value(name: str, *sizes: int) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(sizes))


def node(op: str, inputs: Sequence[ir.Value], y: ir.Value) -> ir.Node:
    return ir.Node("", op, inputs, outputs=[y])


def saved(
    block: Sequence[ir.Node], needed: Sequence[ir.Value], may_copy: Callable[[ir.Node], bool]
) -> set[str | None]:
    inner = {y for n in block for y in n.outputs}
    return {y.name for y in values_to_save(block, set(needed), inner, may_copy)}


def test_a_sum_is_saved_instead_of_the_matmul_that_is_not_recomputed() -> None:
    x, product, total, result = (value(n, WIDTH, WIDTH) for n in ("x", "product", "sum", "result"))
    block = [
        node("Product", [x], product),
        node("Add", [product, x], total),
        node("Sigmoid", [total], result),
    ]
    assert saved(block, [total, result], lambda n: n.op_type != "Product") == {"sum"}


def test_a_small_mean_is_saved_instead_of_a_large_square() -> None:
    x, square = value("x", WIDTH, WIDTH), value("square", WIDTH, WIDTH)
    mean = value("mean", WIDTH, 1)
    block = [node("Mul", [x, x], square), node("ReduceMean", [square], mean)]
    assert saved(block, [square, mean], lambda _: True) == {"mean"}


def test_the_input_of_a_transpose_is_saved() -> None:
    x, product = value("x", WIDTH, WIDTH), value("product", WIDTH, WIDTH)
    transposed = value("transposed", WIDTH, WIDTH)
    block = [node("Product", [x], product), node("Transpose", [product], transposed)]
    assert saved(block, [transposed], lambda n: n.op_type != "Product") == {"product"}


@pytest.mark.parametrize("seed", range(20))
def test_no_set_of_saved_values_is_cheaper(seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = [value("x", 64)]
    block = []
    for i in range(8):
        sources = rng.choice(len(values), min(2, len(values)), replace=False)
        y = value(f"v{i}", int(rng.integers(1, 200)))
        block.append(node("Op", [values[j] for j in sources], y))
        values.append(y)
    not_copied = {block[int(i)] for i in rng.choice(8, 2, replace=False)}
    needed = {values[int(i)] for i in rng.choice(np.arange(1, 9), 3, replace=False)}

    def cost(saved_values: set[ir.Value]) -> float:
        total = sum(4.0 * y.shape.numpy()[0] for y in saved_values if y.shape)
        missing, done = [y for y in needed if y not in saved_values], set[ir.Value]()
        while missing:
            y = missing.pop()
            producer = y.producer()
            if y in done or producer is None:
                continue
            done.add(y)
            sources = [x for x in producer.inputs if x is not None and x.shape]
            read = max(4.0 * x.shape.numpy()[0] for x in sources if x.shape)
            total += math.inf if producer in not_copied else read / REREAD_COST
            missing += [x for x in sources if x not in saved_values]
        return total

    inner = values[1:]
    best = min(cost(set(subset)) for k in range(9) for subset in itertools.combinations(inner, k))
    chosen = values_to_save(block, needed, set(inner), lambda n: n not in not_copied)
    assert cost(chosen) == pytest.approx(best)
