"""Cases for every operator that has a lowering."""

from __future__ import annotations

import numpy as np

from .control import CONTROL
from .make import c, f, flags, ints, pos, w
from .newer import NEWER
from .single import Case, Const
from .types import TYPES

_POINTS = np.asarray([-30, -3, -1, -0.5, -1e-3, 0, 1e-3, 0.5, 1, 3, 30, 90], np.float32)
_EXTREME = np.asarray([1.0, -np.inf, np.inf, np.nan, 2.0, 0.0], np.float32)

ACTIVATIONS = [
    Case("Gelu", (_POINTS,), tol=1e-6),
    Case("Gelu", (_POINTS,), {"approximate": "tanh"}, "tanh"),
    Case("Erf", (_POINTS,), tol=1e-6),
    Case("HardSwish", (_POINTS,)),
    Case("HardSigmoid", (_POINTS,), {"alpha": 0.3}),
    Case("Softplus", (_POINTS,)),
    Case("Mish", (_POINTS,)),
    Case("Elu", (_POINTS,), {"alpha": 0.5}),
    Case("Celu", (_POINTS,), {"alpha": 2.0}),
    Case("Selu", (_POINTS,)),
    Case("LeakyRelu", (_POINTS,), {"alpha": 0.1}),
    Case("PRelu", (f(2, 3, 4), w(3, 1))),
    Case("ThresholdedRelu", (_POINTS,), {"alpha": 0.7}, refused_symbolic=(7,)),
    Case("Shrink", (_POINTS,), {"lambd": 0.5, "bias": 0.1}),
    Case("Sign", (_POINTS,)),
    Case("Sign", (ints(3, 5, low=-3),), id="integers"),
    Case("Relu", (_POINTS,)),
    Case("Clip", (_POINTS, c(-0.5, np.float32), c(2, np.float32))),
    Case("Clip", (_POINTS, None, c(2, np.float32)), id="above"),
    Case("Sigmoid", (_POINTS,)),
    Case("Tanh", (_POINTS,)),
    Case("Softsign", (_POINTS,)),
    Case("Abs", (_POINTS,)),
    Case("Sinh", (f(9),), refused_symbolic=(7,)),
    Case("Cosh", (f(9),)),
]

NORMS = [
    Case("InstanceNormalization", (f(2, 3, 4, 5), w(3), w(3))),
    Case("LayerNormalization", (f(2, 3, 4), w(4), w(4))),
    Case("LayerNormalization", (f(2, 3, 4), w(3, 4)), {"axis": 1}, "no-bias"),
    Case("LayerNormalization", (f(2, 4), w(4), w(4)), {"epsilon": 0.1}, "all-outputs", outputs=3),
    Case("GroupNormalization", (f(2, 6, 4), w(6), w(6)), {"num_groups": 3}),
    Case("MeanVarianceNormalization", (f(2, 3, 4, 4),)),
    Case("BatchNormalization", (f(2, 3, 4), w(3), w(3), w(3), Const(pos(3)))),
    Case(
        "BatchNormalization",
        (f(4, 3, 5), w(3), w(3), w(3), Const(pos(3))),
        {"training_mode": 1, "momentum": 0.7},
        "training",
        outputs=3,
    ),
    Case("LpNormalization", (f(2, 4),), {"p": 2, "axis": -1}),
    Case("Softmax", (f(2, 3, 4),), {"axis": 1}),
    Case("Softmax", (f(2, 40) * 30,), {"axis": -1}, "large"),
    Case("LogSoftmax", (f(2, 3, 4),), {"axis": 1}),
]

