"""The same node otherwise: weights stored or fed, other types, other ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from onnxtrain.graph import shapes as S
from onnxtrain.lowering.probe.case import NAMES, TYPES, Case, computed

# Inputs that are numbers of the model rather than data, by their names in the standard.
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


def stored(case: Case) -> Case:
    """Return the case with weights and parameters inside the model."""
    schema = S.schema_of(case.op, case.opset)
    if schema is None or case.stored:
        return case
    kept = set(_WEIGHTS.get(case.op, ()))
    for i, formal in enumerate(schema.inputs):
        if formal.name in _PARAMETERS:
            kept.add(i)
    present = {i for i, a in enumerate(case.inputs) if a is not None}
    kept &= present
    if kept == present:
        kept.discard(0)
    return dataclasses.replace(case, stored=frozenset(kept))


def fed(case: Case) -> Case | None:
    """Return the case with nothing inside the model, ``None`` if that is so already."""
    if not case.stored:
        return None
    return dataclasses.replace(case, stored=frozenset(), variant="fed")


def in_types(case: Case) -> Iterator[Case]:
    """Return the case in other types that the standard allows there."""
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
        yield from _with(case, inputs, name)


def in_ranks(case: Case) -> Iterator[Case]:
    """Return a node that works element by element with 1 and with 5 axes."""
    arrays = [a for a in (*case.inputs, *case.outputs) if a is not None]
    alike = len({a.shape for a in arrays}) == 1 and not case.attributes and not case.stored
    if not alike or not arrays[0].ndim or not arrays[0].size:
        return
    shape = arrays[0].shape
    for rank, dims in ((1, (-1,)), (5, (*(1,) * (5 - len(shape)), *shape))):
        if len(dims) == rank and rank != len(shape):
            inputs = tuple(None if a is None else a.reshape(dims) for a in case.inputs)
            yield from _with(case, inputs, f"rank{rank}")


def _with(case: Case, inputs: tuple[np.ndarray | None, ...], variant: str) -> Iterator[Case]:
    changed = dataclasses.replace(case, inputs=inputs, variant=variant)
    outputs = computed(changed)
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
        whole = np.sign(whole)  # a product of others would not fit
    if dtype.kind == "u" or op in _POSITIVE:
        whole = np.abs(whole) + (op in _POSITIVE)
    return whole.astype(dtype)


def type_name(array: np.ndarray) -> str:
    """Return the name that onnx has for the type of an array."""
    return NAMES[array.dtype]
