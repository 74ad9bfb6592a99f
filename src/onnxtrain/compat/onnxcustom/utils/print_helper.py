"""Values of onnxruntime as text."""

from __future__ import annotations

from typing import Any


def str_ortvalue(ov: Any) -> str:
    """Return device, type, shape and the first and last elements of an OrtValue."""
    ov = getattr(ov, "_ortvalue", ov)
    array = ov.numpy()
    values = array.ravel().tolist()
    if len(values) > 10:
        values = [*values[:5], "...", *values[-5:]]
    return f"device={ov.device_name()} dtype={array.dtype!r} shape={array.shape!r} value={values!r}"
