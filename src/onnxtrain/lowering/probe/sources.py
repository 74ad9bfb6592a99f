"""Where the nodes of a pack come from: onnx's own node tests, and a few that it lacks."""

from __future__ import annotations

import dataclasses
import warnings

import numpy as np

from onnxtrain.lowering.probe.case import Case, computed, of_proto

_RANDOM = frozenset(
    {
        *("Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform"),
        "RandomUniformLike",
    }
)
_LARGEST = 4096  # numbers in and out


def onnx_cases() -> list[Case]:
    """Give the node tests of the installed onnx that have one answer, small ones first."""
    state = np.random.get_state()
    np.random.seed(0)  # onnx draws the inputs from numpy's global generator
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # casts in onnx's own case files overflow on purpose
            from onnx.backend.test.loader import load_model_tests

            tests = [t for t in load_model_tests(kind="node") if t.data_sets]
    finally:
        np.random.set_state(state)
    found = []
    for test in tests:
        assert test.model is not None
        case = of_proto(test.name, test.model, *test.data_sets[0])
        if case is not None and not _is_random(case) and case.elements <= _LARGEST:
            found.append(case)
    return sorted(found, key=lambda c: (c.is_empty, c.elements, c.name))


def _is_random(case: Case) -> bool:
    draws = case.op == "Dropout" and len(case.inputs) > 2 and case.inputs[2] is not None
    return case.op in _RANDOM or (draws and bool(case.inputs[2]))


def own_cases() -> list[Case]:
    """Give convolutions and pooling of one, two and three dimensions, for one picture and two."""
    found = []
    for axes in (1, 2, 3):
        for batch in (1, 2):
            found += _windows(axes, batch)
    return [c for c in map(_answered, found) if c is not None]


def _windows(axes: int, batch: int) -> list[Case]:
    rng = np.random.default_rng(axes)
    name = f"{axes}d_batch{batch}"

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    sides = (5, 4, 3)[:axes]
    x, weight, bias = draw(batch, 2, *sides), draw(3, 2, *(2,) * axes), draw(3)
    kernel = {"kernel_shape": [2] * axes}
    ones = np.ones(2, np.float32)
    return [
        Case(f"conv_{name}", "Conv", 22, (x, weight, bias), (x,), kernel, frozenset({1, 2})),
        Case(
            f"conv_transpose_{name}",
            "ConvTranspose",
            22,
            (x, draw(2, 3, *(2,) * axes), bias),
            (x,),
            kernel,
            frozenset({1, 2}),
        ),
        Case(f"max_pool_{name}", "MaxPool", 22, (x,), (x,), kernel),
        Case(f"average_pool_{name}", "AveragePool", 22, (x,), (x,), kernel),
        Case(f"global_average_pool_{name}", "GlobalAveragePool", 22, (x,), (x,)),
        Case(
            f"instance_normalization_{name}",
            "InstanceNormalization",
            22,
            (x, ones, draw(2)),
            (x,),
            {},
            frozenset({1, 2}),
        ),
        Case(
            f"batch_normalization_{name}",
            "BatchNormalization",
            15,
            (x, draw(2), draw(2), draw(2), ones),
            (x,),
            {},
            frozenset({1, 2, 3, 4}),
        ),
    ]


def _answered(case: Case) -> Case | None:
    outputs = computed(case)
    return None if outputs is None else dataclasses.replace(case, outputs=outputs)