REDUCTIONS = [
    Case("ReduceL2", (f(2, 3, 4), c([1, -1])), {"keepdims": 0}),
    Case("ReduceL1", (f(2, 3, 4), c([1]))),
    Case("ReduceSumSquare", (f(2, 3, 4), c([-1]))),
    Case("ReduceLogSum", (pos(2, 3, 4), c([-1]))),
    Case("ReduceLogSumExp", (f(2, 3, scale=60), c([-1])), {"keepdims": 0}),
    Case("ReduceMean", (f(2, 3, 4), c([1, 2]))),
    Case("ReduceSum", (f(2, 3), c([])), {"noop_with_empty_axes": 1}, "no-axes"),
    Case("GlobalAveragePool", (f(2, 3, 4, 5),)),
    Case("GlobalMaxPool", (f(2, 3, 4, 5),)),
    Case("CumSum", (f(2, 7), c(1))),
    Case("CumSum", (f(2, 7), c(-1)), {"exclusive": 1, "reverse": 1}, "back"),
    Case("CumSum", (np.asarray([[1, np.inf, 2, 3]], np.float32), c(1)), id="infinite"),
]

SHAPES = [
    Case("Shape", (f(2, 3, 4),), {"start": 1, "end": -1}, dynamic=False),
    Case("Size", (f(2, 3),)),
    Case("Expand", (f(3, 1), c([2, 3, 4])), refused_symbolic=(7, 13)),
    Case("Tile", (f(2, 3), c([2, 2]))),
    Case("Split", (f(2, 7), c([3, 4])), {"axis": 1}, outputs=2),
    Case("Split", (f(2, 7),), {"axis": -1, "num_outputs": 3}, "parts", outputs=3),
    Case("Slice", (f(2, 7), c([6]), c([-8]), c([1]), c([-2])), id="backwards"),
    Case("Slice", (f(2, 7), c([1]), c([6]), c([1]), c([2])), id="steps"),
    Case("Flatten", (f(2, 3, 4),), {"axis": 1}),
    Case("Squeeze", (f(2, 1, 3), c([1]))),
    Case("Unsqueeze", (f(2, 3), c([-1, 1]))),
    Case("DepthToSpace", (f(2, 8, 3, 2),), {"blocksize": 2}),
    Case("DepthToSpace", (f(2, 8, 3, 2),), {"blocksize": 2, "mode": "CRD"}, "CRD"),
    Case("SpaceToDepth", (f(2, 2, 4, 6),), {"blocksize": 2}),
    Case("Trilu", (f(2, 4, 3),), {"upper": 0}, refused_symbolic=(7,)),
    Case("Trilu", (f(3, 3), c(1)), id="above", dynamic=False),
    Case("OneHot", (ints(4, 3, low=-4), c(4), c([0, 1], np.float32))),
    Case("OneHot", (ints(9, 2, 3), c(4), c([-1, 5], np.float32)), {"axis": 1}, "values"),
    Case("Identity", (f(2, 3),)),
    Case("Pad", (f(2, 3, 4, 5), c([0, 0, 1, 2, 0, 0, 2, 1])), {"mode": "reflect"}),
    Case("Pad", (f(2, 3, 4), c([0, 1, 2, 0, 2, 1])), {"mode": "edge"}, "edge"),
    Case("Pad", (f(2, 3, 4), c([1, 2]), c(0.5, np.float32), c([-1])), id="constant"),
    Case("Pad", (f(2, 3, 4), c([0, -1, 2, 0, 0, -1])), id="negative"),
    Case("Pad", (f(2, 5), c([1, 2]), None, c([1])), {"mode": "wrap"}, "wrap"),
    Case("Einsum", (f(2, 3, 4), f(2, 4, 5)), {"equation": "bij,bjk->bik"}),
    Case("Einsum", (f(2, 3, 4), f(4, 5, 3)), {"equation": "bij,jki->kb"}, "two", dynamic=False),
    Case("Einsum", (f(2, 3), f(4)), {"equation": "ij,k->kij"}, "outer", dynamic=False),
    Case(
        "Einsum", (f(2, 3), f(3, 4), f(4, 2)), {"equation": "ij,jk,kl->il"}, "chain", dynamic=False
    ),
    Case("Einsum", (f(2, 3, 4),), {"equation": "ijk->ki"}, "sum"),
]

