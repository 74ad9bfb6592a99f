"""Checkpoints: contents, compatibility with safetensors, and damaged files."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load, save

from onnxtrain.checkpoint import from_bytes, load_checkpoint, save_checkpoint, to_bytes
from onnxtrain.errors import CheckpointError

TENSORS = {
    "w": np.arange(6, dtype=np.float32).reshape(2, 3),
    "h": np.ones(3, np.float16),
    "b": np.ones((2, 1), ml_dtypes.bfloat16),
    "n": np.array(7, np.int64),
    "none": np.zeros((0, 4), np.float64),
    "yes": np.array([True, False, True]),
    "größe": np.ones(1, np.uint8),
}
META = {"step": 3, "lr": 0.1, "properties": {"note": "äöü", "n": 1}}


def test_round_trip() -> None:
    content = to_bytes(TENSORS, META)
    tensors, meta = from_bytes(content)
    assert meta == META
    assert tensors.keys() == TENSORS.keys()
    for name, array in TENSORS.items():
        assert tensors[name].dtype == array.dtype
        np.testing.assert_array_equal(tensors[name], array)
    assert to_bytes(dict(reversed(TENSORS.items())), dict(reversed(META.items()))) == content


def test_safetensors_reads_it(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "c", TENSORS, META)
    with safe_open(tmp_path / "c", "np") as file:
        assert list(file.metadata()) == ["onnxtrain"]
        assert json.loads(file.metadata()["onnxtrain"])["step"] == 3
    plain = {n: a for n, a in TENSORS.items() if n != "b"}  # numpy's loader knows no bfloat16
    loaded = load(to_bytes(plain, META))
    for name, array in plain.items():
        np.testing.assert_array_equal(loaded[name], array)


def test_it_reads_safetensors() -> None:
    tensors, meta = from_bytes(save({"w": TENSORS["w"]}, {"format": "np"}))
    assert meta == {}
    np.testing.assert_array_equal(tensors["w"], TENSORS["w"])


def test_unsupported_types() -> None:
    with pytest.raises(CheckpointError, match=r"does not support the type of z \(complex64\)"):
        to_bytes({"z": np.zeros(1, np.complex64)}, {})


def test_every_truncation_is_detected() -> None:
    content = to_bytes(TENSORS, META)
    for end in range(len(content)):
        with pytest.raises(CheckpointError):
            from_bytes(content[:end])
    with pytest.raises(CheckpointError, match="bytes after the last tensor"):
        from_bytes(content + b"x")


@pytest.mark.parametrize("bit", [0x01, 0x10])
def test_every_flipped_byte_is_detected(bit: int) -> None:
    """Including the metadata key of the digest, without which nothing can be compared."""
    content = to_bytes(TENSORS, META)
    for at in range(len(content)):
        damaged = bytearray(content)
        damaged[at] ^= bit
        with pytest.raises(CheckpointError):
            from_bytes(bytes(damaged))


def test_unknown_metadata_is_accepted() -> None:
    others = {"info": '{"sha256": "of something else"}', "format": "np", "list": "[1]", "n": "3"}
    tensors, meta = from_bytes(save({"w": TENSORS["w"]}, others))
    assert meta == {}
    np.testing.assert_array_equal(tensors["w"], TENSORS["w"])


def entry(dtype: str = "F32", shape: tuple[int, ...] = (1,), at: tuple[int, ...] = (0, 4)) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": at}


def header(entries: dict) -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a checkpoint, 0 bytes long"),
        (b"\xff" * 8, "not a checkpoint, or truncated"),
        (header({}) + b"", None),
        ((2).to_bytes(8, "little") + b"[]", "the header is not an object"),
        ((3).to_bytes(8, "little") + b"{,}", "the header is damaged"),
        ((100_000).to_bytes(8, "little") + b"[" * 100_000, "the header is damaged"),
        (header({"w": 3}), "a tensor has no offsets"),
        (header({"w": entry(at=(0,))}), "invalid entry of tensor"),
        (header({"w": entry("F99")}), "invalid entry of tensor"),
        (header({"w": entry(shape=(-1,))}), "must be integers"),
        (header({"w": entry(at=(4, 8))}), "do not match its shape and dtype"),
        (header({"w": entry(shape=(1 << 60, 1), at=(0, 0))}), "do not match its shape and dtype"),
        (header({"w": entry(shape=(1 << 62, 4), at=(0, 0))}), "no array has the shape"),
        (header({"w": entry(shape=(0, 2**63 - 1), at=(0, 0))}), "no array has the shape"),
        (header({"w": entry(shape=(0, 10**40), at=(0, 0))}), "no array has the shape"),
        (header({"w": entry(shape=(1,) * 65)}) + b"1234", "65 dimensions, the limit is 32"),
        (header({"w": entry(shape=(0,) * 33, at=(0, 0))}), "33 dimensions, the limit is 32"),
        (header({"w": entry(shape=(2,), at=(0, 8))}) + b"1234", "truncated"),
        (header({"__metadata__": {"onnxtrain": "{"}}), "the metadata is damaged"),
        (header({"__metadata__": {"onnxtrain": "[]"}}), "the metadata is not an object"),
        (
            header({"__metadata__": {"onnxtrain": '{"step": 1}'}}),
            "its sha256 differs from the recorded",
        ),
    ],
)
def test_invalid_files(content: bytes, message: str | None) -> None:
    if message is None:
        assert from_bytes(content) == ({}, {})
        return
    with pytest.raises(CheckpointError, match=message):
        from_bytes(content)


def test_random_bytes_are_refused() -> None:
    choose = random.Random(0)
    for _ in range(300):
        noise = choose.randbytes(choose.randrange(64))
        for content in (noise, struct.pack("<Q", len(noise)) + noise):
            with pytest.raises(CheckpointError):
                from_bytes(content)


def test_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "c"
    save_checkpoint(path, {"w": TENSORS["w"]}, META)
    before = path.read_bytes()

    def fail(*arguments: object) -> None:
        raise OSError(5, "Input/output error")

    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(f"os.{name}", fail)
            with pytest.raises(ValueError, match="cannot be written"):
                save_checkpoint(path, TENSORS, META)
        assert path.read_bytes() == before
        assert [p.name for p in tmp_path.iterdir()] == ["c"]
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_checkpoint(tmp_path / "nowhere")
