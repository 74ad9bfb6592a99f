"""This package under the name ``onnxruntime.training``."""

from __future__ import annotations

import sys

from onnxtrain.compat.ort import agent, training_session
from onnxtrain.errors import CompatError
from onnxtrain.runtime.session import runtime

_OWN = "onnxtrain.compat.ort"
_OLD = "onnxruntime.training"
# Old programs took these from onnxruntime itself and from its binding.
_AT_TOP = ("TrainingParameters", "TrainingSession")
_IN_BINDING = (*agent.__all__, *_AT_TOP)


def install() -> None:
    """Make ``import onnxruntime.training`` and its submodules give this package.

    ``onnxruntime`` and ``onnxruntime.capi._pybind_state`` get the names of the first two training
    APIs, where they do not have them.

    Raises:
        CompatError: if onnxruntime-training itself is imported already.
    """
    ort = runtime()
    imported = sys.modules.get(_OLD)
    if imported is not None and imported is not sys.modules[_OWN]:
        raise CompatError(
            "onnxruntime.training is imported already, and is not this package\n"
            "hint: call install() before anything else imports it"
        )
    for name, module in list(sys.modules.items()):
        if name == _OWN or name.startswith(f"{_OWN}."):
            sys.modules[_OLD + name.removeprefix(_OWN)] = module
    binding = ort.capi._pybind_state
    for name in _IN_BINDING:
        value = getattr(agent, name, None) or getattr(training_session, name)
        for place in (binding, ort) if name in _AT_TOP else (binding,):
            if not hasattr(place, name):
                setattr(place, name, value)
    ort.training = sys.modules[_OWN]  # pyright: ignore[reportAttributeAccessIssue]
