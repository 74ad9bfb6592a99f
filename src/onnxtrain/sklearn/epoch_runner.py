"""Epochs of training on one set of data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from onnxtrain.optim import Schedule, resolve_schedule
from onnxtrain.runtime import session as runtime
from onnxtrain.sklearn.objective import WEIGHT, Penalty

if TYPE_CHECKING:
    from onnxtrain.sklearn.base import OnnxEstimator
    from onnxtrain.sklearn.epoch_graph import Epoch


class Epochs:
    """Runs epochs on one set of data; parameters stay packed in between."""

    def __init__(
        self,
        owner: OnnxEstimator,
        X: Any,
        y: np.ndarray,
        weight: np.ndarray | None,
    ) -> None:
        self.owner, net = owner, owner._net
        self.rows = len(y)
        self.batch = min(int(owner.batch_size), self.rows)
        self.count = -(-self.rows // self.batch)
        self.parts = self._sessions(weighted=weight is not None)
        features = net.preprocess(owner._feeds(X, net.inputs))
        self.data = {f"epoch/{n}": features[n] for n in self.epoch.inputs}
        self.data["epoch/target"] = self._target(y)
        if weight is not None:
            self.data[f"epoch/{WEIGHT}"] = weight
        if self.epoch.random:
            self.data["epoch/seed"] = np.array([owner._seed], np.float32)
        still = [b for b in net.buffers if b not in self.epoch.buffers]
        self.data.update({f"epoch/{n}": owner._values[n] for n in still})
        sizes = np.full(self.count, self.batch)
        sizes[-1] = self.rows - self.batch * (self.count - 1)
        self.share = sizes / self.rows
        self.schedule = _schedule(owner.schedule, self.count * int(owner.max_iter))
        self.carried = self._load()
        self.names = [f"epoch/{n}.out" for n in self.epoch.carried]

    def _sessions(self, *, weighted: bool) -> list[_Part]:
        """Return the parts of an epoch with their sessions; the last one's are kept.

        Batches of one size go through a graph that knows it; what is left over, through another.
        """
        owner, net = self.owner, self.owner._net
        penalty = Penalty.of(owner.penalty, owner.alpha, owner.l1_ratio)
        threads = net.threads(owner.threads, self.batch, owner._values)
        loss, optimizer = owner._loss(), owner._optimizer()

        def prepared(rows: int | None) -> tuple[Epoch, Any]:
            return net.epoch(
                loss,
                optimizer,
                penalty,
                weighted=weighted,
                device=owner.device,
                threads=threads,
                rows=rows,
            )

        full = self.rows // self.batch
        fixed = net.built and full > 1
        parts: list[_Part] = []
        if fixed:
            self.epoch, self.session = prepared(self.batch)
            parts.append(_Part(self.session, 0, full, self.batch, fixed=True))
        if not fixed or full < self.count:
            first = full if fixed else 0
            self.epoch, self.session = prepared(None)
            size = self.rows - full * self.batch if fixed else self.batch
            parts.append(_Part(self.session, first, self.count, size, fixed=False))
        return parts

    def _target(self, y: np.ndarray) -> np.ndarray:
        """Return targets of the type and shape that the graph wants."""
        net = self.owner._net
        kinds = {x.name: x.type for x in self.session.get_inputs()}
        if kinds["epoch/target"] == "tensor(int64)":
            y = y.astype(np.int64)
        else:
            shape = (self.rows, net.columns) if net.rank == 2 else (self.rows,)
            wide = "float64" if kinds["epoch/target"] == "tensor(double)" else "float32"
            y = y.reshape(shape).astype(wide)
        return np.ascontiguousarray(y)

    def _load(self) -> list[np.ndarray]:
        values, state = self.owner._values, self.owner._state
        carried = [p.join_arrays(values) for p in self.epoch.packs]
        for name, (dims, dtype, start) in self.epoch.state.items():
            known = state.get(name)
            carried.append(np.full(dims, start, dtype) if known is None else known)
        return [*carried, *(values[n] for n in self.epoch.buffers)]

    def run(self) -> float:
        """Train for one epoch; return the mean loss of its rows."""
        owner = self.owner
        order = owner._random.permutation(self.rows) if owner.shuffle else np.arange(self.rows)
        base = float(owner.learning_rate)
        if self.schedule is None:
            rates = np.full(self.count, base, np.float32)
        else:
            numbers = range(owner.t_ + 1, owner.t_ + self.count + 1)
            rates = np.array([self.schedule.lr(base, n) for n in numbers], np.float32)
        losses = [part.run(self, order, rates) for part in self.parts]
        owner.t_ += self.count
        return float(np.concatenate(losses).astype(np.float64) @ self.share)

    def store(self) -> None:
        """Hand the current parameters and state to the owner."""
        owner, epoch = self.owner, self.epoch
        carried = dict(zip(epoch.carried, self.carried, strict=True))
        values = dict(owner._values)
        for pack in epoch.packs:
            values.update(pack.split_array(carried[pack.name]))
        values.update({n: carried[n] for n in epoch.buffers})
        owner._values = values
        owner._state = {n: carried[n] for n in epoch.state}


class _Part:
    """Some batches of an epoch, all of one size but for the last one."""

    def __init__(self, session: Any, first: int, last: int, rows: int, *, fixed: bool) -> None:
        self.session, self.first, self.last = session, first, last
        self.rows, self.fixed = rows, fixed
        self.inputs = [x.name for x in session.get_inputs()]

    def run(self, whole: Epochs, order: np.ndarray, rates: np.ndarray) -> np.ndarray:
        """Train on the batches; return their losses."""
        start = self.first * whole.batch
        count = self.last - self.first
        pick = order[start : start + count * self.rows].astype(np.int64, copy=False)
        feeds = {
            **whole.data,
            **{f"epoch/{n}": a for n, a in zip(whole.epoch.carried, whole.carried, strict=True)},
            "epoch/order": pick.reshape(count, self.rows) if self.fixed else pick,
            "epoch/batches": np.array(count, np.int64),
            "epoch/rows_per_batch": np.array([self.rows], np.int64),
            "epoch/rates": rates[self.first : self.last],
            "epoch/steps_before": np.array(whole.owner.t_ + self.first, np.int64),
        }
        feeds = {n: feeds[n] for n in self.inputs}
        names = [*whole.names, "epoch/losses"]
        *whole.carried, losses = runtime.run(self.session, names, feeds)
        return losses


def _schedule(given: Any, total: int) -> Schedule | None:
    if given is None or isinstance(given, Schedule):
        return given
    return resolve_schedule(given, total=total)
