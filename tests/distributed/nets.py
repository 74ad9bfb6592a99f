"""Five nets with their data, and what workers do with them."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx_ir as ir
import torch

import onnxtrain
from onnxtrain import Artifacts, Callback, Trainer, optim
from onnxtrain.errors import OnnxTrainError
from onnxtrain.graph.io import save
from onnxtrain.text import without_cache
from onnxtrain.torch import as_module, from_torch
from onnxtrain.training import distributed
from onnxtrain.training import trainer as trainer_module
from tests.text.models import llama
from tests.training.nets import Cnn, exported

ROWS, BATCH, EPOCHS = 50, 20, 7
"""Three batches of an epoch, the last one of ten rows: three workers have unequal parts."""


class Lstm(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = torch.nn.LSTM(5, 8, batch_first=True)
        self.head = torch.nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def model(name: str) -> Any:
    """Return the untrained net; adapters on the packed decoder."""
    torch.manual_seed(0)
    if name == "lstm":
        return from_torch(Lstm(), torch.randn(2, 4, 5))
    if name == "lora":
        decoder = without_cache(llama(layers=1))
        adapted = onnxtrain.lora(decoder, rank=2, targets="all-linear")
        draw = np.random.default_rng(3)  # B is 0 at the start, and then A has no gradient
        values = {n: a + draw.normal(0, 0.05, a.shape) for n, a in adapted.parameters.items()}
        return adapted.with_parameters(values)
    return exported(name)


def data(name: str) -> dict[str, np.ndarray]:
    """Return the inputs and labels of all rows."""
    draw = np.random.default_rng(1)
    labels = draw.integers(0, 3, ROWS)
    if name == "lora":
        ids = draw.integers(1, 96, (ROWS, 6))
        return {"input_ids": ids, "attention_mask": np.ones_like(ids), "labels": (ids * 5) % 96}
    if name == "transformer":
        ids = draw.integers(0, 11, (ROWS, 6))
        return {"x": ids, "labels": (ids * 3 + 1) % 11}
    shape = {"mlp": (6,), "cnn": (1, 8, 8), "lstm": (4, 5)}[name]
    x = draw.standard_normal((ROWS, *shape)).astype(np.float32)
    return {"x": x, "labels": labels}


@functools.cache
def artifacts(name: str, *, everything: bool = False) -> Artifacts:
    """Return the artifacts; with accumulation, clipping and a moving average, or without."""
    axis = ":axis=-1" if name in ("lora", "transformer") else ""
    more: dict[str, Any] = {"accumulate": 2, "clip": 0.5, "ema": 0.9} if everything else {}
    return onnxtrain.build(
        model(name),
        loss=f"cross_entropy{axis}",
        # Frozen statistics: those of a part are not those of the batch.
        mode="as-is" if name == "cnn" else "train",
        optimizer=optim.AdamW(lr=2e-3, eps=1e-4),
        metrics=["grad_norm"],
        **more,
    )


def train(folder: str, name: str, **options: Any) -> dict[str, Any]:
    """Train; return the state, the losses and what workers have sent."""
    trainer = Trainer(folder, threads=1, seed=3, **options)
    named = dict(zip(trainer.inputs, data(name).values(), strict=True))
    history = trainer.fit(named, epochs=EPOCHS, batch_size=BATCH, progress=False)
    return {
        "state": trainer.state_dict(),
        "losses": history.losses,
        "norms": [r["grad_norm"] for r in history.steps],
        "layout": trainer.layout,
        "sent": 0 if trainer.workers is None else trainer.workers.sent,
        "memory": trainer._engine.memory["parameters, buffers and state"],
    }


def in_a_worker(folder: str, name: str, shard_state: bool) -> dict[str, Any]:
    return train(folder, name, distributed="auto", shard_state=shard_state)


def as_torch(file: str, name: str) -> dict[str, np.ndarray]:
    """Train the file with DistributedDataParallel; return its parameters."""
    torch.distributed.init_process_group("gloo")
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    net = as_module(file, threads=1)
    if name == "cnn":
        net.eval()
    ddp = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=2e-3, eps=1e-4)
    tensors = [torch.from_numpy(a) for a in data(name).values()]
    for first in (0, 10, 20, 30):
        *inputs, labels = [t[first : first + 12].tensor_split(size)[rank] for t in tensors]
        output = ddp(*inputs)
        loss = torch.nn.functional.cross_entropy(output.flatten(0, -2), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {n: p.detach().numpy() for n, p in net.named_parameters()}


def normalized(folder: str) -> str:
    """Write a net with BatchNormalization and a residual connection, without Dropout."""
    torch.manual_seed(0)
    net, path = Cnn(p=0.0), f"{folder}/norm.onnx"
    save(from_torch(Residual(net), torch.randn(2, 1, 8, 8)), path)
    return path


class Residual(torch.nn.Module):
    def __init__(self, net: Cnn) -> None:
        super().__init__()
        self.net, self.norm = net, torch.nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.net(x)
        return y + self.norm(y * y)


def synchronized(folder: str, sync: bool) -> dict[str, np.ndarray]:
    """Train with BatchNormalization over all workers; return parameters and statistics."""
    torch.distributed.init_process_group("gloo")
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    file, frozen = f"{folder}/norm.onnx", "*norm1.bias"
    net = as_module(file, freeze=frozen, threads=1, sync_batch_norm=sync)
    ddp = torch.nn.parallel.DistributedDataParallel(net, broadcast_buffers=False)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    x, labels = (torch.from_numpy(a) for a in data("cnn").values())
    for first in (0, 10, 20, 30):
        part = slice(first + 12 // size * rank, first + 12 // size * (rank + 1))
        loss = torch.nn.functional.cross_entropy(ddp(x[part]), labels[part])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {n: t.numpy() for n, t in net.state_dict().items()}


def file(name: str, folder: Path) -> str:
    """Write the net as a file."""
    source = model(name)
    path = folder / f"{name}.onnx"
    if isinstance(source, onnxtrain.Adapted):
        save(source.model, path)
    elif isinstance(source, ir.Model):
        save(source, path)
    else:
        path.write_bytes(source.SerializeToString())
    return str(path)


def differing(folder: str, what: str) -> None:
    """Create a trainer whose last worker differs, and train."""
    last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    versions = {"onnxruntime": "1.0" if last and what == "versions" else "1.31"}
    name = "other" if last and what == "artifacts" else "art"
    with mock.patch.object(trainer_module, "versions", return_value=versions):
        trainer = Trainer(
            f"{folder}/{name}", threads=1, seed=int(last and what == "seed"), distributed="auto"
        )
    rows = {n: a[: ROWS - int(last and what == "data")] for n, a in data("mlp").items()}
    rows = dict(zip(trainer.inputs, rows.values(), strict=True))
    trainer.fit(rows, epochs=1, batch_size=BATCH + int(last and what == "options"), progress=False)


def nan_on_one(folder: str) -> tuple[list[float], list[bool], bool, str]:
    """Give the last worker NaN in the second step; return what the worker has seen."""
    trainer = Trainer(f"{folder}/art", threads=1, distributed="auto")
    assert trainer.workers is not None
    x, labels = (a[trainer.workers.part(BATCH)] for a in data("mlp").values())
    bad = np.where(trainer.workers.rank == trainer.workers.size - 1, np.nan, x).astype(np.float32)
    results = [trainer.step(x, labels)]
    before = trainer.parameters["0.weight"]
    results.append(trainer.step(bad, labels))
    same = np.array_equal(before, trainer.parameters["0.weight"])
    results.append(trainer.step(x, labels))
    message = ""
    try:
        rows = data("mlp")
        rows["x"][BATCH // 2 :] = np.nan
        named = dict(zip(trainer.inputs, rows.values(), strict=True))
        trainer.fit(named, batch_size=BATCH, shuffle=False, progress=False)
    except OnnxTrainError as error:
        message = str(error)
    return [r.loss for r in results], [r.updated for r in results], same, message


def stopping(folder: str, out: str) -> tuple[int, str, list[str]]:
    """Stop a run from a callback of worker 0; return step, reason, and callbacks that ran."""
    calls: list[str] = []

    class Stop(Callback):
        def on_step(self, run: Any, result: Any) -> None:
            calls.append("step")
            if result.step == 4:
                run.stop = "enough"

    trainer = Trainer(f"{folder}/art", threads=1, distributed="auto")
    named = dict(zip(trainer.inputs, data("mlp").values(), strict=True))
    history = trainer.fit(
        named,
        epochs=5,
        batch_size=BATCH,
        progress=False,
        callbacks=[Stop()],
        directory=out,
        validation=named,
    )
    return trainer.global_step, history.stopped, calls


def of_batches(folder: str, kind: str) -> list[float]:
    """Train on an iterable of batches, whole or split by torch; return the losses."""
    trainer = Trainer(f"{folder}/art", threads=1, distributed="auto")
    arrays = [torch.from_numpy(a[:48]) for a in data("mlp").values()]
    rows = torch.utils.data.TensorDataset(*arrays)
    if kind == "split":
        sampler = torch.utils.data.DistributedSampler(rows, shuffle=False)
        size = 16 // torch.distributed.get_world_size()
        batches = torch.utils.data.DataLoader(rows, batch_size=size, sampler=sampler)
    else:
        batches = torch.utils.data.DataLoader(rows, batch_size=16)
    return trainer.fit(batches, epochs=1, progress=False).losses


def resumable(folder: str, out: str, pause: float) -> dict[str, np.ndarray]:
    """Train with a checkpoint after every step, and continue what is there."""
    trainer = Trainer(f"{folder}/art", threads=1, distributed="auto")
    named = dict(zip(trainer.inputs, data("mlp").values(), strict=True))

    def batches(epoch: int) -> Iterator[dict[str, np.ndarray]]:
        order = np.random.default_rng(epoch).permutation(ROWS)
        for first in range(0, ROWS, BATCH):
            time.sleep(pause)
            yield {n: a[order[first : first + BATCH]] for n, a in named.items()}

    trainer.fit(batches, epochs=4, progress=False, directory=out, resume=True, checkpoint_every=1)
    return trainer.state_dict()


def continued(folder: str, out: str, stop_at: int, shard_state: bool) -> dict[str, np.ndarray]:
    """Continue what is there up to a step, in the middle of an epoch."""
    trainer = Trainer(
        f"{folder}/art", threads=1, seed=5, distributed="auto", shard_state=shard_state
    )
    named = dict(zip(trainer.inputs, data("mlp").values(), strict=True))

    class Stop(Callback):
        def on_step(self, run: Any, result: Any) -> None:
            if result.step == stop_at:
                run.stop = "here"

    options: dict[str, Any] = {"batch_size": BATCH, "directory": out, "progress": False}
    trainer.fit(named, epochs=EPOCHS, resume=True, callbacks=[Stop()], **options)
    return trainer.state_dict()


def uneven(folder: str) -> tuple[list[float], dict[str, np.ndarray]]:
    """Train on equal parts, then on other ones; return losses and weights."""
    trainer = Trainer(f"{folder}/art", threads=1, distributed="auto")
    assert trainer.workers is not None
    x, labels = data("mlp").values()
    losses = []
    for rows in (*[20] * 10, 19, 1, 20):
        part = trainer.workers.part(rows)
        feeds = dict(zip(trainer.inputs, (x[part], labels[part]), strict=True))
        outputs = trainer.compute(feeds, part.stop - part.start)
        losses.append(trainer.commit(outputs).loss)
    return losses, trainer.state_dict()


def never(folder: str) -> None:
    """Wait for one worker more than there are."""
    os.environ["WORLD_SIZE"] = str(int(os.environ["WORLD_SIZE"]) + 1)
    with mock.patch.object(distributed, "JOIN_SECONDS", 1.0):
        Trainer(f"{folder}/art", threads=1, distributed="auto")


def finetuned(folder: str, out: str) -> tuple[list[float], list[str]]:
    """Fine-tune a decoder on rows of different lengths; return losses and the files written."""
    rows = [[(i * 3 + j) % 90 + 1 for j in range(8 + i % 4)] for i in range(11)]
    result = onnxtrain.finetune(
        Path(folder),
        {"input_ids": rows},
        out,
        epochs=1,
        batch_size=4,
        lora_rank=2,
        sample_tokens=0,
        progress=False,
        threads=1,
    )
    return result.history.losses, sorted(result.files)
