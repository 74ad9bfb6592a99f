"""Cases for normalization over the axes of one sample."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.cases.base import OpCase, away_from_zero, f, positive


def layer_norm(start: int, eps: float = 1e-5):
    """LayerNormalization from an axis on, all three outputs."""

    def run(x, scale, bias=None):
        axes = tuple(range(start % x.ndim, x.ndim))
        mean = x.mean(axes, keepdim=True)
        inverse = (x.var(axes, unbiased=False, keepdim=True) + eps).rsqrt()
        y = (x - mean) * inverse * scale
        return (y if bias is None else y + bias), mean, inverse

    return run


def first(function):
    """Only the first output of a function."""
    return lambda *a: function(*a)[0]


def rms_norm(start: int, eps: float):
    """RMSNormalization from an axis on."""

    def run(x, scale):
        axes = tuple(range(start % x.ndim, x.ndim))
        return x * (x.square().mean(axes, keepdim=True) + eps).rsqrt() * scale

    return run


def lp_norm(p: int, axis: int):
    """LpNormalization."""
    return lambda x: x / torch.linalg.vector_norm(x, p, axis, keepdim=True)


def mvn(*axes: int):
    """MeanVarianceNormalization."""

    def run(x):
        centered = x - x.mean(axes, keepdim=True)
        return centered / (centered.square().mean(axes, keepdim=True).sqrt() + 1e-9)

    return run


def lrn(size: int, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0):
    """LRN."""
    return lambda x: F.local_response_norm(x, size, alpha, beta, bias)


def group_norm(groups: int, eps: float = 1e-5):
    """GroupNormalization."""
    return lambda x, w, b: F.group_norm(x, groups, w, b, eps)


def group_norm_graph(shape: str, channels: int, attributes: str) -> str:
    """The text of a graph with one GroupNormalization."""
    return f"""g (float[{shape}] x, float[{channels}] scale, float[{channels}] bias)
        => (float[{shape}] y) {{ y = GroupNormalization <{attributes}> (x, scale, bias) }}"""


CASES = [
    OpCase("LayerNormalization", (f(2, 3, 5), f(5), f(5)), torch=first(layer_norm(-1))),
    OpCase(
        "LayerNormalization",
        (f(2, 3, 2, 2), f(3, 2, 2)),
        {"axis": 1, "epsilon": 0.1},
        torch=first(layer_norm(1, 0.1)),
        id="axis-1-no-bias",
    ),
    OpCase(
        "LayerNormalization",
        (f(2, 3, 4), f(4), f(4)),
        {"axis": -1},
        torch=layer_norm(-1),
        outputs=3,
        id="statistics",
    ),
    OpCase(
        "LayerNormalization",
        (f(2, 3, 4), f(3, 4), f(3, 4)),
        {"axis": -2},
        torch=lambda *a: layer_norm(-2)(*a)[2],
        outputs=("_y", "", "inverse"),
        id="deviation-only",
    ),
    OpCase(
        "LayerNormalization",
        (f(2, 3, 4), f(4), f(3, 1)),
        {"axis": 1},
        torch=first(layer_norm(1)),
        id="broadcast-scale",
    ),
    OpCase(
        "LayerNormalization", (f(6), f(6), f(6)), {"axis": 0}, first(layer_norm(0)), id="vector"
    ),
    OpCase(
        "RMSNormalization", (f(2, 3, 5), f(5)), torch=rms_norm(-1, 1e-5), opset=23, forward="torch"
    ),
    OpCase(
        "RMSNormalization",
        (f(2, 3, 4), f(3, 4)),
        {"axis": 1, "epsilon": 0.1},
        torch=rms_norm(1, 0.1),
        opset=23,
        forward="torch",
        id="axis-1",
    ),
    OpCase(
        "InstanceNormalization",
        (f(2, 3, 4, 5), f(3), f(3)),
        torch=lambda x, w, b: F.instance_norm(x, weight=w, bias=b),
    ),
    OpCase(
        "InstanceNormalization",
        (f(2, 3, 7), f(3), f(3)),
        {"epsilon": 0.1},
        torch=lambda x, w, b: F.instance_norm(x, weight=w, bias=b, eps=0.1),
        id="one-axis-epsilon",
    ),
    # onnx infers no type for the output, so the model declares it; the reference evaluator
    # computes in float32 whatever the type.
    OpCase(
        "GroupNormalization",
        (f(2, 6, 3, 2), f(6), f(6)),
        torch=group_norm(3),
        model=group_norm_graph("2,6,3,2", 6, "num_groups=3"),
        forward="torch",
    ),
    OpCase(
        "GroupNormalization",
        (f(3, 4, 5), f(4), f(4)),
        torch=group_norm(1, 0.1),
        model=group_norm_graph("3,4,5", 4, "num_groups=1, epsilon=0.1"),
        forward="torch",
        id="one-group",
    ),
    OpCase(
        "GroupNormalization",
        (f(3, 6), f(6), f(6)),
        torch=group_norm(2),
        model=group_norm_graph("3,6", 6, "num_groups=2"),
        forward="torch",
        id="no-positions",
    ),
    OpCase("LpNormalization", (f(3, 4),), torch=lp_norm(2, -1)),
    OpCase("LpNormalization", (f(3, 4, 2),), {"axis": 1}, torch=lp_norm(2, 1), id="axis-1"),
    OpCase(
        "LpNormalization",
        (away_from_zero(3, 4),),
        {"axis": 0, "p": 1},
        torch=lp_norm(1, 0),
        forward="torch",  # the reference evaluator forgets the absolute value
        id="absolute-values",
    ),
    # The body of MeanVarianceNormalization has float32 constants: no float64 reference.
    OpCase(
        "MeanVarianceNormalization",
        (f(2, 3, 2, 4),),
        {"axes": [0, 2, 3]},
        torch=mvn(0, 2, 3),
        forward="torch",
    ),
    OpCase(
        "MeanVarianceNormalization",
        (f(4, 3, 5),),
        {"axes": [-1]},
        torch=mvn(-1),
        forward="torch",
        id="last-axis",
    ),
    # The reference evaluator's LRN is not that of onnxruntime, torch and the specification.
    OpCase("LRN", (f(2, 5, 2, 3),), {"size": 3}, torch=lrn(3), forward="torch"),
    OpCase(
        "LRN",
        (positive(2, 7, 3, 2),),
        {"size": 5, "alpha": 0.9, "beta": 0.6, "bias": 2.0},
        torch=lrn(5, 0.9, 0.6, 2.0),
        forward="torch",
        id="strong",
    ),
]
