"""torch tensors and OrtValues over the same memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from onnxtrain.runtime import session as runtime


def to_array(t: torch.Tensor) -> np.ndarray:
    """Return an array over the tensor's memory; numpy knows no bfloat16."""
    if t.requires_grad:
        t = t.detach()
    return (t if t.is_contiguous() else t.contiguous()).numpy()


def to_runtime(t: torch.Tensor) -> Any:
    """Return an OrtValue over the tensor's memory; it lives as long as the tensor."""
    t = t.detach()
    if not t.is_contiguous():
        t = t.contiguous()
    kind = runtime.runtime().OrtValue
    if t.device.type == "cpu" and t.dtype is not torch.bfloat16:
        return kind.ortvalue_from_numpy(t.numpy())
    return kind.from_dlpack(_Flags(t) if t.dtype is torch.bool else t)


class _Flags:
    """A tensor of bools as onnxruntime imports it: bytes in DLPack, the type told apart."""

    def __init__(self, t: torch.Tensor) -> None:
        self.dtype, self._bytes = t.dtype, t.view(torch.uint8)

    def __dlpack__(self) -> Any:
        return self._bytes.__dlpack__()


def to_torch(value: Any) -> torch.Tensor:
    """Return a tensor over the OrtValue's memory, which it keeps alive."""
    if value.device_name() == "cpu" and value.data_type() != "tensor(bfloat16)":
        array = value.numpy()
        return torch.from_numpy(array) if array.flags.writeable else torch.tensor(array)
    t = torch.from_dlpack(value)
    return t.view(torch.bool) if value.data_type() == "tensor(bool)" else t
