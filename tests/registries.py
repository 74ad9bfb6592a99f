"""The registries of classes by name, for tests that add to them."""

from __future__ import annotations

import pytest

from onnxtrain import losses, optim

REGISTRIES = (losses.LOSSES, losses.METRICS, optim.OPTIMIZERS, optim.SCHEDULES)


def restore_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what is registered from now on go when the test ends."""
    for registry in REGISTRIES:
        monkeypatch.setattr(registry, "_kinds", dict(registry))
