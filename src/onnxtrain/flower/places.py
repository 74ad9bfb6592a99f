"""Artifacts that an app is given, or finds by its context."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from onnxtrain.artifacts import Artifacts
from onnxtrain.flower.api import Context

Place = Artifacts | str | os.PathLike[str] | Callable[[Any], Artifacts | str | os.PathLike[str]]
"""Artifacts, their directory, or a function from Flower's ``Context`` to one of these."""


def resolved(place: Place, context: Context) -> Artifacts | str | os.PathLike[str]:
    """Return the artifacts or the directory that an app is to take."""
    return place if isinstance(place, Artifacts | str | os.PathLike) else place(context)
