"""Artifacts of a small classifier, and a comparison of state_dicts."""

from __future__ import annotations

import numpy as np

from onnxtrain import losses, optim
from onnxtrain.artifacts import Artifacts
from onnxtrain.artifacts.build import build
from tests.artifacts.models import classifier

LOSS = [losses.LossTerm("cross_entropy", output="scores")]


def made(**options: object) -> Artifacts:
    settings = {"loss": LOSS, "optimizer": optim.SGD(lr=0.1), **options}
    return build(classifier(), **settings)  # type: ignore[arg-type]


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)
