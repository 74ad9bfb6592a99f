"""Arrays in and out of onnxruntime, also in the types that numpy has only through ml_dtypes."""

import ctypes

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime


def to_ort(array: np.ndarray) -> onnxruntime.OrtValue:
    """The array as a value of onnxruntime, four- and two-bit elements packed."""
    array = np.ascontiguousarray(array).reshape(array.shape)
    if array.dtype.kind in "biufSUO" and not _extended(array.dtype):
        return onnxruntime.OrtValue.ortvalue_from_numpy(array)
    kind = int(ir.DataType.from_numpy(array.dtype))
    value = onnxruntime.OrtValue.ortvalue_from_shape_and_type(list(array.shape), kind)
    raw = ir.tensor(array).tobytes()  # as a TensorProto's raw data: packed, little-endian
    ctypes.memmove(value.data_ptr(), raw, min(len(raw), value.tensor_size_in_bytes()))
    return value


def from_ort(value: onnxruntime.OrtValue) -> np.ndarray:
    """The value as an array of its own type."""
    if not value.is_tensor() or value.element_type() != onnx.TensorProto.BFLOAT16:
        return value.numpy()
    raw = ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes())
    return np.frombuffer(raw, dtype=ml_dtypes.bfloat16).reshape(value.shape())


def _extended(dtype: np.dtype) -> bool:
    return hasattr(ml_dtypes, dtype.name)
