"""Every variant of a convolution's gradients equals torch, and every target selects one."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import onnx
import onnx.parser
import pytest
import torch

import onnxtrain
from onnxtrain import thresholds as T
from onnxtrain.autodiff.rules import conv as conv_rule
from onnxtrain.autodiff.rules import conv_weight
from onnxtrain.autodiff.rules.conv_weight import WEIGHT_GRAD_VARIANTS, choose
from onnxtrain.graph.windows import ConvShape
from onnxtrain.targets import TARGETS, find
from tests.cases import conv, conv_transpose
from tests.cases.base import OpCase
from tests.cases.checks import cotangents, feeds
from tests.cases.evaluate import assert_close, oracle_of, stock

CASES = [*conv.CASES, *conv_transpose.CASES]


def _conv_shape(case: OpCase) -> ConvShape:
    """Return the static facts about a convolution, with an unknown batch."""
    x, w = case.values()[:2]
    assert x is not None
    assert w is not None
    group, strides = case.attrs.get("group", 1), case.attrs.get("strides", [1])
    taps, channels = w[0, 0].size, w.shape[1]
    strided = any(s != 1 for s in strides)
    return ConvShape(
        taps,
        strided,
        channels,
        w.shape[0] // group,
        group,
        image=x[0, 0].size,
        positions=1,
        overpadded="overpadded" in case.name,
        can_use_col2im=group == 1 and x.ndim == 4,
        shiftable=_is_shiftable(case, x.shape, w.shape),
        line_pairs=x.shape[-1] if x.ndim > 3 else None,
    )


def _is_shiftable(case: OpCase, x: tuple[int, ...], w: tuple[int, ...]) -> bool:
    """Return whether the convolution is dense with stride 1 and keeps the spatial size of ``x``."""
    plain = case.op == "Conv" and not {"strides", "dilations", "group"} & case.attrs.keys()
    before, after = np.array(case.attrs.get("pads", [0] * 4)).reshape(2, -1)
    return plain and len(x) == 4 and w[2] == w[3] > 1 and all(before + after == w[2] - 1)


def _check(case: OpCase, dynamic: str, module: ModuleType, chooser: str, variant: str) -> None:
    inputs = [*feeds(case), *cotangents(case).values()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, chooser, lambda target, shape: variant)
        model = onnxtrain.vjp(case.build(dynamic=dynamic), case.wrt)
    actual = stock(model)(inputs)
    oracle = oracle_of(case)
    assert oracle is not None
    expected = oracle.backward(feeds(case), cotangents(case))
    assert_close(actual[1:], expected, case.wrt, case.tol, case.name)


@pytest.mark.parametrize("dynamic", ["", "batch"])
@pytest.mark.parametrize(
    ("variant", "case"),
    [
        pytest.param(variant, case, id=f"{variant}-{case.name}")
        for variant in WEIGHT_GRAD_VARIANTS
        for case in CASES
        if WEIGHT_GRAD_VARIANTS[variant].fits(_conv_shape(case))
    ],
)
def test_weight_grad_variant_equals_torch(variant: str, case: OpCase, dynamic: str) -> None:
    _check(case, dynamic, conv_weight, "choose", variant)


@pytest.mark.parametrize("dynamic", ["", "batch"])
@pytest.mark.parametrize(
    ("variant", "case"),
    [
        pytest.param(variant, case, id=f"{variant}-{case.name}")
        for variant in conv_rule.INPUT_GRAD_VARIANTS
        for case in conv.CASES
        if conv_rule.INPUT_GRAD_VARIANTS[variant].fits(_conv_shape(case))
    ],
)
def test_input_grad_variant_equals_torch(variant: str, case: OpCase, dynamic: str) -> None:
    _check(case, dynamic, conv_rule, "choose_input", variant)


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_selects_a_variant_for_any_shape(target: str) -> None:
    for taps in (None, 1, 9, 65):
        for strided in (False, True):
            for channels, outs, group in ((None, None, 1), (1, 1, 8), (1, 2, 8), (32, 32, 1)):
                for positions in (None, 16, 10_000):
                    shape = ConvShape(taps, strided, channels, outs, group, positions, positions)
                    assert WEIGHT_GRAD_VARIANTS[choose(find(target), shape)].fits(shape)


def test_variants_per_tap_are_not_selected_for_an_unknown_kernel() -> None:
    unknown = ConvShape(taps=None, strided=False, channels=None, outs=None, group=1)
    assert {choose(t, unknown) for t in TARGETS.values()} <= {"lifted", "swapped"}


@pytest.mark.parametrize(
    ("positions", "outs", "can_use_col2im", "variant"),
    [
        (16, 8, True, "columns"),
        (17, 255, True, "transposed"),
        (49, 256, True, "columns"),
        (50, 256, True, "transposed"),
        (16, 256, False, "transposed"),
        (None, 256, True, "transposed"),
    ],
)
def test_input_grad_variant_by_image_size_on_cpu(
    positions: int | None, outs: int, can_use_col2im: bool, variant: str
) -> None:
    shape = ConvShape(9, False, 32, outs, 1, positions, positions, can_use_col2im=can_use_col2im)
    assert conv_rule.choose_input(find("cpu"), shape) == variant
    others = {n: conv_rule.choose_input(t, shape) for n, t in TARGETS.items() if n != "cpu"}
    lacking = {n for n, t in TARGETS.items() if t.lacks("ConvTranspose.asymmetric_pads")}
    assert lacking == {"cuda"}
    assert {n for n, other in others.items() if other == "symmetric"} == lacking
    assert {other for n, other in others.items() if n not in lacking} == {"transposed"}


@pytest.mark.parametrize(
    ("shape", "variant"),
    [
        (ConvShape(9, False, 32, 32, 1, 8, 8), "columns"),
        (ConvShape(9, False, 32, 32, 1, 16, 16, rows=512), "columns"),
        (ConvShape(9, False, 32, 32, 1, 16, 16, rows=513), "tap_columns"),
        (ConvShape(9, False, 32, 32, 1, 64, 64), "tap_columns"),
        (ConvShape(9, False, 32, 32, 1, 81, 81), "merged"),
        (ConvShape(9, True, 32, 32, 1, 400, 100), "tap_columns"),
        (ConvShape(9, True, 32, 32, 1, None, None), "merged"),
        (ConvShape(1, False, 32, 32, 1, 16, 16, rows=32), "tap_columns"),
        (ConvShape(1, False, 32, 32, 1, 64, 64), "im2col"),
    ],
)
def test_weight_grad_variant_on_cpu(shape: ConvShape, variant: str) -> None:
    assert choose(find("cpu"), shape) == variant


@pytest.mark.parametrize(
    ("shape", "variant"),
    [
        (ConvShape(9, False, 64, 64, 1, 3136, 3136, shiftable=True), "shifts"),
        (ConvShape(9, True, 64, 64, 1, 3136, 784), "tap_columns"),
        (ConvShape(9, False, 3, 64, 1, 3136, 3136, shiftable=True), "im2col"),
        (ConvShape(1, False, 64, 256, 1, 3136, 3136), "im2col"),
        (ConvShape(1, False, 1024, 256, 1, 196, 196), "tap_columns"),
        (ConvShape(1, False, 256, 1024, 1, 196, 196), "merged"),
    ],
)
def test_weight_grad_variant_on_cuda(shape: ConvShape, variant: str) -> None:
    assert choose(find("cuda"), shape) == variant


@pytest.mark.parametrize(
    ("kernel", "size", "stride"), [(7, 56, 1), (3, 56, 1), (3, 112, 2), (5, 40, 1)]
)
def test_depthwise_weight_grad_fits_a_cuda_graph(kernel: int, size: int, stride: int) -> None:
    """One Slice per kernel row: CUDA graphs cannot capture a Concat of all taps."""
    channels, half = 2, kernel // 2
    attributes = f"kernel_shape=[{kernel},{kernel}], pads=[{half},{half},{half},{half}]"
    text = f"""<ir_version: 10, opset_import: ["": 21]>
    g (float[2,{channels},{size},{size}] x, float[{channels},1,{kernel},{kernel}] w)
      => (float[2,{channels},{size // stride},{size // stride}] y) {{
        y = Conv<{attributes}, group={channels}, strides=[{stride},{stride}]>(x, w)
    }}"""
    vjp = onnxtrain.vjp(onnx.parser.parse_model(text), ["w"], target="cuda")
    concat_inputs = [len(n.input) for n in vjp.graph.node if n.op_type == "Concat"]
    assert max(concat_inputs, default=0) <= kernel < T.CUDA_GRAPH_CONCAT_INPUTS
    assert sum(n.op_type == "Slice" for n in vjp.graph.node) <= kernel
    random = np.random.default_rng(0)
    shapes = [d.type.tensor_type.shape.dim for d in vjp.graph.input]
    inputs = [random.standard_normal([d.dim_value for d in s]).astype(np.float32) for s in shapes]
    x, w = (torch.from_numpy(v).requires_grad_() for v in inputs[:2])
    y = torch.nn.functional.conv2d(x, w, None, stride, half, 1, channels)
    y.backward(torch.from_numpy(inputs[2]))
    assert w.grad is not None
    np.testing.assert_allclose(stock(vjp)(inputs)[1], w.grad.numpy(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("outs", "copied"), [(4, 4), (16, 12)])
def test_weight_grad_gathers_windows_of_the_side_with_fewer_channels_on_cuda(
    outs: int, copied: int
) -> None:
    text = f"""<ir_version: 10, opset_import: ["": 21]>
    g (float[2,12,9,7] x, float[{outs},12,3,3] w) => (float[2,{outs},9,7] y) {{
        y = Conv<kernel_shape=[3,3], pads=[1,1,1,1]>(x, w)
    }}"""
    vjp = onnxtrain.vjp(onnx.parser.parse_model(text), ["w"], target="cuda")
    value_info = onnx.shape_inference.infer_shapes(vjp).graph.value_info
    shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in value_info}
    gathers = [n.output[0] for n in vjp.graph.node if n.op_type == "Gather"]
    assert [shapes[name][-1] for name in gathers] == [copied]
