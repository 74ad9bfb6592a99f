"""Files of adapters, as onnxruntime itself writes and reads them."""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np

from onnxtrain.errors import SaveError
from onnxtrain.runtime.session import runtime
from onnxtrain.runtime.values import ort_value

_VERSION = 1  # of adapter and model: nobody else counts them


def write_adapter(path: str | os.PathLike[str], arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays by the names of a model's inputs to an ``.onnx_adapter`` file.

    Raises:
        SaveError: the file system refuses.
    """
    ort = runtime()
    target = os.path.abspath(os.fsdecode(path))
    os.makedirs(os.path.dirname(target), exist_ok=True)
    file = ort.AdapterFormat()
    file.set_adapter_version(_VERSION)
    file.set_model_version(_VERSION)
    file.set_parameters({n: ort_value(a) for n, a in arrays.items()})
    part = f"{target}.part"
    try:
        file.export_adapter(part)
        os.replace(part, target)
    except (OSError, RuntimeError) as error:
        raise SaveError(f"{os.fsdecode(path)!r}: cannot be written\n  {error}") from error


__all__ = ["write_adapter"]
