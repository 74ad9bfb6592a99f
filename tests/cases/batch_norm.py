"""Cases for batch normalization, with batch statistics and with running statistics."""

from __future__ import annotations

from tests.cases.base import OpCase, f, fixed, positive


def axes_of(x):
    """All axes but the channels'."""
    return [i for i in range(x.ndim) if i != 1]


def per_channel(v, x):
    """A vector that broadcasts along axis 1."""
    return v.reshape(-1, *[1] * (x.ndim - 2)) if x.ndim > 2 else v


def frozen(eps: float = 1e-5):
    """On the given statistics."""

    def run(x, scale, bias, mean, var):
        scale, bias, mean, var = (per_channel(v, x) for v in (scale, bias, mean, var))
        return (x - mean) * (var + eps).rsqrt() * scale + bias

    return run


def training(eps: float = 1e-5, momentum: float = 0.9):
    """On the batch's statistics; the variance is that of the population."""

    def run(x, scale, bias, mean, var):
        axes = axes_of(x)
        now, spread = x.mean(axes), x.var(axes, unbiased=False)
        y = frozen(eps)(x, scale, bias, now, spread)
        keep = 1 - momentum
        return y, momentum * mean + keep * now, momentum * var + keep * spread

    return run


def first(function):
    """Only the first output."""
    return lambda *a: function(*a)[0]


OP = "BatchNormalization"
CASES = [
    OpCase(OP, (f(3, 4, 2, 2), f(4), f(4), f(4), positive(4)), torch=frozen()),
    OpCase(
        OP,
        (f(5, 3), f(3), f(3), f(3), positive(3)),
        {"epsilon": 0.1},
        torch=frozen(0.1),
        id="no-positions",
    ),
    OpCase(
        OP,
        (f(3, 2, 2, 2, 2), f(2), f(2), fixed(f(2)), fixed(positive(2))),
        torch=frozen(),
        id="three-axes-buffers",
    ),
    OpCase(
        OP,
        (f(4, 3, 3, 2), f(3), f(3), fixed(f(3)), fixed(positive(3))),
        {"training_mode": 1},
        torch=first(training()),
        outputs=("y", "_mean", "_var"),
        id="training",
    ),
    OpCase(
        OP,
        (f(6, 3), f(3), f(3), f(3), positive(3)),
        {"training_mode": 1, "momentum": 0.7, "epsilon": 0.01},
        torch=training(0.01, 0.7),
        outputs=3,
        id="training-running-statistics",
    ),
    OpCase(
        OP,
        (f(3, 2, 4), f(2), f(2), f(2), positive(2)),
        {"training_mode": 1},
        torch=training(),
        outputs=3,
        id="training-one-axis",
    ),
    # Without memory the new statistics are the batch's own, which the gradient reads.
    OpCase(
        OP,
        (f(3, 2, 3, 2), f(2), f(2), f(2), positive(2)),
        {"training_mode": 1, "momentum": 0.0},
        torch=training(momentum=0.0),
        outputs=3,
        id="training-forgetful",
    ),
    OpCase(
        OP,
        (f(2, 3, 6, 7), f(3), f(3), fixed(f(3)), fixed(positive(3))),
        {"training_mode": 1, "momentum": 0.0},
        torch=first(training(momentum=0.0)),
        outputs=("y", "_mean", "_var"),
        id="training-forgetful-many-positions",
    ),
]
