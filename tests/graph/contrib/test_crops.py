"""CropAndResize agrees with onnxruntime's kernel."""

from __future__ import annotations

import numpy as np
import pytest

import onnxtrain
from onnxtrain.errors import PrepareError
from tests.graph.contrib.fused_case import Case, normal

BOXES = np.array([[0.13, 0.22, 0.71, 0.93], [0.83, 0.05, 0.31, 0.57], [-0.17, 0.41, 0.63, 1.27]])
EDGES = np.array([[0.0, 0.0, 1.0, 1.0], [0.5, 0.5, 0.5, 0.5], [1.0, 1.0, 0.0, 0.0]])


def crops(boxes=BOXES, size=(3, 4), image=(2, 2, 6, 5), fixed=(), constants=(3,), **attributes):
    inputs = [
        normal(*image),
        boxes.astype(np.float32),
        np.array([0, 1, 0], np.int32),
        np.array(size, np.int32),
    ]
    return Case(
        "CropAndResize", inputs, attributes, constants=constants, fixed=fixed, symbolic=False
    )


CASES = {
    "bilinear": crops(),
    "another value outside": crops(extrapolation_value=-1.5),
    "one row": crops(size=(1, 4)),
    "one pixel": crops(size=(1, 1)),
    "nearest": crops(mode="nearest", fixed=(1,)),
    "an image of one row": crops(image=(2, 3, 1, 5)),
    "corners": crops(EDGES, fixed=(1,)),
    "nearest, corners": crops(EDGES, mode="nearest", fixed=(1,)),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_kernel(name: str) -> None:
    CASES[name].check_forward()


@pytest.mark.parametrize("name", CASES)
def test_gradient_equals_finite_differences(name: str) -> None:
    CASES[name].check_gradient()


def test_computed_size_raises() -> None:
    with pytest.raises(PrepareError, match="crop_size must be constant"):
        onnxtrain.vjp(crops(constants=()).model(), "x0")
