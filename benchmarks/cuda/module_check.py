"""Compare TrainableModule and ORTTrainer on a GPU with torch on the same GPU; print a table.

    python -m benchmarks.cuda.module_check              # a minute, most of it exports
    python -m benchmarks.cuda.module_check --device cpu # the same cases without a GPU

Run by hand on a machine with onnxruntime-gpu and a CUDA build of torch. Errors are relative to the
largest element of torch's result; a case with an error above its bound fails, and so does the run.
Times are medians of whole steps, forward and backward, torch and ours in turn.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

# TF32 would hide errors below 1e-3, in torch and in onnxruntime.
os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")

import onnxruntime
import torch
from torch import nn

from onnxtrain.compat.ort import optim
from onnxtrain.compat.ort.orttrainer import ORTTrainer
from onnxtrain.torch import TrainableModule

Case = Callable[[torch.device], tuple[float, float]]
CASES: dict[str, Case] = {}
ONLY_CUDA = ("bfloat16",)  # on CPUs, torch and onnxruntime differ in what they have for it


def case(run: Case) -> Case:
    """Register a case: it gives the worst error and the bound for it."""
    CASES[run.__name__] = run
    return run


def off(got: torch.Tensor, want: torch.Tensor, floor: float = 1e-6) -> float:
    """Return the largest difference, relative to the largest element, or to ``floor`` if larger."""
    if got.device != want.device or got.dtype != want.dtype or got.shape != want.shape:
        raise AssertionError(f"{got.device} {got.dtype} {list(got.shape)}, not {want.device}")
    a, b = got.detach().double(), want.detach().double()
    return ((a - b).abs().max() / b.abs().max().clamp(min=floor)).item() if a.numel() else 0.0


def compare(module: nn.Module, batches: list[tuple[Any, ...]], steps: bool = True) -> float:
    """Train a module and its wrapped copy; return the worst error of what they give and hold."""
    theirs, ours = module, TrainableModule(copy.deepcopy(module))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (theirs, ours)]
    worst = 0.0
    for batch in batches:
        results = []
        for m, optimizer in zip((theirs, ours), optimizers, strict=True):
            inputs = tuple(x.detach().clone().requires_grad_(x.is_floating_point()) for x in batch)
            y = m(*inputs)
            optimizer.zero_grad()
            (y.float() ** 2).mean().backward()
            grads = [p.grad for p in m.parameters()]
            input_grads = [x.grad for x in inputs if x.requires_grad]
            results.append([y, *input_grads, *grads, *m.buffers()])
            if steps:
                optimizer.step()
        # Some gradients are zero but for rounding: of a bias before a norm, say.
        floor = 1e-3 * max(t.detach().abs().max().item() for t in results[0] if t.numel())
        worst = max([worst, *(off(b, a, floor) for a, b in zip(*results, strict=True))])
    return worst


def mlp(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    # onnxruntime has no Erf, which GELU is made of, for float64.
    between = nn.Tanh() if dtype is torch.float64 else nn.GELU()
    return nn.Sequential(nn.Linear(64, 128), between, nn.Linear(128, 10)).to(dtype)


@case
def linear_layers(device: torch.device) -> tuple[float, float]:
    rows = [(torch.randn(n, 64, device=device),) for n in (32, 17, 32)]
    return compare(mlp().to(device), rows), 1e-4


@case
def float64(device: torch.device) -> tuple[float, float]:
    rows = [(torch.randn(n, 64, device=device, dtype=torch.float64),) for n in (8, 5)]
    return compare(mlp(torch.float64).to(device), rows), 1e-6


@case
def float16(device: torch.device) -> tuple[float, float]:
    rows = [(torch.randn(8, 64, device=device, dtype=torch.float16),)]
    return compare(mlp(torch.float16).to(device), rows), 1e-2


@case
def bfloat16(device: torch.device) -> tuple[float, float]:
    rows = [(torch.randn(8, 64, device=device, dtype=torch.bfloat16),)]
    return compare(mlp(torch.bfloat16).to(device), rows), 5e-2


@case
def convolution_and_batch_norm(device: torch.device) -> tuple[float, float]:
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 64, 10),
    )
    rows = [(torch.randn(n, 3, 16, 16, device=device),) for n in (8, 6)]
    return compare(module.to(device), rows), 1e-3


@case
def attention(device: torch.device) -> tuple[float, float]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    return compare(layer.to(device), [(torch.randn(4, 12, 32, device=device),)]), 1e-3


class Words(nn.Module):
    """Whole numbers in, and a mask."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(50, 16), nn.Linear(16, 4)

    def forward(self, words: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return scores of the mean word that the mask leaves."""
        embedded = self.embed(words) * mask.unsqueeze(-1)
        return self.head(embedded.sum(1))


@case
def integers_and_masks(device: torch.device) -> tuple[float, float]:
    words = torch.randint(0, 50, (6, 9), device=device)
    return compare(Words().to(device), [(words, words > 10)] * 2), 1e-4


@case
def several_forwards(device: torch.device) -> tuple[float, float]:
    theirs = mlp().to(device)
    ours = TrainableModule(copy.deepcopy(theirs))
    batches = [torch.randn(n, 64, device=device) for n in (4, 9, 2)]
    for m in (theirs, ours):
        first, second, third = (m(x) for x in batches)
        (third.square().sum() + first.sum()).backward()
        second.exp().sum().backward()
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    return max(off(p.grad, q.grad) for p, q in pairs), 1e-4


@case
def evaluation(device: torch.device) -> tuple[float, float]:
    theirs = mlp().to(device).eval()
    ours = TrainableModule(copy.deepcopy(theirs))
    with torch.no_grad():
        x = torch.randn(7, 64, device=device)
        return off(ours(x), theirs(x)), 1e-4


@case
def scaler_and_autocast(device: torch.device) -> tuple[float, float]:
    theirs = mlp().to(device)
    ours = TrainableModule(copy.deepcopy(theirs))
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0)
    x = torch.randn(16, 64, device=device)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    half = torch.float16 if device.type == "cuda" else torch.bfloat16
    with torch.autocast(device.type, dtype=half):
        loss = ours(x).square().sum()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    theirs(x).square().sum().backward()
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    return max(off(p.grad, q.grad) for p, q in pairs), 2e-2


@case
def dropout_keeps_its_share(device: torch.device) -> tuple[float, float]:
    ours = TrainableModule(nn.Sequential(nn.Identity(), nn.Dropout(0.25)).to(device))
    x = torch.ones(512, 64, device=device, requires_grad=True)
    y = ours(x)
    y.sum().backward()
    if not torch.equal(y.detach(), x.grad):
        raise AssertionError("the backward pass has another mask than the forward pass")
    return abs((y != 0).float().mean().item() - 0.75), 0.02


@case
def old_trainer(device: torch.device) -> tuple[float, float]:
    theirs = mlp()
    description = {
        "inputs": [("x", ["batch", 64]), ("label", ["batch"])],
        "outputs": [("loss", [], True), ("scores", ["batch", 10])],
    }
    config = optim.AdamConfig(lr=0.01, max_norm_clip=1e9)
    ours = ORTTrainer(
        copy.deepcopy(theirs),
        description,
        config,
        nn.CrossEntropyLoss(),
        options(device),
    )
    theirs.to(device)
    twin = torch.optim.Adam(theirs.parameters(), lr=0.01)
    worst = 0.0
    for rows in (16, 16, 9):
        x, label = torch.randn(rows, 64, device=device), torch.randint(0, 10, (rows,)).to(device)
        scores = theirs(x)
        loss = nn.functional.cross_entropy(scores, label)
        twin.zero_grad()
        loss.backward()
        twin.step()
        got = ours.train_step(x, label)
        worst = max(worst, off(got[0], loss), off(got[1], scores))
    state = {n: t.cpu() for n, t in theirs.state_dict().items()}
    return max(worst, *(off(ours.state_dict()[n].cpu(), t) for n, t in state.items())), 1e-3


def options(device: torch.device) -> Any:
    from onnxtrain.compat.ort.orttrainer import ORTTrainerOptions

    return ORTTrainerOptions({"device": {"id": device.type}})


def timed(device: torch.device) -> tuple[float, float]:
    """Return medians of a step of torch and of ours, in ms, on a net that is worth a GPU."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.0, batch_first=True)
    theirs = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to(device)
    ours = TrainableModule(copy.deepcopy(theirs))
    x = torch.randn(16, 64, 256, device=device)
    spent: list[list[float]] = [[], []]
    for i in range(25):
        for m, times in zip((theirs, ours), spent, strict=True):
            start = time.perf_counter()
            m(x).square().mean().backward()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if i > 4:
                times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(spent[0]), statistics.median(spent[1])


def main() -> int:
    """Run the cases; give 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--no-times", action="store_true")
    parser.add_argument("names", nargs="*", metavar="CASE")
    given = parser.parse_args()
    device = torch.device(given.device)
    warnings.simplefilter("ignore")
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{where}; torch {torch.__version__}, onnxruntime {onnxruntime.__version__}")
    failed = 0
    chosen = given.names or [n for n in CASES if n not in ONLY_CUDA or device.type == "cuda"]
    for name in chosen:
        start = time.perf_counter()
        try:
            error, bound = CASES[name](device)
            right, note = error <= bound, f"{error:.1e} (bound {bound:.0e})"
        except Exception as e:  # every failure is a line of the table
            right, note = False, f"{type(e).__name__}: {str(e).strip()[:300]}"
        failed += not right
        took = time.perf_counter() - start
        print(f"{name:28}{'pass' if right else 'FAIL':6}{took:6.1f} s  {note}", flush=True)
    print(f"{len(chosen) - failed} of {len(chosen)} pass")
    if not given.no_times:
        theirs, ours = timed(device)
        print(
            f"two encoder layers, 16 x 64 x 256: torch {theirs:.2f} ms, ours {ours:.2f} ms a step"
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
