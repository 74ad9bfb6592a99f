"""This package under the name ``onnxruntime.training``."""

from __future__ import annotations

import sys

from onnxtrain.errors import CompatError
from onnxtrain.runtime.session import runtime

_OWN = "onnxtrain.compat.ort"
_OLD = "onnxruntime.training"


def install() -> None:
    """Make ``import onnxruntime.training`` and its submodules give this package.

    Raises:
        CompatError: if onnxruntime-training itself is imported already.
    """
    ort = runtime()
    found = sys.modules.get(_OLD)
    if found is not None and found is not sys.modules[_OWN]:
        raise CompatError(
            "onnxruntime.training is imported already, and is not this package\n"
            "hint: call install() before anything else imports it"
        )
    for name, module in list(sys.modules.items()):
        if name == _OWN or name.startswith(f"{_OWN}."):
            sys.modules[_OLD + name.removeprefix(_OWN)] = module
    ort.training = sys.modules[_OWN]  # pyright: ignore[reportAttributeAccessIssue]
