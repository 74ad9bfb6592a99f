"""What a block keeps that is computed again: the cheapest choice there is, by trying all."""

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


def kept(
    block: Sequence[ir.Node], wanted: Sequence[ir.Value], may_copy: Callable[[ir.Node], bool]
) -> set[str | None]:
    inner = {y for n in block for y in n.outputs}
    return {y.name for y in values_to_save(block, set(wanted), inner, may_copy)}


def test_a_sum_is_kept_instead_of_the_product_that_cannot_run_again() -> None:
    x, product, total, result = (value(n, WIDTH, WIDTH) for n in ("x", "product", "sum", "result"))
    block = [
        node("Product", [x], product),
        node("Add", [product, x], total),
        node("Sigmoid", [total], result),
    ]
    assert kept(block, [total, result], lambda n: n.op_type != "Product") == {"sum"}


def test_a_mean_is_kept_and_what_has_the_size_of_its_input_is_not() -> None:
    x, square = value("x", WIDTH, WIDTH), value("square", WIDTH, WIDTH)
    mean = value("mean", WIDTH, 1)
    block = [node("Mul", [x, x], square), node("ReduceMean", [square], mean)]
    assert kept(block, [square, mean], lambda _: True) == {"mean"}


def test_a_moved_value_is_kept_as_it_was_before() -> None:
    x, product = value("x", WIDTH, WIDTH), value("product", WIDTH, WIDTH)
    turned = value("turned", WIDTH, WIDTH)
    block = [node("Product", [x], product), node("Transpose", [product], turned)]
    assert kept(block, [turned], lambda n: n.op_type != "Product") == {"product"}


@pytest.mark.parametrize("seed", range(20))
def test_no_choice_is_cheaper(seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = [value("x", 64)]
    block = []
    for i in range(8):
        sources = rng.choice(len(values), min(2, len(values)), replace=False)
        y = value(f"v{i}", int(rng.integers(1, 200)))
        block.append(node("Op", [values[j] for j in sources], y))
        values.append(y)
    fixed = {block[int(i)] for i in rng.choice(8, 2, replace=False)}
    wanted = {values[int(i)] for i in rng.choice(np.arange(1, 9), 3, replace=False)}

    def cost(chosen: set[ir.Value]) -> float:
        total = sum(4.0 * y.shape.numpy()[0] for y in chosen if y.shape)
        missing, done = [y for y in wanted if y not in chosen], set[ir.Value]()
        while missing:
            y = missing.pop()
            maker = y.producer()
            if y in done or maker is None:
                continue
            done.add(y)
            sources = [x for x in maker.inputs if x is not None and x.shape]
            read = max(4.0 * x.shape.numpy()[0] for x in sources if x.shape)
            total += math.inf if maker in fixed else read / REREAD_COST
            missing += [x for x in sources if x not in chosen]
        return total

    inner = values[1:]
    best = min(cost(set(chosen)) for k in range(9) for chosen in itertools.combinations(inner, k))
    by_cut = values_to_save(block, wanted, set(inner), lambda n: n not in fixed)
    assert cost(by_cut) == pytest.approx(best)
