"""Optimizer state in 8 bits: the rounding, training beside 32 bits, size and checkpoints."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

import onnxtrain
from onnxtrain import Trainer, examples, optim
from onnxtrain.errors import PrepareError
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.optim import quantized_state as Q
from onnxtrain.optim.transforms import Slot

FLOAT = ir.DataType.FLOAT


def round_trip(values: np.ndarray, name: str, target: str = "cpu") -> tuple[np.ndarray, ...]:
    """Return bytes, scales and the values that are read from them."""
    slot = Slot(name, values.shape, FLOAT)
    op = OpBuilder(ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="q"), target=target)
    parts = list(Q.quantize(op, slot, op.input("x", FLOAT, values.shape)).values())
    for i, y in enumerate([*parts, Q.dequantize(op, slot, *parts)]):
        out = op.Identity(y)
        out.name = f"y{i}"
        op.graph.outputs.append(out)
    proto = ir.to_proto(ir.Model(op.graph, ir_version=10))
    return tuple(onnxruntime.InferenceSession(proto.SerializeToString()).run(None, {"x": values}))


def expected(values: np.ndarray, nonnegative: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the same bytes and values, computed by numpy in float64."""
    flat = values.reshape(-1).astype(np.float64)
    blocks = np.pad(flat, (0, -len(flat) % Q.BLOCK)).reshape(-1, Q.BLOCK)
    scale = np.abs(blocks).max(1, keepdims=True)
    r = blocks / np.maximum(scale, 1e-38)
    if nonnegative:
        levels = np.maximum(np.rint(255 * r**0.25), 1)
        back = (levels / 255) ** 4 * scale
    else:
        levels = np.rint(127 * np.sign(r) * np.abs(r) ** 0.5) + 127
        c = (levels - 127) / 127
        back = c * np.abs(c) * scale
    return levels, back.reshape(-1)[: len(flat)].reshape(values.shape)


@pytest.mark.parametrize("target", ["cpu", "cuda", "wasm"])
@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
def test_rounding_is_that_of_the_formula(name: str, target: str) -> None:
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((50, 90)) * 10.0 ** rng.uniform(-6, 0, (50, 90))).astype(np.float32)
    x[3] = 0
    x = np.abs(x) if name == "exp_avg_sq" else x
    levels, _, back = round_trip(x, name, target)
    theirs, values = expected(x, name == "exp_avg_sq")
    assert levels.dtype == np.uint8
    assert np.abs(levels.astype(int) - theirs).max() <= 1  # at ties
    assert (levels == theirs).mean() > 0.999
    close = np.abs(back - values) <= 0.03 * np.abs(values) + 1e-12
    assert close.mean() > 0.999
    if name == "exp_avg_sq":
        assert np.all(back[x > 0] > 0)
    else:
        assert np.all(back[x == 0] == 0)


def dynamic_levels(signed: bool) -> np.ndarray:
    """Return the 256 levels of bitsandbytes: decades, each with twice as many as the one below."""
    bits = 7 if signed else 8
    edges = [np.linspace(0.1, 1, 2**i + 1) for i in range(bits)]
    decades = [10.0 ** (i + 1 - bits) * (e[1:] + e[:-1]) / 2 for i, e in enumerate(edges)]
    positive = np.concatenate(decades)
    levels = [positive, -positive, [0.0, 1.0]] if signed else [positive, [0.0]]
    return np.sort(np.concatenate(levels))


def by_table(values: np.ndarray, signed: bool) -> np.ndarray:
    """Return values rounded to the nearest level of their block."""
    blocks, table = values.reshape(-1, Q.BLOCK), dynamic_levels(signed)
    scale = np.abs(blocks).max(1, keepdims=True)
    ratio = blocks / scale
    i = np.clip(np.searchsorted(table, ratio), 1, len(table) - 1)
    lower, upper = table[i - 1], table[i]
    return (np.where(ratio - lower < upper - ratio, lower, upper) * scale).reshape(values.shape)


def test_updates_are_closer_than_those_of_bitsandbytes() -> None:
    assert len(dynamic_levels(True)) == len(dynamic_levels(False)) == 256
    artifacts = onnxtrain.build(
        examples.digits_model(hidden=128), loss="cross_entropy", optimizer="adamw:lr=0.003"
    )
    trainer = Trainer(artifacts)
    trainer.fit(examples.digits_data(600), epochs=3, progress=False)
    state = trainer.state_dict()
    m, v = state["optim/exp_avg/fc1.weight"], state["optim/exp_avg_sq/fc1.weight"]
    theirs = by_table(m, True), by_table(v, False)
    ours = round_trip(m, "exp_avg")[-1], round_trip(v, "exp_avg_sq")[-1]
    update = m / (np.sqrt(v) + 1e-8)
    errors = [np.std(a / (np.sqrt(b) + 1e-8) - update) / np.std(update) for a, b in (ours, theirs)]
    assert errors[0] < 0.8 * errors[1] < 0.02


OPTIMIZERS = [
    optim.AdamW(lr=0.005),
    optim.Lion(lr=0.0005),
    optim.Muon(lr=0.005),
    optim.SGD(lr=0.1, momentum=0.9),
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
def test_trains_like_32_bits(optimizer: optim.Optimizer, tmp_path: Path) -> None:
    import dataclasses

    model = examples.digits_model(hidden=128)
    data = examples.digits_data(1200)
    losses, sizes = [], []
    for bits in (32, 8):
        settings = dataclasses.replace(optimizer, state_bits=bits)
        artifacts = onnxtrain.build(model, loss="cross_entropy", optimizer=settings)
        trainer = Trainer(artifacts, seed=0)
        history = trainer.fit(data, epochs=5, progress=False)
        losses.append(history.losses[-1])
        large = [s for s in artifacts.manifest.state if s.parameter == "fc1.weight"]
        sizes.append(sum(np.prod(s.shape) * np.dtype(s.dtype).itemsize for s in large))
        if bits == 8:
            trainer.save(tmp_path / "c")
            again = Trainer(artifacts, seed=0)
            again.load(tmp_path / "c")
            batch = {n: v[:32] for n, v in data.items()}
            assert again.step(**batch).loss == trainer.step(**batch).loss
    assert losses[1] == pytest.approx(losses[0], rel=0.1)
    assert sizes[1] <= 0.28 * sizes[0]


def test_refusals() -> None:
    with pytest.raises(PrepareError, match="state_bits must be 8 or 32"):
        optim.AdamW(state_bits=4)
    with pytest.raises(PrepareError, match="webgpu has no 8-bit integers\nhint: state_bits=32"):
        onnxtrain.build(
            examples.digits_model(hidden=128),
            loss="cross_entropy",
            optimizer=optim.AdamW(state_bits=8),
            target="webgpu",
        )
