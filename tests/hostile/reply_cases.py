"""Pass damaged replies of clients to the server of a federation; needs Flower."""

from __future__ import annotations

import contextlib
import io
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.task_identity import TaskIdentity

from onnxtrain.flower.messages import to_record
from onnxtrain.flower.server import CheckedStrategy
from onnxtrain.manifest import WeightSpec
from tests.hostile.run import Step, WrongError
from tests.hostile.traps import Traps

SPECS = (WeightSpec("w", "float32", (4, 3)), WeightSpec("b", "float32", (3,)))
_METRICS = (
    *(0, 1, -1, 1e300, -1e300, float("nan"), float("inf"), 2**62, [], [1.0, 2.0], [0.5] * 500),
    *(1e9, 1e10, 1e-300, 0.0, [float("nan")]),
)
_SHAPES: tuple[tuple[int, ...], ...] = ((4, 3), (3,), (), (0,), (2**40,), (3, 4), (-1,), (12,))
_TYPES = ("float32", "float64", "int64", "object", "U9", "", "x" * 999)


def steps_of_case(seed: int, traps: Traps) -> tuple[str, Iterator[Step]]:
    """Return the name of a case, and a round whose replies are damaged."""
    rng = random.Random(seed)
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    damaged = [node == 1 or rng.random() < 0.2 for node in range(1, 5)]
    replies = [_reply(rng, node, damaged=bad) for node, bad in enumerate(damaged, 1)]
    return "round", _steps(replies, rng, alone=sum(damaged) == 1)


def _steps(replies: list[Message], rng: random.Random, *, alone: bool) -> Iterator[Step]:
    strategy = CheckedStrategy(FedAvg(), SPECS)
    strategy._sent = {s.name: np.zeros(s.shape, np.float32) for s in SPECS}
    strategy._begin_exchange(1, replies)
    yield "aggregate_train", lambda: _train(strategy, replies, alone=alone)
    again = [_reply(rng, node, damaged=node == 1) for node in range(1, 5)]
    yield "aggregate_evaluate", lambda: _evaluate(strategy, again)


def _train(strategy: CheckedStrategy, replies: list[Message], *, alone: bool) -> None:
    """Aggregate the replies; one client alone must not move the weights far."""
    with contextlib.redirect_stdout(io.StringIO()):  # a worker answers on stdout
        arrays, metrics = strategy.aggregate_train(1, replies)
    if arrays is not None:
        for spec in SPECS:
            values = arrays[spec.name].numpy()
            largest = 10.0 if alone else 3e38
            if values.shape != tuple(spec.shape) or not (np.abs(values) <= largest).all():
                raise WrongError(f"{spec.name} became {values.ravel()[:3]}")
    _check_finite(metrics)


def _evaluate(strategy: CheckedStrategy, replies: list[Message]) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        metrics = strategy.aggregate_evaluate(1, replies)
    _check_finite(metrics)


def _check_finite(metrics: MetricRecord | None) -> None:
    for name, value in (metrics or {}).items():
        if not np.isfinite(value).all():
            raise WrongError(f"{name} became {value}")


def _reply(rng: random.Random, node: int, *, damaged: bool) -> Message:
    arrays: dict[str, Any] = dict(to_record({s.name: _values(s, node) for s in SPECS}))
    metrics: dict[str, Any] = {"num-examples": 10, "loss": 0.5}
    records: dict[str, Any] = {}
    if damaged:
        for _ in range(rng.choice((1, 1, 2))):
            _damage(rng, arrays, metrics, records)
    content = {"arrays": ArrayRecord(arrays), "metrics": MetricRecord(metrics), **records}
    if damaged and rng.random() < 0.1:
        del content[rng.choice(sorted(content))]
    reply = Message(RecordDict(content), dst_node_id=0, message_type="train")
    reply.metadata.__dict__["_src_node_id"] = node
    return reply


def _values(spec: WeightSpec, node: int) -> np.ndarray:
    return np.full(spec.shape, 0.1 * node, np.float32)


def _damage(
    rng: random.Random, arrays: dict[str, Any], metrics: dict[str, Any], records: dict[str, Any]
) -> None:
    name = rng.choice(("w", "b", "evil", "\x1b[2J" + "x" * 999))
    match rng.randrange(8):
        case 0:
            metrics[rng.choice(("num-examples", "loss", "mine", "x" * 999))] = rng.choice(_METRICS)
        case 1:
            metrics.pop(rng.choice(("num-examples", "loss")), None)
        case 2:
            arrays.pop(name, None)
        case 3:
            value = rng.choice((np.nan, np.inf, 1e38, -1e38, 1e6, 0.0))
            arrays[name] = Array(np.full(rng.choice(((4, 3), (3,), ())), value, np.float32))
        case 4:
            data = io.BytesIO()
            np.savez(data, np.zeros(3))
            junk = rng.choice((b"", b"\x93NUMPY", data.getvalue(), rng.randbytes(99)))
            arrays[name] = Array("float32", (3,), "numpy.ndarray", junk)
        case 5:
            good = Array(np.zeros(3, np.float32)).data
            form = rng.choice(("numpy.ndarray", "torch", ""))
            arrays[name] = Array(rng.choice(_TYPES), rng.choice(_SHAPES), form, good)
        case 6:
            data = bytearray(Array(np.zeros(3, np.float32)).data)
            data[rng.randrange(len(data))] = rng.randrange(256)
            arrays["b"] = Array("float32", (3,), "numpy.ndarray", bytes(data))
        case _:
            records["more"] = rng.choice((ArrayRecord(), MetricRecord({"a": 1.0})))
