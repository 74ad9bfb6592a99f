"""Cases of types, ranks and attributes that a runtime lacks, and of missing general operators."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from .make import c, f, flags, ints, pos, w
from .single import OPSETS, Case, Const

_FLOATS = {"dtypes": ["float", "double"]}
_MOVES_FLOATS = {"Reshape": {**_FLOATS, "any_dtype": [1]}, "Transpose": _FLOATS}
_FLAT = {"Conv": {"ranks": [4]}}
_BIG = np.asarray([[0, 1, -1, 2047, 2048], [-2049, 70000, -(1 << 31), (1 << 31) - 1, 16777217]])

TYPES = [
    Case("Cast", (_BIG,), {"to": 1}, "integers"),
    Case("Cast", (_BIG.astype(np.int32),), {"to": 7}, "longer"),
    Case("Cast", (_BIG,), {"to": 11}, "doubles"),
    Case("Reshape", (ints(9, 4, 3), c([2, 6])), id="integers", limits=_MOVES_FLOATS, dynamic=False),
    Case("Reshape", (np.asarray(3), c([1, 1])), id="scalar", limits=_MOVES_FLOATS),
    Case(
        "Transpose",
        (ints(9, 4, 3, 2),),
        {"perm": [2, 0, 1]},
        "integers",
        limits=_MOVES_FLOATS,
        dynamic=False,
    ),
    Case(
        "MatMul",
        (ints(9, 2, 3).astype(np.int32), ints(9, 3, 2).astype(np.int32)),
        id="integers",
        limits={"MatMul": _FLOATS},
    ),
    Case(
        "Conv",
        (f(2, 4, 9), w(6, 2, 3), w(6)),
        {"group": 2, "pads": [1, 2], "strides": [2]},
        "1d",
        limits=_FLAT,
    ),
    Case(
        "Conv",
        (f(1, 4, 5, 4, 4), w(6, 2, 3, 2, 3), w(6)),
        {"group": 2, "strides": [2, 1, 2], "pads": [1, 0, 1, 1, 1, 0], "dilations": [1, 2, 1]},
        "3d",
        limits=_FLAT,
        dynamic=False,
    ),
    Case(
        "Conv",
        (f(3, 2, 5, 5), w(4, 2, 3, 3)),
        {"pads": [1, 1, 1, 1]},
        "images",
        limits={"Conv": {"batch": 1}},
        dynamic=False,
    ),
    Case(
        "ReduceMax",
        (flags(3, 4), c([1])),
        id="booleans",
        limits={"ReduceMax": {"dtypes": ["float", "int32"], "any_dtype": [1]}},
    ),
    Case(
        "ReduceMin",
        (ints(9, 3, 4).astype(np.int8), c([1])),
        id="bytes",
        limits={"ReduceMin": {"dtypes": ["float", "int32"], "any_dtype": [1]}},
    ),
    Case("ReduceProd", (f(2, 3), c([])), {"noop_with_empty_axes": 1}, "no-axes"),
    Case("ReduceMax", (f(2, 3), c([])), {"noop_with_empty_axes": 1}, "no-axes"),
    Case("ReduceMin", (f(2, 3), c([])), {"noop_with_empty_axes": 1}, "no-axes"),
    Case("Hardmax", (f(2, 3, 4),), {"axis": 1}, limits={}),
    Case("ConstantOfShape", (c([2, 3]),), {"value": ir.tensor(np.asarray([7], np.int64))}),
    Case("EyeLike", (f(3, 4),), {"k": 1}, refused_symbolic=(7, 13)),
    Case("Mean", (f(4), f(4), f(4))),
    Case("Not", (flags(5),)),
    Case("Sqrt", (pos(5),)),
    Case("TopK", (w(3, 7), c([3])), {"axis": 1}, outputs=2),
    Case("TopK", (w(5, 2, 3), c([2])), {"axis": 0, "largest": 0}, "smallest", outputs=2),
    Case(
        "TopK",
        (f(3, 7), c([3])),
        id="may-be-infinite",
        outputs=2,
        refused=OPSETS,
        refused_symbolic=(7, 13),
    ),
    Case("Max", (f(2, 3), Const(f(3))), id="two", dynamic=False),
    Case("Sign", (f(9),), id="quotient", also_lacks=("Greater", "Less")),
    Case(
        "Clip",
        (f(9), c(-0.5, np.float32), c(2, np.float32)),
        id="relu",
        also_lacks=("Max", "Min", "ReduceMax", "ReduceMin"),
    ),
    Case("Pow", (pos(2, 3), ints(3, 2, 3)), id="types", limits={}),
    Case("Where", (Const(flags(2, 3)), w(2, 3), c(-np.inf, np.float32)), id="bias"),
    Case(
        "LSTM",
        (f(2, 3, 4), w(1, 12, 4), w(1, 12, 3), w(1, 24)),
        {"hidden_size": 3, "layout": 1},
        "batch-first",
        outputs=3,
        dynamic=False,
        limits={"LSTM": {"attrs": {"layout": [0]}}},
    ),
]
