"""Gradients of Resize and MaxRoiPool that are refused, with their messages."""

from __future__ import annotations

import onnx
import pytest

import onnxtrain
from onnxtrain.errors import UndifferentiableError

HEADER = '<ir_version: 10, opset_import: ["" : 21]>\n'


def test_resize_with_half_pixel_symmetric_and_an_aspect_ratio_policy() -> None:
    model = onnx.parser.parse_model(
        HEADER
        + """g (float[1, 1, 5, 6] x) => (float[1, 1, h, w] y) <int64[2] sizes = {8, 11}>
        { y = Resize <axes = [2, 3], keep_aspect_ratio_policy = "not_larger",
            coordinate_transformation_mode = "half_pixel_symmetric", mode = "linear">
            (x, , , sizes) }"""
    )
    first_line = "no gradient of Resize with keep_aspect_ratio_policy and half_pixel_symmetric"
    with pytest.raises(UndifferentiableError, match=first_line):
        onnxtrain.vjp(model, ["x"])


def test_max_roi_pool_has_no_gradient_for_its_regions() -> None:
    model = onnx.parser.parse_model(
        HEADER
        + """g (float[1, 1, 5, 6] x, float[r, 5] rois) => (float[r, 1, 2, 2] y)
        { y = MaxRoiPool <pooled_shape = [2, 2]> (x, rois) }"""
    )
    assert onnxtrain.vjp(model, ["x"]).graph.output[-1].name == "x_grad"
    with pytest.raises(UndifferentiableError, match="no gradient for input 1 of node"):
        onnxtrain.vjp(model, ["x", "rois"])
