"""Probe cases: onnx's node tests, extra cases, and variants of both.

The variants store weights as initializers or feed them, and use other types and ranks.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.lowering.opset_converters import default_of
from onnxtrain.lowering.probe.case import NAMES, TYPES, Case, case_from_proto, reference_outputs

_RANDOM = frozenset(
    {
        *("Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform"),
        "RandomUniformLike",
    }
)
_LARGEST = 8192  # elements of all inputs and outputs


def onnx_cases() -> list[Case]:
    """Return the deterministic node tests of the installed onnx, smallest first."""
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
        case = case_from_proto(test.name, test.model, list(inputs), list(outputs))
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
    same_arity = (len(a.inputs), len(a.outputs)) == (len(b.inputs), len(b.outputs))
    defaults = [{n: default_of(case.op, s.since_version, n) for n in s.attributes} for s in (a, b)]
    compatible = same_arity and defaults[0] == defaults[1]
    return dataclasses.replace(case, opset=b.since_version) if compatible else case


def extra_cases() -> list[Case]:
    """Return casts, activations, and layers of 1 to 3 dimensions at batch 1 and 2."""
    cases = [*_casts(), *_activations()]
    for axes in (1, 2, 3):
        for batch in (1, 2):
            cases += _windows(axes, batch)
    return [c for c in map(_with_expected_outputs, cases) if c is not None]


def _newest_version(op: str) -> int:
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
        source = x.astype(TYPES[a])
        expected = source.astype(TYPES[b])
        to = {"to": int(ir.DataType[b.upper()])}
        cases.append(
            Case(f"cast_{a}_{b}", "Cast", _newest_version("Cast"), (source,), (expected,), to)
        )
        like = np.ones(1, TYPES[b])
        cases.append(
            Case(
                f"cast_like_{a}_{b}",
                "CastLike",
                _newest_version("CastLike"),
                (source, like),
                (expected,),
            )
        )
    return cases


def _activations() -> list[Case]:
    """Return activations on both sides of zero, with non-default attributes.

    onnx's own tests evaluate Celu above 0 only.
    """
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
        cases.append(Case(name, op, _newest_version(op), (x,), (x,), dict(attributes)))
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


def _with_expected_outputs(case: Case) -> Case | None:
    outputs = reference_outputs(case)
    return None if outputs is None else dataclasses.replace(case, outputs=outputs)


# Inputs that models store rather than receive as data, by their names in the ONNX schemas.
_PARAMETERS = frozenset(
    {
        *("axes", "axis", "constant_value", "depth", "dft_length", "ends", "frame_length"),
        *("frame_step", "image_shape", "block_shape", "k", "max", "min", "output_shape", "pads"),
        *("ratio", "repeats", "roi", "scales", "shape", "size", "sizes", "split", "starts"),
        *("steps", "target_shape", "training_mode", "window"),
    }
)
_WEIGHTS = {
    **dict.fromkeys(("Conv", "ConvTranspose", "Gemm", "InstanceNormalization"), (1, 2)),
    **dict.fromkeys(("LayerNormalization", "GroupNormalization", "RMSNormalization"), (1, 2)),
    **dict.fromkeys(("LSTM", "GRU", "RNN"), (1, 2, 3, 7)),
    **dict.fromkeys(("QuantizeLinear", "DequantizeLinear"), (1, 2)),
    **dict.fromkeys(("QLinearConv", "QLinearMatMul"), tuple(range(1, 9))),
    "BatchNormalization": (1, 2, 3, 4),
    "DeformConv": (1, 3),
    "PRelu": (1,),
}
_OTHER_TYPES = ("int64", "int32", "bool", "double", "float16", "uint8")
_POSITIVE = frozenset({"Div", "Mod", "Pow", "BitShift", "Reciprocal", "Sqrt", "Log"})


def with_stored_weights(case: Case) -> Case:
    """Return the case with weights and parameters as initializers."""
    schema = S.schema_of(case.op, case.opset)
    if schema is None or case.stored:
        return case
    stored = set(_WEIGHTS.get(case.op, ()))
    for i, formal in enumerate(schema.inputs):
        if formal.name in _PARAMETERS:
            stored.add(i)
    present = {i for i, a in enumerate(case.inputs) if a is not None}
    stored &= present
    if stored == present:
        stored.discard(0)  # a model needs an input
    return dataclasses.replace(case, stored=frozenset(stored))


def with_fed_weights(case: Case) -> Case | None:
    """Return the case with all inputs fed, or ``None`` if no input is stored."""
    if not case.stored:
        return None
    return dataclasses.replace(case, stored=frozenset(), variant="fed")


def with_other_types(case: Case) -> Iterator[Case]:
    """Yield the case in other types that the schema allows."""
    schema = S.schema_of(case.op, case.opset)
    main = case.main
    if schema is None or main is None or main.dtype != np.float32 or not schema.inputs:
        return
    kind = schema.inputs[0].type_str
    allowed = {c.type_param_str: set(c.allowed_type_strs) for c in schema.type_constraints}
    slots = [
        schema.inputs[min(i, len(schema.inputs) - 1)].type_str for i in range(len(case.inputs))
    ]
    for name in _OTHER_TYPES:
        if f"tensor({name})" not in allowed.get(kind, ()):
            continue
        inputs = tuple(
            _cast(a, name, case.op)
            if a is not None and slot == kind and a.dtype == np.float32
            else a
            for a, slot in zip(case.inputs, slots, strict=True)
        )
        yield from _replace_inputs(case, inputs, name)


def with_other_ranks(case: Case) -> Iterator[Case]:
    """Yield an elementwise node at rank 1 and rank 5."""
    arrays = [a for a in (*case.inputs, *case.outputs) if a is not None]
    elementwise = len({a.shape for a in arrays}) == 1 and not case.attributes and not case.stored
    if not elementwise or not arrays[0].ndim or not arrays[0].size:
        return
    shape = arrays[0].shape
    for rank, dims in ((1, (-1,)), (5, (*(1,) * (5 - len(shape)), *shape))):
        if len(dims) == rank and rank != len(shape):
            inputs = tuple(None if a is None else a.reshape(dims) for a in case.inputs)
            yield from _replace_inputs(case, inputs, f"rank{rank}")


def _replace_inputs(
    case: Case, inputs: tuple[np.ndarray | None, ...], variant: str
) -> Iterator[Case]:
    changed = dataclasses.replace(case, inputs=inputs, variant=variant)
    outputs = reference_outputs(changed)
    if outputs is not None:
        yield dataclasses.replace(changed, outputs=outputs)


def _cast(array: np.ndarray, name: str, op: str) -> np.ndarray:
    dtype = TYPES[name]
    if dtype.kind == "b":
        return array > 0
    if dtype.kind == "f":
        return array.astype(dtype)
    whole = np.rint(np.clip(np.nan_to_num(array), -20, 20) * 3)
    if op == "ReduceProd":
        whole = np.sign(whole)  # products of larger integers overflow
    if dtype.kind == "u" or op in _POSITIVE:
        whole = np.abs(whole) + (op in _POSITIVE)
    return whole.astype(dtype)


def type_name(array: np.ndarray) -> str:
    """Return onnx's name for the type of an array."""
    return NAMES[array.dtype]
