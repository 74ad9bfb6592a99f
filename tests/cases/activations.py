"""Cases for activation functions."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.cases.base import OpCase, at, away_from_zero, between, distinct, f

FAR = at([-200.0, -50.0, -8.0, 0.5, 8.0, 50.0, 200.0])
"""Where careless formulas overflow."""
KINK = "finite: the value is on a kink"


def _celu(alpha):
    return lambda x: F.celu(x, alpha)


def _hard_sigmoid(alpha, beta):
    return lambda x: (alpha * x + beta).clamp(0.0, 1.0)


def _selu(alpha, gamma):
    return lambda x: gamma * torch.where(x > 0, x, alpha * (x.clamp(max=0.0).exp() - 1))


def _shrink(lambd, bias):
    return lambda x: torch.where(
        x < -lambd, x + bias, torch.where(x > lambd, x - bias, torch.zeros_like(x))
    )


def _swish(alpha):
    return lambda x: x * torch.sigmoid(alpha * x)


def _gelu_tanh(x):
    return F.gelu(x, approximate="tanh")


CASES = [
    OpCase("Relu", (away_from_zero(3, 4),), torch=torch.relu),
    OpCase("Relu", (away_from_zero(),), torch=torch.relu, id="scalar"),
    OpCase("Relu", (at([0.0, -1.0, 2.0]),), torch=torch.relu, id="kink", xfail=KINK),
    OpCase("LeakyRelu", (away_from_zero(3, 4),), torch=lambda x: F.leaky_relu(x, 0.01)),
    OpCase(
        "LeakyRelu",
        (at([0.0, -1.0, 2.0]),),
        {"alpha": 0.3},
        torch=lambda x: F.leaky_relu(x, 0.3),
        id="kink",
        xfail=KINK,
    ),
    OpCase("LeakyRelu", (distinct(5),), {"alpha": -0.5}, id="negative-slope"),
    OpCase(
        "PRelu",
        (away_from_zero(2, 3, 4), f(3, 1)),
        torch=lambda x, s: torch.where(x > 0, x, s * x),
    ),
    OpCase(
        "PRelu",
        (away_from_zero(2, 3), f(1)),
        torch=lambda x, s: torch.where(x > 0, x, s * x),
        id="one-slope",
    ),
    OpCase(
        "PRelu",
        (away_from_zero(2, 3), f(2, 3)),
        torch=lambda x, s: torch.where(x > 0, x, s * x),
        id="all-slopes",
    ),
    OpCase("ThresholdedRelu", (distinct(3, 4),), torch=lambda x: F.threshold(x, 1.0, 0.0)),
    OpCase(
        "ThresholdedRelu",
        (distinct(3, 4),),
        {"alpha": -0.4},
        torch=lambda x: F.threshold(x, -0.4, 0.0),
        id="negative-threshold",
    ),
    OpCase("Shrink", (at([-2.0, -0.3, 0.2, 1.5]),), torch=_shrink(0.5, 0.0)),
    OpCase(
        "Shrink",
        (at([-2.0, -0.3, 0.2, 1.5]),),
        {"lambd": 0.25, "bias": 0.25},
        torch=lambda x: F.softshrink(x, 0.25),
        id="soft",
    ),
    OpCase(
        "Shrink",
        (at([-2.0, -0.3, 0.2, 1.5]),),
        {"lambd": -0.5, "bias": 0.1},
        torch=_shrink(-0.5, 0.1),
        id="negative-lambd",
    ),
    OpCase("Sigmoid", (f(2, 3),), torch=torch.sigmoid),
    OpCase("Sigmoid", (FAR,), torch=torch.sigmoid, id="far"),
    OpCase("Softplus", (f(2, 3),), torch=lambda x: F.softplus(x, threshold=1e9)),
    OpCase(
        "Softplus",
        (FAR,),
        torch=lambda x: torch.logaddexp(x, torch.zeros_like(x)),
        id="far",
        forward="torch",
    ),
    OpCase("Softsign", (away_from_zero(2, 3),), torch=F.softsign),
    OpCase("Softsign", (FAR,), torch=F.softsign, id="far"),
    OpCase("Elu", (away_from_zero(3, 4),), torch=F.elu),
    OpCase("Elu", (FAR,), {"alpha": 0.5}, torch=lambda x: F.elu(x, 0.5), id="far"),
    OpCase(
        "Elu",
        (at([0.0, 1.0]),),
        {"alpha": 0.5},
        torch=lambda x: F.elu(x, 0.5),
        id="kink",
        order=1,  # torch takes the second derivative from the right
        xfail=KINK,
    ),
    OpCase("Celu", (away_from_zero(3, 4),), torch=_celu(1.0), forward="torch"),
    OpCase("Celu", (FAR,), {"alpha": 0.5}, torch=_celu(0.5), id="far", forward="torch"),
    OpCase("Selu", (away_from_zero(3, 4),), torch=F.selu),
    OpCase("Selu", (FAR,), {"alpha": 1.2, "gamma": 0.7}, torch=_selu(1.2, 0.7), id="far"),
    OpCase("HardSigmoid", (f(3, 4),), torch=_hard_sigmoid(0.2, 0.5)),
    OpCase(
        "HardSigmoid",
        (between(-6.0, 6.0, 3, 4),),
        {"alpha": -0.25, "beta": 0.375},
        torch=_hard_sigmoid(-0.25, 0.375),
        id="falling",
    ),
    OpCase("HardSwish", (f(3, 4),), torch=F.hardswish),
    OpCase("HardSwish", (between(-6.0, 6.0, 3, 4),), torch=F.hardswish, id="wide"),
    OpCase(
        "HardSwish",
        (at([-3.0, 3.0, 0.0]),),
        torch=F.hardswish,
        id="kink",
        xfail=KINK,
    ),
    OpCase("Mish", (f(2, 3),), torch=F.mish),
    OpCase("Mish", (FAR,), torch=F.mish, id="far", forward="torch"),
    OpCase("Gelu", (f(2, 3),), torch=F.gelu, forward="torch"),
    OpCase("Gelu", (FAR,), torch=F.gelu, id="far", forward="torch"),
    OpCase("Gelu", (f(2, 3),), {"approximate": "tanh"}, torch=_gelu_tanh, id="tanh"),
    OpCase("Gelu", (FAR,), {"approximate": "tanh"}, torch=_gelu_tanh, id="tanh-far"),
    OpCase("Swish", (f(2, 3),), torch=_swish(1.0), opset=24),
    OpCase("Swish", (FAR,), {"alpha": 1.5}, torch=_swish(1.5), id="far", opset=24),
]
