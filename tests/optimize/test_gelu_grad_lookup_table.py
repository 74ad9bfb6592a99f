"""gelu_grad_lookup_table: within one rounding of the exact derivative everywhere."""

from __future__ import annotations

import functools

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import parser

import onnxtrain
from onnxtrain import thresholds
from onnxtrain.autodiff import gradients
from onnxtrain.autodiff.rules import activations
from onnxtrain.modes import mixed_precision
from onnxtrain.optimize import pipeline
from onnxtrain.targets import TARGETS
from tests.emulated_bfloat16 import emulated

BFLOAT16 = ml_dtypes.bfloat16
KINDS = ["tanh", "none"]


def every_bfloat16() -> np.ndarray:
    """Return all finite numbers of 16 bits."""
    numbers = np.arange(1 << 16, dtype=np.uint16).view(BFLOAT16)
    return numbers[np.isfinite(numbers.astype(np.float32))]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thresholds, "MEMORY_BOUND_ELEMENTS", 1)


@pytest.fixture
def nobody_differentiates_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let gradients be finished as those of artifacts are."""
    final = functools.partial(pipeline.rewrite_final, last=True)
    monkeypatch.setattr(gradients, "rewrite_final", final)


def gradient(kind: str, size: int, half: int = onnx.TensorProto.BFLOAT16) -> onnx.ModelProto:
    """Return the gradient of a GELU in 16 bits for CUDA."""
    text = f"""<ir_version: 10, opset_import: ["": 21]>
    g (float[{size}] x) => (float[{size}] y) {{
        h = Cast<to={half}>(x) a = Gelu<approximate="{kind}">(h) y = Cast<to=1>(a)
    }}"""
    return onnxtrain.vjp(parser.parse_model(text), wrt=["x"], target="cuda")


def kinds_of(model: onnx.ModelProto) -> set[str]:
    return {n.op_type for n in model.graph.node}


def derivatives(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    """Return the gradient for ones, computed as kernels of bfloat16 do."""
    options = ort.SessionOptions()
    # Two casts in a row are one to an optimizer.
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(emulated(model).SerializeToString(), options)
    feeds = {i.name: np.ones(len(x), np.float32) for i in session.get_inputs()}
    feeds["x"] = x.astype(np.float32)
    (dx,) = session.run(["x_grad"], feeds)
    return np.asarray(dx, np.float64)


def exact(kind: str, x: np.ndarray) -> np.ndarray:
    at = torch.tensor(x.astype(np.float64), requires_grad=True)
    torch.nn.functional.gelu(at, approximate=kind).sum().backward()
    assert at.grad is not None
    return at.grad.numpy()


@pytest.mark.parametrize("kind", KINDS)
def test_every_bfloat16_has_its_derivative(kind: str, request: pytest.FixtureRequest) -> None:
    x = every_bfloat16()
    plain = gradient(kind, len(x))
    request.getfixturevalue("nobody_differentiates_again")
    table = gradient(kind, len(x))
    assert "Gather" in kinds_of(table)
    assert not {"Sigmoid", "Erf", "Exp"} & kinds_of(table)
    wanted, actual = exact(kind, x), derivatives(table, x)
    defined = np.isfinite(wanted)  # torch overflows where x^3 does
    error, before = (abs(s - wanted)[defined] for s in (actual, derivatives(plain, x)))
    assert error.max() <= 0.5 * 2.0**-7 + 1e-4  # half of what lies between numbers from 1 to 2
    large = defined & (abs(x.astype(np.float64)) >= 1 / 16) & (abs(x.astype(np.float64)) < 7)
    rounded = wanted[large].astype(BFLOAT16).astype(np.float64)
    np.testing.assert_allclose(actual[large], rounded, rtol=2.0**-8, atol=1e-12)
    assert error.max() <= np.nanmax(before)
    assert error.mean() < np.nanmean(before)


@pytest.mark.parametrize("kind", KINDS)
def test_no_table_in_graphs_that_may_be_differentiated_again(kind: str) -> None:
    assert "Gather" not in kinds_of(gradient(kind, 8))


@pytest.mark.usefixtures("nobody_differentiates_again")
def test_small_tensors_and_other_types_have_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Gather" in kinds_of(gradient("tanh", 8))
    for half in (onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT):
        assert "Gather" not in kinds_of(gradient("tanh", 8, half))
    monkeypatch.setattr(thresholds, "MEMORY_BOUND_ELEMENTS", 9)
    assert "Gather" not in kinds_of(gradient("tanh", 8))


@pytest.mark.usefixtures("nobody_differentiates_again")
def test_a_marked_value_that_is_not_gelu_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Gelu that a derivative is one of must be there, and of the same kind."""
    monkeypatch.setattr(activations, "GELU_TANH_DERIVATIVE", mixed_precision.TWICE_GELU_DERIVATIVE)
    assert "Gather" not in kinds_of(gradient("tanh", 8))


def test_only_targets_with_the_preference() -> None:
    assert [t for t, v in TARGETS.items() if v.prefers("gelu-grad-lookup-table")] == ["cuda"]
