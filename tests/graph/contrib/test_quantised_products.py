"""Products with packed weights mean what the kernels compute; the weights stay narrow."""

from __future__ import annotations

import numpy as np
import pytest

import onnxtrain
from onnxtrain.errors import PrepareError
from tests.graph.contrib.fused_case import Case, normal

N, K = 6, 96
RNG = np.random.default_rng(1)


def nbits(bits, block, *, k=K, points=None, group=False, bias=False):
    blocks = -(-k // block)
    packed = RNG.integers(0, 256, (N, blocks, block * bits // 8)).astype(np.uint8)
    scales = (0.1 + RNG.random(N * blocks)).astype(np.float32) / (1 << bits)
    zeros = None
    if points == "packed":
        zeros = RNG.integers(0, 256, N * -(-blocks * bits // 8)).astype(np.uint8)
    elif points == "float":
        zeros = (RNG.random((N, blocks)) * (1 << bits)).astype(np.float32)
    inputs = [normal(3, k), packed, scales, zeros]
    inputs.append(
        np.repeat(np.arange(blocks, dtype=np.int32), block)[:k][::-1].copy() if group else None
    )
    inputs.append(normal(N) if bias else None)
    return Case(
        "MatMulNBits",
        inputs,
        {"K": k, "N": N, "bits": bits, "block_size": block},
        constants=(1, 2, 3, 4),
        rtol=1e-4,
        atol=1e-4,
        precision=np.float32,
        fixed=(2, 3),
    )


CASES = {
    f"{bits} bits, blocks of {block}, {points or 'no'} points": nbits(bits, block, points=points)
    for bits in (2, 4, 8)
    for block in (16, 32)
    for points in (None, "packed", "float")
    if not (bits == 8 and points == "float")
}
CASES["a short last block"] = nbits(4, 32, k=80, points="packed")
CASES["groups"] = nbits(4, 32, group=True)
CASES["groups, float points"] = nbits(4, 32, points="float", group=True)
CASES["bias"] = nbits(4, 32, bias=True)


def bnb4(kind):
    packed = RNG.integers(0, 256, N * 64 // 2).astype(np.uint8)
    absmax = (0.1 + RNG.random(N * 64 // 32)).astype(np.float32)
    return Case(
        "MatMulBnb4",
        [normal(3, 64), packed, absmax],
        {"K": 64, "N": N, "block_size": 32, "quant_type": kind},
        constants=(1, 2),
        rtol=1e-4,
        atol=1e-4,
        precision=np.float32,
        fixed=(2,),
    )


CASES["fp4"], CASES["nf4"] = bnb4(0), bnb4(1)


def rows(bits, points=False, table=(12, 64)):
    packed = RNG.integers(0, 256, (table[0], table[1] * bits // 8)).astype(np.uint8)
    blocks = table[1] // 32
    scales = (0.1 + RNG.random((table[0], blocks))).astype(np.float32)
    zeros = RNG.integers(0, 256, (table[0], -(-blocks * bits // 8))).astype(np.uint8)
    return Case(
        "GatherBlockQuantized",
        [packed, np.array([[1, 3], [11, 0]]), scales, zeros if points else None],
        {"bits": bits, "block_size": 32},
        constants=(0, 2, 3),
        precision=np.float32,
    )


for _bits in (4, 8):
    CASES[f"rows of {_bits} bits"] = rows(_bits)
    CASES[f"rows of {_bits} bits, points"] = rows(_bits, True)


@pytest.mark.parametrize("name", CASES)
def test_equals_the_kernel(name: str) -> None:
    CASES[name].check_forward()


@pytest.mark.parametrize("name", CASES)
def test_gradient_equals_finite_differences(name: str) -> None:
    CASES[name].check_gradient()


def test_groups_with_packed_points_are_refused() -> None:
    """The kernel reads the points in an order of its own there."""
    with pytest.raises(PrepareError, match="groups of columns together with packed zero points"):
        onnxtrain.vjp(nbits(4, 32, points="packed", group=True).model(), "x0")
