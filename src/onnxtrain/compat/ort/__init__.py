"""``onnxruntime.training`` on stock onnxruntime: change the import, keep the code.

>>> from onnxtrain.compat.ort import artifacts, onnxblock
>>> from onnxtrain.compat.ort.api import CheckpointState, Module, Optimizer

or, without touching the code that imports it:

>>> import onnxtrain.compat.ort
>>> onnxtrain.compat.ort.install()  # doctest: +SKIP
"""

from onnxtrain.compat.ort import api, artifacts, onnxblock
from onnxtrain.compat.ort.aliases import __getattr__ as __getattr__
from onnxtrain.compat.ort.aliases import install, is_ortmodule_available

__all__ = ["api", "artifacts", "install", "is_ortmodule_available", "onnxblock"]
