"""Batches copied to pinned memory, which a fake CUDA runtime allocates."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from onnxtrain import optim, thresholds
from onnxtrain.runtime import binding, ort_values
from onnxtrain.runtime.ort_values import DeviceMemory
from onnxtrain.training import Trainer
from tests.artifacts.models import data
from tests.training.made import made


class Library:
    """Has the functions of the CUDA runtime that are used, with memory of Python's."""

    def __init__(self, *, full: bool = False) -> None:
        self.full, self.cleared = full, 0
        self.blocks: dict[int, Any] = {}

    def cudaHostAlloc(self, address: Any, size: ctypes.c_size_t, flags: ctypes.c_uint) -> int:
        if self.full:
            return 2
        block = ctypes.create_string_buffer(size.value)
        address._obj.value = ctypes.addressof(block)
        self.blocks[ctypes.addressof(block)] = block
        return 0

    def cudaFreeHost(self, address: ctypes.c_void_p) -> int:
        del self.blocks[address.value or 0]
        return 0

    def cudaGetLastError(self) -> int:
        self.cleared += 1
        return 2


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    """Let small batches be large ones, on a machine with many cores."""
    given = Library()
    monkeypatch.setattr(ort_values, "cuda_library", lambda: given)
    monkeypatch.setattr(ort_values, "available_cores", lambda: 16)
    monkeypatch.setattr(thresholds, "STAGED_BATCH_BYTES", 64)
    return given


@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.uint8, ml_dtypes.bfloat16])
def test_a_batch_is_copied_and_memory_freed(library: Library, dtype: Any) -> None:
    array = np.arange(7 * 11, dtype=np.int64).reshape(7, 11).astype(dtype)
    pinned = ort_values.pinned_buffer_for(array)
    assert pinned is not None
    assert len(library.blocks) == 1
    for batch in (array, array[::-1].copy()):
        assert pinned.fits(batch)
        np.testing.assert_array_equal(pinned.fill(batch), batch)
    assert not pinned.fits(array[:3])
    assert not pinned.fits(array.astype(np.float64))
    del pinned
    gc.collect()
    assert not library.blocks


def test_no_pinned_memory(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    array = np.zeros(100, np.float32)
    assert ort_values.pinned_buffer_for(array[:10]) is None, "too small"
    library.full = True
    assert ort_values.pinned_buffer_for(array) is None
    assert library.cleared == 1, "an error that is left would be another's"
    library.full = False
    monkeypatch.setattr(ort_values, "available_cores", lambda: 2)
    assert ort_values.pinned_buffer_for(array) is None
    monkeypatch.setattr(ort_values, "available_cores", lambda: 16)
    monkeypatch.setattr(ort_values, "cuda_library", lambda: None)
    assert ort_values.pinned_buffer_for(array) is None


def test_the_loaded_cuda_runtime_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = []
    monkeypatch.setattr(ort_values.ctypes, "CDLL", lambda path: loaded.append(path) or Library())
    maps = tmp_path / "maps"
    monkeypatch.setattr(ort_values, "_MAPS", maps)
    find = ort_values.cuda_library.__wrapped__
    assert find() is None, "no such file on this system"
    maps.write_text("7f00-7f01 r--p 00000000 08:01 12 /lib/libc.so.6\n")
    assert find() is None
    maps.write_text("7f00-7f01 r-xp 00000000 08:01 12 /opt/with space/libcudart.so.13\n" * 2)
    assert isinstance(find(), Library)
    assert loaded == ["/opt/with space/libcudart.so.13"]


def test_steps_through_pinned_memory_are_the_same(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Trainer(made(optimizer=optim.AdamW(lr=0.01)))
    monkeypatch.setattr(binding, "memory_for", lambda *_: DeviceMemory("cpu"))
    device = Trainer(made(optimizer=optim.AdamW(lr=0.01)))
    for seed, size in enumerate((8, 8, 5, 5, 8)):
        batch = data(size, seed=seed)
        assert plain.step(*batch).loss == device.step(*batch).loss
    assert library.blocks
    for name, array in plain.state_dict().items():
        np.testing.assert_array_equal(array, device.state_dict()[name], err_msg=name)