_RESIZE = c([1, 1, 2, 3], np.float32)
RESIZES = [
    Case("Resize", (f(1, 2, 4, 5), None, _RESIZE), {"mode": "nearest", **extra}, f"nearest-{i}")
    for i, extra in enumerate(
        [
            {},
            {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"},
            {"coordinate_transformation_mode": "align_corners"},
            {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "ceil"},
        ]
    )
]
RESIZES += [
    Case(
        "Resize",
        (f(1, 2, 4, 5), None, None, c([1, 2, 7, 9])),
        {"mode": mode, "coordinate_transformation_mode": place},
        f"{mode}-{place}",
        dynamic=False,
    )
    for mode in ("linear", "cubic")
    for place in ("half_pixel", "align_corners", "asymmetric", "pytorch_half_pixel")
]
RESIZES += [
    Case(
        "Resize",
        (f(1, 2, 8, 8), None, c([0.5, 0.5], np.float32)),
        {"mode": "linear", "axes": [2, 3]},
        "smaller",
    ),
]

CHOICES = [
    Case("Where", (flags(2, 3), f(2, 3), f(2, 3)), refused_symbolic=(7, 13)),
    Case("Where", (flags(6), _EXTREME, f(6)), id="exact", dynamic=False),
    Case(
        "Where",
        (flags(2, 3), f(2, 3), c(-np.inf, np.float32)),
        id="masked",
        refused_symbolic=(7, 13),
    ),
    Case("Where", (flags(2, 3), ints(9, 2, 3), ints(9, 3)), id="integers"),
    Case("Where", (flags(2, 3), flags(2, 3), flags(3)), id="booleans"),
    Case("Equal", (_EXTREME, _EXTREME[::-1].copy()), id="floats"),
    Case("GreaterOrEqual", (_EXTREME, np.full(6, 1, np.float32))),
    Case("LessOrEqual", (ints(4, 6), ints(4, 6)), id="integers"),
    Case("Greater", (ints(4, 6), ints(4, 6)), id="integers", limits={}),
    Case("Less", (ints(4, 6), ints(4, 6)), id="integers", limits={}),
    Case("Max", (f(2, 3), f(3), f(2, 1)), dynamic=False),
    Case("Min", (ints(9, 2, 3), ints(9, 3)), id="integers"),
    Case("IsNaN", (_EXTREME,)),
    Case("IsInf", (_EXTREME,)),
    Case("GatherElements", (f(3, 4), ints(4, 3, 2, low=-4)), {"axis": 1}, dynamic=False),
    Case("GatherND", (f(3, 4, 5), ints(3, 2, 2)), dynamic=False),
    Case("GatherND", (f(2, 4, 5), ints(4, 2, 1)), {"batch_dims": 1}, "batch", dynamic=False),
    Case(
        "ScatterElements",
        (f(3, 4), ints(3, 2, 4), f(2, 4)),
        {"axis": 0, "reduction": "add"},
        "add",
        dynamic=False,
    ),
    Case(
        "ScatterElements",
        (f(3, 4), ints(3, 2, 4), f(2, 4)),
        {"axis": 0, "reduction": "max"},
        "max",
        dynamic=False,
    ),
    Case(
        "ScatterElements",
        (f(3, 4), c([[0, 1, 2, 0], [2, 0, 1, 1]]), f(2, 4)),
        {},
        "none",
        dynamic=False,
    ),
    Case(
        "ScatterND", (f(3, 4), ints(3, 5, 1), f(5, 4)), {"reduction": "add"}, "add", dynamic=False
    ),
    Case("ScatterND", (f(3, 4), c([[1], [0]]), f(2, 4)), {}, "none", dynamic=False),
]

PRODUCTS = [
    Case("Gemm", (f(2, 3), w(4, 3), w(4)), {"transB": 1, "alpha": 0.5, "beta": 2.0}),
    Case("Gemm", (f(2, 3), w(3, 4)), {}, "no-bias"),
    Case("Pow", (f(2, 3), c(2)), id="square"),
    Case("Pow", (pos(2, 3), c(-0.5, np.float32)), id="root"),
    Case("Mod", (ints(9, 6, low=-9), c(4))),
    Case("Reciprocal", (pos(4),)),
    Case("Neg", (f(4),)),
    Case("Sub", (f(4), f(4))),
    Case("Sum", (f(4), f(4), f(4))),
    Case("Det", (f(2, 3, 3),)),
    Case("DFT", (f(2, 8, 1), None, c(1)), {"onesided": 1}),
    Case("DFT", (f(2, 8, 2), None, c(-2)), {"inverse": 1}, "inverse"),
    Case(
        "ConvTranspose",
        (f(1, 4, 5, 6), w(4, 3, 3, 2)),
        {"strides": [2, 3], "pads": [1, 0, 0, 1], "output_padding": [1, 0]},
    ),
    Case(
        "ConvTranspose",
        (f(1, 4, 5), w(4, 2, 3), w(4)),
        {"group": 2, "dilations": [2], "strides": [2]},
        "group",
    ),
    Case("Col2Im", (f(1, 18, 4), c([4, 4]), c([3, 3])), {}, dynamic=False),
    Case(
        "MaxPool",
        (f(1, 2, 7, 6),),
        {"kernel_shape": [3, 2], "strides": [2, 2], "ceil_mode": 1},
        "ceil",
        limits={"MaxPool": {"attrs": {"ceil_mode": [0]}}},
    ),
    Case("SoftmaxCrossEntropyLoss", (f(5, 3), ints(3, 5)), refused_symbolic=(7,)),
    Case(
        "SoftmaxCrossEntropyLoss",
        (f(4, 3, 2), ints(3, 4, 2), Const(pos(3))),
        {"ignore_index": 1},
        "weights",
        outputs=2,
        refused_symbolic=(7,),
    ),
    Case(
        "NegativeLogLikelihoodLoss",
        (f(5, 3), ints(3, 5)),
        {"reduction": "sum"},
        refused_symbolic=(7,),
    ),
]

_LSTM = (f(3, 2, 4), w(1, 12, 4), w(1, 12, 3), w(1, 24))
_GRU = (f(3, 2, 4), w(1, 9, 4), w(1, 9, 3), w(1, 18))
RECURRENCES = [
    Case("LSTM", _LSTM, {"hidden_size": 3}, outputs=3, dynamic=False, also_lacks=("Scan", "Loop")),
    Case(
        "LSTM",
        _LSTM,
        {"hidden_size": 3, "direction": "reverse"},
        "reverse",
        outputs=3,
        dynamic=False,
        also_lacks=("Scan", "Loop"),
    ),
    Case(
        "LSTM",
        (f(3, 2, 4), w(2, 12, 4), w(2, 12, 3)),
        {"hidden_size": 3, "direction": "bidirectional"},
        "both",
        outputs=3,
        dynamic=False,
        also_lacks=("Scan", "Loop"),
    ),
    Case(
        "GRU",
        _GRU,
        {"hidden_size": 3, "linear_before_reset": 1},
        outputs=2,
        dynamic=False,
        also_lacks=("Scan", "Loop"),
    ),
    Case(
        "GRU",
        _GRU,
        {"hidden_size": 3, "direction": "reverse"},
        "reverse",
        outputs=2,
        dynamic=False,
        also_lacks=("Scan", "Loop"),
    ),
    Case(
        "RNN",
        (f(3, 2, 4), w(1, 3, 4), w(1, 3, 3)),
        {"hidden_size": 3},
        outputs=2,
        dynamic=False,
        also_lacks=("Scan", "Loop"),
    ),
]

CASES = [
    *ACTIVATIONS,
    *NORMS,
    *REDUCTIONS,
    *SHAPES,
    *RESIZES,
    *CHOICES,
    *PRODUCTS,
    *RECURRENCES,
    *CONTROL,
    *NEWER,
    *TYPES,
]
