"""Train on several processes: TrainableModule inside DistributedDataParallel, on gloo.

    torchrun --nproc-per-node 2 examples/ddp.py --epochs 3 --checkpoint runs/ddp/last.pt

Each process computes its shard of every batch with ONNX Runtime; torch.distributed averages the
gradients. Shards are weighted by their number of rows, so they need not be equal; an empty shard
gets weight zero. The losses equal those of a single process with the whole batch. A run that was
stopped resumes from its checkpoint when it is started again.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from onnxtrain.torch import TrainableModule

ROWS, FEATURES, CLASSES = 240, 16, 4


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Return points around four cluster centers, and their cluster indices."""
    g = torch.Generator().manual_seed(0)
    centers = torch.randn(CLASSES, FEATURES, generator=g)
    labels = torch.randint(0, CLASSES, (ROWS,), generator=g)
    return centers[labels] + torch.randn(ROWS, FEATURES, generator=g), labels


def network() -> nn.Module:
    """Return the untrained network, the same in every process."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(FEATURES, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, CLASSES)
    )


def shard(rows: torch.Tensor, rank: int, world: int) -> tuple[torch.Tensor, float]:
    """Return the rows of one process, and their share of the batch.

    Every process has to take part in the all-reduce of gradients: a process without rows gets the
    first row with weight zero.
    """
    mine = rows.tensor_split(world)[rank]
    return (mine, len(mine) / len(rows)) if len(mine) else (rows[:1], 0.0)


def save(
    path: Path, epoch: int, model: nn.Module, optimizer: torch.optim.Optimizer, losses: list[float]
) -> None:
    """Write a checkpoint atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    state = {
        "epoch": epoch,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "losses": losses,
    }
    torch.save(state, part)
    os.replace(part, path)


def train(options: argparse.Namespace, rank: int, world: int) -> list[float]:
    """Train; return the mean loss of each global batch."""
    inner = TrainableModule(network(), threads=1)
    model = DistributedDataParallel(inner) if world > 1 else inner
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    x, labels = data()
    start, losses = 0, []
    if options.checkpoint and options.checkpoint.exists():
        state = torch.load(options.checkpoint, weights_only=True)
        inner.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start, losses = state["epoch"], state["losses"]
        if rank == 0:
            print(f"resumed after epoch {start}", flush=True)
    for epoch in range(start, options.epochs):
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(epoch))
        for rows in order.split(options.batch):
            mine, weight = shard(rows, rank, world)
            loss = weight * nn.functional.cross_entropy(model(x[mine]), labels[mine])
            optimizer.zero_grad()
            (world * loss).backward()  # DDP divides by the number of processes
            optimizer.step()
            total = loss.detach().clone()
            if world > 1:
                dist.all_reduce(total)
            losses.append(total.item())
        if rank == 0 and options.checkpoint:
            save(options.checkpoint, epoch + 1, inner, optimizer, losses)
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {losses[-1]:.5f}", flush=True)
        if options.die == (epoch + 1, rank):
            os.kill(os.getpid(), signal.SIGKILL)
    return losses


def main() -> None:
    """Initialize the process group, if there are several processes, and train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=48, help="global batch size")
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--losses", type=Path, help="write the losses to this JSON file")
    parser.add_argument(
        "--die",
        type=lambda s: tuple(map(int, s.split(":"))),
        metavar="EPOCH:RANK",
        help="kill a process after an epoch, to test recovery",
    )
    options = parser.parse_args()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    try:
        losses = train(options, rank, world)
    except RuntimeError as error:
        if world == 1:
            raise
        raise SystemExit(
            f"process {rank} of {world} lost its peers: {str(error).splitlines()[0]}\n"
            "hint: start the run again; it resumes from --checkpoint"
        ) from error
    if rank == 0 and options.losses:
        options.losses.write_text(json.dumps(losses))
    if world > 1:
        shut_down()


def shut_down() -> None:
    """Destroy the process group once all processes are done.

    The model holds the process group in reference cycles. Its threads have to end before the
    interpreter: a thread that frees a tensor during shutdown aborts the process.
    """
    dist.barrier()
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
