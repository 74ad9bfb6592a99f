"""Checkpoints of onnxruntime-training: two written by version 1.19.2, others built here."""

from __future__ import annotations

import random
from pathlib import Path

import flatbuffers
import numpy as np
import onnx_ir as ir
import pytest

from onnxtrain import optim
from onnxtrain.artifacts.build import build
from onnxtrain.checkpoint import load_checkpoint
from onnxtrain.checkpoint.ort_checkpoint import parse_odtc, read_odtc
from onnxtrain.errors import CheckpointError
from onnxtrain.training import Trainer
from tests.artifacts.models import finished, graph, weight

FIXTURES = Path(__file__).parents[1] / "fixtures"
TRAINED, FRESH = FIXTURES / "ort_training.ckpt", FIXTURES / "ort_training_fresh.ckpt"


def test_checkpoints_written_by_onnxruntime() -> None:
    trained = read_odtc(TRAINED)
    expected = np.load(FIXTURES / "ort_training.npz")
    assert list(trained.parameters) == ["fc1.bias", "fc1.weight", "fc2.weight"]
    assert list(trained.frozen) == ["fc2.bias"]
    for name, array in {**trained.parameters, **trained.frozen}.items():
        np.testing.assert_array_equal(array, expected[name])
    assert trained.moments.keys() == trained.parameters.keys()
    assert list(trained.moments["fc1.bias"]) == ["momentum0", "momentum1"]
    assert (trained.step, trained.lr) == (3, pytest.approx(1e-3))
    assert trained.properties == {"epoch": 3, "best": 0.25, "name": "peer"}
    assert not trained.nominal
    fresh = read_odtc(FRESH)
    assert (fresh.step, fresh.lr, fresh.moments, fresh.properties) == (0, None, {}, {})
    assert fresh.parameters.keys() == trained.parameters.keys()


def test_training_resumes_from_it() -> None:
    op = graph()
    x = op.input("x", ir.DataType.FLOAT, ["n", 3])
    old = {**read_odtc(FRESH).parameters, **read_odtc(FRESH).frozen}
    values = {n: weight(op, n, np.array(a)) for n, a in sorted(old.items())}
    h = op.Relu(op.Gemm(x, values["fc1.weight"], values["fc1.bias"]))
    model = finished(op, y=op.Gemm(h, values["fc2.weight"], values["fc2.bias"]))
    optimizer = optim.AdamW(form="hf", weight_decay=0.0)
    artifacts = build(model, loss="mse", optimizer=optimizer, freeze="fc2.bias", mode="as-is")
    trainer = Trainer(artifacts)
    meta = trainer.load(TRAINED)
    assert meta["step"] == trainer.global_step == 3
    assert trainer.properties["name"] == "peer"
    np.testing.assert_array_equal(
        trainer.parameters["fc1.weight"], read_odtc(TRAINED).parameters["fc1.weight"]
    )
    np.testing.assert_array_equal(
        trainer.state_dict()["optim/exp_avg/fc1.bias"],
        read_odtc(TRAINED).moments["fc1.bias"]["momentum0"],
    )
    # The same three steps of the same data lead from the fresh checkpoint to the trained one.
    other = Trainer(artifacts)
    other.load_weights(FRESH, strict=False)
    rng = np.random.default_rng(0)
    for shape in ((3, 4), (4,), (4, 2), (2,)):
        rng.standard_normal(shape)
    batch = [rng.standard_normal(s).astype(np.float32) for s in ((5, 3), (5, 2))]
    losses = [other.step(*batch).loss for _ in range(3)]
    assert losses == pytest.approx([3.0230913, 3.006956, 2.990916], rel=1e-5)
    for name, array in read_odtc(TRAINED).parameters.items():
        np.testing.assert_allclose(other.parameters[name], array, rtol=1e-4, atol=1e-5)


