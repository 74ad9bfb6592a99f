"""Every form of a convolution's gradients gives torch's numbers, and one is always chosen."""

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


def _facts(case: OpCase) -> ConvShape:
    """What is known of the convolution, batch aside."""
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
    """Whether the result is known to be a plane of the size of ``x``, window by window."""
    plain = case.op == "Conv" and not {"strides", "dilations", "group"} & case.attrs.keys()
    before, after = np.array(case.attrs.get("pads", [0] * 4)).reshape(2, -1)
    return plain and len(x) == 4 and w[2] == w[3] > 1 and all(before + after == w[2] - 1)


def _check(case: OpCase, dynamic: str, module: ModuleType, chooser: str, form: str) -> None:
    given = [*feeds(case), *cotangents(case).values()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, chooser, lambda target, facts: form)
        model = onnxtrain.vjp(case.build(dynamic=dynamic), case.wrt)
    ours = stock(model)(given)
    oracle = oracle_of(case)
    assert oracle is not None
    theirs = oracle.backward(feeds(case), cotangents(case))
    assert_close(ours[1:], theirs, case.wrt, case.tol, case.name)


@pytest.mark.parametrize("dynamic", ["", "batch"])
@pytest.mark.parametrize(
    ("form", "case"),
    [
        pytest.param(form, case, id=f"{form}-{case.name}")
        for form in WEIGHT_GRAD_VARIANTS
        for case in CASES
        if WEIGHT_GRAD_VARIANTS[form].fits(_facts(case))
    ],
)
def test_weight_form_equals_torch(form: str, case: OpCase, dynamic: str) -> None:
    _check(case, dynamic, conv_weight, "choose", form)


@pytest.mark.parametrize("dynamic", ["", "batch"])
@pytest.mark.parametrize(
    ("form", "case"),
    [
        pytest.param(form, case, id=f"{form}-{case.name}")
        for form in conv_rule.INPUT_GRAD_VARIANTS
        for case in conv.CASES
        if conv_rule.INPUT_GRAD_VARIANTS[form].fits(_facts(case))
    ],
)
def test_input_form_equals_torch(form: str, case: OpCase, dynamic: str) -> None:
    _check(case, dynamic, conv_rule, "choose_input", form)


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_has_a_form_for_anything(target: str) -> None:
    for taps in (None, 1, 9, 65):
        for strided in (False, True):
            for channels, outs, group in ((None, None, 1), (1, 1, 8), (1, 2, 8), (32, 32, 1)):
                for positions in (None, 16, 10_000):
                    facts = ConvShape(taps, strided, channels, outs, group, positions, positions)
                    assert WEIGHT_GRAD_VARIANTS[choose(find(target), facts)].fits(facts)


def test_forms_that_spell_out_taps_are_not_chosen_without_a_kernel() -> None:
    unknown = ConvShape(taps=None, strided=False, channels=None, outs=None, group=1)
    assert {choose(t, unknown) for t in TARGETS.values()} <= {"lifted", "swapped"}


@pytest.mark.parametrize(
    ("positions", "outs", "can_use_col2im", "form"),
    [
        (16, 8, True, "columns"),
        (17, 255, True, "transposed"),
        (49, 256, True, "columns"),
        (50, 256, True, "transposed"),
        (16, 256, False, "transposed"),
        (None, 256, True, "transposed"),
    ],
)
def test_small_images_have_their_own_form_of_the_input_gradient_on_cpu(
    positions: int | None, outs: int, can_use_col2im: bool, form: str
) -> None:
    facts = ConvShape(9, False, 32, outs, 1, positions, positions, can_use_col2im=can_use_col2im)
    assert conv_rule.choose_input(find("cpu"), facts) == form
    others = {n: conv_rule.choose_input(t, facts) for n, t in TARGETS.items() if n != "cpu"}
    lacking = {n for n, t in TARGETS.items() if t.lacks("ConvTranspose.asymmetric_pads")}
    assert lacking == {"cuda"}
    assert {n for n, form in others.items() if form == "symmetric"} == lacking
    assert {form for n, form in others.items() if n not in lacking} == {"transposed"}


