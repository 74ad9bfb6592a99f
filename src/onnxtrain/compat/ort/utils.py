"""``onnxruntime.training.utils``: ONNX data types of torch dtypes, and back."""

from __future__ import annotations

import torch
from onnx import TensorProto

from onnxtrain.compat.ort.errors import OrtError

_TYPES = {
    "Bool": (torch.bool, TensorProto.BOOL),
    "Byte": (torch.uint8, TensorProto.UINT8),
    "Char": (torch.int8, TensorProto.INT8),
    "Short": (torch.int16, TensorProto.INT16),
    "Int": (torch.int32, TensorProto.INT32),
    "Long": (torch.int64, TensorProto.INT64),
    "Half": (torch.float16, TensorProto.FLOAT16),
    "BFloat16": (torch.bfloat16, TensorProto.BFLOAT16),
    "Float": (torch.float32, TensorProto.FLOAT),
    "Double": (torch.float64, TensorProto.DOUBLE),
    "ComplexFloat": (torch.complex64, TensorProto.COMPLEX64),
    "ComplexDouble": (torch.complex128, TensorProto.COMPLEX128),
}
"""torch's names of scalar types, as in ``FloatTensor``, with both data types."""


def pytorch_scalar_type_to_pytorch_dtype(dtype: str) -> torch.dtype:
    """Return the torch dtype of a scalar type: ``torch.float32`` for ``"Float"``."""
    return _matching(dtype)[0]


def pytorch_type_to_onnx_dtype(dtype_or_scalar_type: torch.dtype | str) -> int:
    """Return the ONNX data type of a torch dtype, or of a scalar type such as ``"Float"``."""
    return _matching(dtype_or_scalar_type)[1]


def onnx_dtype_to_pytorch_dtype(dtype: int) -> torch.dtype:
    """Return the torch dtype of an ONNX data type."""
    return _matching(int(dtype))[0]


def _matching(requested: str | torch.dtype | int) -> tuple[torch.dtype, int]:
    for name, types in _TYPES.items():
        if requested in (name, *types):
            return types
    raise OrtError(f"Unsupported dtype {requested}")


__all__ = [
    "onnx_dtype_to_pytorch_dtype",
    "pytorch_scalar_type_to_pytorch_dtype",
    "pytorch_type_to_onnx_dtype",
]
