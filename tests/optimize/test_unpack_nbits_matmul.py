"""unpack_nbits_matmul: equal values, and one layer is unpacked at a time."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx
import onnxruntime
import pytest

import onnxtrain
from onnxtrain.targets import TARGETS
from tests.graph.contrib.fused_case import Case, normal
from tests.graph.contrib.test_quantized_matmul import CASES, nbits, operators

PARTS = sorted(n for n in CASES if "bits, blocks of" in n and "float" not in n)
OWN = {"MatMulNBits", "GatherBlockQuantized"}


def gradients(case: Case, target: str) -> tuple[onnx.ModelProto, list[np.ndarray]]:
    """Return the model of ``x0``'s gradient for a target, and what it gives for one direction."""
    model = onnxtrain.vjp(case.model(), "x0", target=target)
    feeds = case.feeds()
    feeds["y_grad"] = normal(*feeds["x0"].shape[:-1], case.attributes["N"])
    session = onnxruntime.InferenceSession(model.SerializeToString())
    return model, [np.asarray(a) for a in session.run(["y", "x0_grad"], feeds)]


def of_rank_three(case: Case) -> Case:
    return dataclasses.replace(case, inputs=[normal(2, 5, case.attributes["K"]), *case.inputs[1:]])


@pytest.mark.parametrize("symbolic", [True, False])
@pytest.mark.parametrize("opset", [17, 21])
@pytest.mark.parametrize("name", [*PARTS, "bias"])
def test_values_and_gradients_equal_the_kernel(name: str, opset: int, symbolic: bool):
    for case in (CASES[name], of_rank_three(CASES[name])):
        case = dataclasses.replace(case, opset=opset, symbolic=symbolic)
        model, got = gradients(case, "wasm")
        assert not OWN & operators(model).keys()
        _, want = gradients(case, "cpu")
        for a, b in zip(want, got, strict=True):
            assert np.abs(a - b).max() < 2e-6 * np.abs(a).max()


def test_the_cpu_keeps_its_kernels() -> None:
    model, _ = gradients(CASES["4 bits, blocks of 32, no points"], "cpu")
    assert operators(model).keys() >= OWN


@pytest.mark.parametrize("name", ["a short last block", "groups"])
def test_other_layouts_stay(name: str) -> None:
    _, got = gradients(CASES[name], "wasm")
    _, want = gradients(CASES[name], "cpu")
    for a, b in zip(want, got, strict=True):
        assert np.abs(a - b).max() < 2e-6 * np.abs(a).max()


@pytest.mark.parametrize("symbolic", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_each_matmul_unpacks_after_its_operand(bits: int, symbolic: bool) -> None:
    """What reads constants only would be run at the start, for all layers at once."""
    case = dataclasses.replace(nbits(bits, 32), symbolic=symbolic)
    graph = gradients(case, "wasm")[0].graph
    makers = {y: n for n in graph.node for y in n.output}
    kinds = ("DequantizeLinear", "BitwiseAnd")
    unpacking = [n for n in graph.node if n.op_type in kinds]
    waits = []
    for node in unpacking:
        pending, seen = list(node.input), set()
        while pending:
            name = pending.pop()
            seen.add(name)
            pending += makers[name].input if name in makers else []
        waits.append(frozenset(seen & {"x0", "y_grad"}))
    assert set(waits) == {frozenset({"x0"}), frozenset({"y_grad"})}


def test_few_operators_per_position_of_a_byte() -> None:
    """Twice the weights, in two places each: four masks, four scalings."""
    counts = operators(gradients(CASES["4 bits, blocks of 32, no points"], "wasm")[0])
    assert (counts["BitShift"], counts["BitwiseAnd"], counts["DequantizeLinear"]) == (0, 4, 4)


def test_only_wasm_has_the_preference() -> None:
    assert [n for n, t in TARGETS.items() if t.prefers("unpack-nbits-weights")] == ["wasm"]