@pytest.mark.parametrize(
    ("facts", "form"),
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
def test_small_and_strided_images_have_columns_on_cpu(facts: ConvShape, form: str) -> None:
    assert choose(find("cpu"), facts) == form


@pytest.mark.parametrize(
    ("facts", "form"),
    [
        (ConvShape(9, False, 64, 64, 1, 3136, 3136, shiftable=True), "shifts"),
        (ConvShape(9, True, 64, 64, 1, 3136, 784), "tap_columns"),
        (ConvShape(9, False, 3, 64, 1, 3136, 3136, shiftable=True), "im2col"),
        (ConvShape(1, False, 64, 256, 1, 3136, 3136), "im2col"),
        (ConvShape(1, False, 1024, 256, 1, 196, 196), "tap_columns"),
        (ConvShape(1, False, 256, 1024, 1, 196, 196), "merged"),
    ],
)
def test_weight_gradients_on_gpus(facts: ConvShape, form: str) -> None:
    assert choose(find("cuda"), facts) == form


@pytest.mark.parametrize(
    ("kernel", "size", "stride"), [(7, 56, 1), (3, 56, 1), (3, 112, 2), (5, 40, 1)]
)
def test_large_depthwise_kernels_can_be_recorded_on_a_gpu(
    kernel: int, size: int, stride: int
) -> None:
    """One slice per row of the kernel: a Concat of all taps would be too long to record."""
    channels, half = 2, kernel // 2
    attributes = f"kernel_shape=[{kernel},{kernel}], pads=[{half},{half},{half},{half}]"
    text = f"""<ir_version: 10, opset_import: ["": 21]>
    g (float[2,{channels},{size},{size}] x, float[{channels},1,{kernel},{kernel}] w)
      => (float[2,{channels},{size // stride},{size // stride}] y) {{
        y = Conv<{attributes}, group={channels}, strides=[{stride},{stride}]>(x, w)
    }}"""
    made = onnxtrain.vjp(onnx.parser.parse_model(text), ["w"], target="cuda")
    joined = [len(n.input) for n in made.graph.node if n.op_type == "Concat"]
    assert max(joined, default=0) <= kernel < T.CUDA_GRAPH_CONCAT_INPUTS
    assert sum(n.op_type == "Slice" for n in made.graph.node) <= kernel
    random = np.random.default_rng(0)
    shapes = [d.type.tensor_type.shape.dim for d in made.graph.input]
    given = [random.standard_normal([d.dim_value for d in s]).astype(np.float32) for s in shapes]
    x, w = (torch.from_numpy(v).requires_grad_() for v in given[:2])
    y = torch.nn.functional.conv2d(x, w, None, stride, half, 1, channels)
    y.backward(torch.from_numpy(given[2]))
    assert w.grad is not None
    np.testing.assert_allclose(stock(made)(given)[1], w.grad.numpy(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("outs", "copied"), [(4, 4), (16, 12)])
def test_windows_are_copied_from_the_narrower_side_on_a_gpu(outs: int, copied: int) -> None:
    text = f"""<ir_version: 10, opset_import: ["": 21]>
    g (float[2,12,9,7] x, float[{outs},12,3,3] w) => (float[2,{outs},9,7] y) {{
        y = Conv<kernel_shape=[3,3], pads=[1,1,1,1]>(x, w)
    }}"""
    made = onnxtrain.vjp(onnx.parser.parse_model(text), ["w"], target="cuda")
    known = onnx.shape_inference.infer_shapes(made).graph.value_info
    shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in known}
    gathers = [n.output[0] for n in made.graph.node if n.op_type == "Gather"]
    assert [shapes[name][-1] for name in gathers] == [copied]
