"""Where the nodes of a pack come from: onnx's own node tests, and a few that it lacks."""

from __future__ import annotations

import dataclasses
import warnings

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.lowering.forms import default_of
from onnxtrain.lowering.probe.case import TYPES, Case, computed, of_proto

_RANDOM = frozenset(
    {
        *("Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform"),
        "RandomUniformLike",
    }
)
_LARGEST = 8192  # numbers in and out


def onnx_cases() -> list[Case]:
    """Return the node tests of the installed onnx that have one answer, small ones first."""
    state = np.random.get_state()
    np.random.seed(0)  # onnx draws the inputs from numpy's global generator
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # casts in onnx's own case files overflow on purpose
            from onnx.backend.test.loader import load_model_tests

            tests = [t for t in load_model_tests(kind="node") if t.data_sets]
    finally:
        np.random.set_state(state)
    cases = []
    for test in tests:
        assert test.model is not None
        assert test.data_sets is not None
        inputs, outputs = test.data_sets[0]
        case = of_proto(test.name, test.model, list(inputs), list(outputs))
        if case is not None and not _is_random(case) and case.elements <= _LARGEST:
            cases.append(_newest(case))
    return sorted(cases, key=lambda c: (c.is_empty, c.elements, c.name))


def _is_random(case: Case) -> bool:
    training = case.inputs[2:3] if case.op == "Dropout" else ()
    return case.op in _RANDOM or any(a is not None and bool(a) for a in training)


def _newest(case: Case) -> Case:
    """Return the case at the newest version of its operator, if that has the same signature."""
    newest = onnx.defs.onnx_opset_version()
    a, b = (S.schema_of(case.op, o) for o in (case.opset, newest))
    if a is None or b is None or a.since_version == b.since_version or b.deprecated:
        return case
    same = (len(a.inputs), len(a.outputs)) == (len(b.inputs), len(b.outputs))
    defaults = [{n: default_of(case.op, s.since_version, n) for n in s.attributes} for s in (a, b)]
    alike = same and defaults[0] == defaults[1]
    return dataclasses.replace(case, opset=b.since_version) if alike else case


def own_cases() -> list[Case]:
    """Return casts, activations, and layers of 1 to 3 dimensions for one picture and two."""
    cases = [*_casts(), *_activations()]
    for axes in (1, 2, 3):
        for batch in (1, 2):
            cases += _windows(axes, batch)
    return [c for c in map(_answered, cases) if c is not None]


def _last(op: str) -> int:
    """Return the newest version of an operator."""
    schema = S.schema_of(op, onnx.defs.onnx_opset_version())
    assert schema is not None
    return schema.since_version


def _casts() -> list[Case]:
    types = ("float", "int64", "int32", "bool", "double", "float16", "uint8")
    pairs = [(a, b) for a in types for b in types if a != b and {a, b} & {"float", "int64"}]
    x = np.asarray([[0, 1, 2], [3, 0, 5]])
    cases = []
    for a, b in pairs:
        given = x.astype(TYPES[a])
        wanted = given.astype(TYPES[b])
        to = {"to": int(ir.DataType[b.upper()])}
        cases.append(Case(f"cast_{a}_{b}", "Cast", _last("Cast"), (given,), (wanted,), to))
        like = np.ones(1, TYPES[b])
        cases.append(
            Case(f"cast_like_{a}_{b}", "CastLike", _last("CastLike"), (given, like), (wanted,))
        )
    return cases


def _activations() -> list[Case]:
    """Both sides of zero, and no default: onnx's own test of Celu has positive numbers only."""
    settings: dict[str, dict[str, float]] = {
        "Celu": {"alpha": 0.7},
        "Elu": {"alpha": 0.7},
        "HardSigmoid": {"alpha": 0.3, "beta": 0.4},
        "HardSwish": {},
        "LeakyRelu": {"alpha": 0.2},
        "Mish": {},
        "Selu": {"alpha": 1.2, "gamma": 0.9},
        "Shrink": {"lambd": 0.4, "bias": 0.2},
        "Softplus": {},
        "Softsign": {},
        "ThresholdedRelu": {"alpha": 0.5},
    }
    x = np.linspace(-4, 4, 12, dtype=np.float32).reshape(3, 4)
    cases = []
    for op, attributes in settings.items():
        name = f"{op.lower()}_both_sides"
        cases.append(Case(name, op, _last(op), (x,), (x,), dict(attributes)))
    return cases


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
