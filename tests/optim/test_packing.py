"""Tensors as one vector: nodes and arrays agree, and optimizers that say so work on vectors."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from onnxtrain import optim
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.optim.vectors import Pack, groups_with_equal_settings
from tests.optim.test_optimizers import SETTINGS

FLOAT = ir.DataType.FLOAT
SHAPES = {"w": (4, 3), "b": (3,), "scale": ()}
FLOAT32 = np.dtype("float32")
PACK = Pack("all", tuple(SHAPES), tuple(SHAPES.values()), FLOAT32)


def arrays(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {n: np.asarray(rng.standard_normal(s), np.float32) for n, s in SHAPES.items()}


def finished(op: OpBuilder, **outputs: ir.Value) -> onnxruntime.InferenceSession:
    for name, value in outputs.items():
        out = op.Identity(value)
        out.name = f"{name}.out"
        op.graph.outputs.append(out)
    model = ir.to_proto(ir.Model(op.graph, ir_version=10))
    return onnxruntime.InferenceSession(model.SerializeToString())


def builder() -> OpBuilder:
    return OpBuilder(ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="packing"))


@pytest.mark.parametrize(
    "pack",
    [PACK, Pack("vector", ("w",), ((4, 3),), FLOAT32), Pack("w", ("w",), ((4, 3),), FLOAT32)],
    ids=["several", "one", "as it is"],
)
def test_nodes_do_what_is_done_to_arrays(pack: Pack) -> None:
    op = builder()
    values = {n: op.input(n, FLOAT, SHAPES[n]) for n in pack.members}
    vector = pack.join(op, values)
    parts = pack.split(op, vector)
    given = {n: arrays(0)[n] for n in pack.members}
    session = finished(op, vector=vector, **{f"{n}.part": v for n, v in parts.items()})
    results = session.run(None, given)
    joined = pack.join_arrays(given)
    np.testing.assert_array_equal(results[0], joined)
    assert joined.ndim == (1 if pack.joined else 2)
    split = pack.split_array(joined)
    assert list(split) == list(parts) == list(pack.members)
    for name, result in zip(pack.members, results[1:], strict=True):
        np.testing.assert_array_equal(result, given[name])
        np.testing.assert_array_equal(split[name], given[name])
        assert np.shares_memory(split[name], joined)


def after_steps(optimizer: optim.Optimizer, packs: list[Pack]) -> dict[str, np.ndarray]:
    """Return the parameters after three steps on the packed tensors."""
    op = builder()
    lr, step = op.input("lr", FLOAT, [1]), op.input("step", ir.DataType.INT64, [1])
    whole = {p.name: p.join_arrays(arrays(0)) for p in packs}
    parameters = {n: op.input(n, FLOAT, a.shape) for n, a in whole.items()}
    gradients = {n: op.input(f"{n}_grad", FLOAT, a.shape) for n, a in whole.items()}
    slots = {
        f"{n}.{s.name}": s for n, a in whole.items() for s in optimizer.slots(n, a.shape, FLOAT)
    }
    state = {n: op.input(n, s.dtype, s.dims) for n, s in slots.items()}
    new, new_state = optimizer.apply(op, parameters, gradients, state, lr, step)
    session = finished(op, **new, **new_state)
    known = {x.name for x in session.get_inputs()}
    values = whole | {n: np.full(s.dims, s.init, np.float32) for n, s in slots.items()}
    for number in (1, 2, 3):
        feeds = values | {f"{p.name}_grad": p.join_arrays(arrays(number)) for p in packs}
        feeds["lr"] = np.array([optimizer.lr], np.float32)
        feeds["step"] = np.array([number])
        results = session.run(None, {n: a for n, a in feeds.items() if n in known})
        values = dict(zip([*new, *new_state], results, strict=True))
    return {n: a for p in packs for n, a in p.split_array(values[p.name]).items()}


@pytest.mark.parametrize("name", SETTINGS)
def test_elementwise_is_true(name: str) -> None:
    """Elementwise optimizers update a vector as they update its parts; no other optimizer does.

    State of a vector is a vector, so one with scalar state (NAdam) is not elementwise.
    """
    optimizer = SETTINGS[name]
    alone = [Pack(n, (n,), (shape,), FLOAT32) for n, shape in SHAPES.items()]
    apart, joined = after_steps(optimizer, alone), after_steps(optimizer, [PACK])
    same = all(np.allclose(joined[n], apart[n], rtol=1e-6, atol=1e-7) for n in SHAPES)
    like = all(slot.dims == (3,) for slot in optimizer.slots("w", (3,), ir.DataType.FLOAT))
    assert optimizer.elementwise == (same and like)


def test_a_subclass_says_itself_that_it_works_by_element() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Other(optim.SGD):
        lr: float = 0.5

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Mixing(optim.SGD):
        def chain(self, weight_decay: float):
            return ()

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Slower(optim.SGD):
        elementwise = True

        def chain(self, weight_decay: float):
            return ()

    assert Other().elementwise, "the update is that of SGD"
    assert (Mixing().elementwise, Slower().elementwise) == (False, True)
    assert groups_with_equal_settings(Mixing(), {"w": FLOAT32, "b": FLOAT32}) == []
    assert groups_with_equal_settings(Slower(), {"w": FLOAT32, "b": FLOAT32}) == [("w", "b")]


def test_settings_and_dtypes_make_groups() -> None:
    optimizer = optim.AdamW(groups=[optim.ParamGroup("*.bias", weight_decay=0.0)])
    dtypes = {"a.weight": FLOAT32, "a.bias": FLOAT32, "b.weight": np.dtype("float64")}
    dtypes |= {"c.weight": FLOAT32, "c.bias": FLOAT32}
    assert groups_with_equal_settings(optimizer, dtypes) == [
        ("a.weight", "c.weight"),
        ("a.bias", "c.bias"),
        ("b.weight",),
    ]