def made(
    *,
    version: int = 2,
    nominal: bool = False,
    external: bytes | None = None,
    kind: int = 1,
    dims: tuple[int, ...] = (2, 2),
    moments: int = 1,
) -> bytes:
    """Build a checkpoint with the flatbuffers library."""
    b = flatbuffers.Builder()

    def tensor(name: str, array: np.ndarray, offset: int | None = None) -> int:
        text = b.CreateString(name)
        data = b.CreateByteVector(array.tobytes()) if offset is None and not nominal else None
        b.StartVector(8, len(dims), 8)
        for d in reversed(dims):
            b.PrependInt64(d)
        sizes = b.EndVector()
        b.StartObject(7)
        b.PrependUOffsetTRelativeSlot(0, text, 0)
        b.PrependUOffsetTRelativeSlot(2, sizes, 0)
        b.PrependInt32Slot(3, kind, 0)
        if data is not None:
            b.PrependUOffsetTRelativeSlot(4, data, 0)
        if offset is not None:
            b.PrependInt64Slot(6, offset, -1)
        return b.EndObject()

    def vector(items: list[int]) -> int:
        b.StartVector(4, len(items), 4)
        for item in reversed(items):
            b.PrependUOffsetTRelative(item)
        return b.EndVector()

    w = np.arange(4, dtype=np.float32)
    trainable = vector([tensor("w", w, None if external is None else 4)])
    states = vector([tensor(f"momentum{i}", w + i) for i in range(moments)])
    name = b.CreateString("w")
    b.StartObject(2)
    b.PrependUOffsetTRelativeSlot(0, name, 0)
    b.PrependUOffsetTRelativeSlot(1, states, 0)
    entries = vector([b.EndObject()])
    b.StartObject(4)
    b.PrependInt64Slot(1, 7, 0)
    b.PrependFloat32Slot(2, 0.5, 0.0)
    b.PrependUOffsetTRelativeSlot(3, entries, 0)
    groups = vector([b.EndObject()])
    b.StartObject(4)
    b.PrependUOffsetTRelativeSlot(0, trainable, 0)
    b.PrependBoolSlot(2, nominal, False)
    b.PrependBoolSlot(3, external is not None, False)
    module = b.EndObject()
    b.StartObject(4)
    b.PrependInt32Slot(0, version, 0)
    b.PrependUOffsetTRelativeSlot(1, module, 0)
    b.PrependUOffsetTRelativeSlot(2, groups, 0)
    b.Finish(b.EndObject(), b"ODTC")
    return bytes(b.Output())


def test_momentum_of_sgd(tmp_path: Path) -> None:
    (tmp_path / "c").write_bytes(made())
    tensors, meta = load_checkpoint(tmp_path / "c")
    assert tensors.keys() == {"w", "optim/momentum_buffer/w"}
    np.testing.assert_array_equal(tensors["w"], [[0, 1], [2, 3]])
    assert meta == {"step": 7, "lr": 0.5, "properties": {}}


def test_tensors_in_an_external_file(tmp_path: Path) -> None:
    values = np.arange(10, 14, dtype=np.float32)
    (tmp_path / "c").write_bytes(made(external=b"", moments=0))
    (tmp_path / "c.data").write_bytes(b"\0\0\0\0" + values.tobytes())
    np.testing.assert_array_equal(read_odtc(tmp_path / "c").parameters["w"].ravel(), values)
    (tmp_path / "c.data").write_bytes(b"\0\0\0\0" + values.tobytes()[:-1])
    with pytest.raises(CheckpointError, match=r"'w' of shape .* has 15 bytes"):
        read_odtc(tmp_path / "c")
    (tmp_path / "c.data").unlink()
    with pytest.raises(CheckpointError, match=r"\(\.data\): cannot be read"):
        read_odtc(tmp_path / "c")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a checkpoint of onnxruntime-training"),
        (made(version=3), "version 3"),
        (made(kind=8), "'w' has the element type 8|'momentum0' has the element type 8"),
        (made(dims=(2, 3)), r"of shape \[2, 3\] has 16 bytes"),
        (made(dims=(-2, -2)), r"has shape \[-2, -2\]"),
        (made(dims=(1 << 40, 1)), "has 16 bytes"),
        (made(dims=(1 << 40, 1 << 40)), "no array has the shape"),
        (made(dims=(1,) * 65), "65 dimensions, the limit is 32"),
    ],
)
def test_invalid_files(content: bytes, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parse_odtc(content, "c")


def test_nominal_checkpoints_have_no_weights(tmp_path: Path) -> None:
    (tmp_path / "c").write_bytes(made(nominal=True, moments=0))
    checkpoint = read_odtc(tmp_path / "c")
    assert checkpoint.nominal
    assert list(checkpoint.parameters) == ["w"]
    with pytest.raises(CheckpointError, match="a nominal checkpoint contains no weights"):
        load_checkpoint(tmp_path / "c")


def test_damage_raises_checkpoint_error() -> None:
    """Whichever bits flip, the reader returns a checkpoint or raises CheckpointError."""
    content, choose = TRAINED.read_bytes(), random.Random(0)
    refused = 0
    for _ in range(3000):
        damaged = bytearray(content)
        for _ in range(choose.randrange(1, 4)):
            damaged[choose.randrange(8, len(content))] = choose.randrange(256)
        try:
            parse_odtc(bytes(damaged), "c")
        except CheckpointError:
            refused += 1
    assert refused > 300
    for end in range(8, len(content), 7):
        with pytest.raises(CheckpointError):
            parse_odtc(content[:end], "c")
