"""Train a net on a GPU with some nodes on the CPU; compare every parameter with torch.

    python -m benchmarks.cuda.placement_check

Artifacts built for the CPU have convolutions without a CUDA kernel, so both devices read the
weights. Sizes fixed and free, captured and not, each layout: 20 steps each. TF32 is off.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import warnings

os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")

import numpy as np
import torch
from torch import nn

import onnxtrain
from onnxtrain import optim
from onnxtrain.runtime.session import placement
from onnxtrain.torch import from_torch

STEPS, ROWS = 20, 8


def network(target: str) -> nn.Module:
    """Return strided convolutions and a head; normalized where CUDA takes what is built."""
    torch.manual_seed(0)
    norm = nn.BatchNorm2d if target == "cuda" else nn.Identity
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1, bias=False),
        norm(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, 2, 1, bias=False),
        norm(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 4, 5),
    )


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the data of all steps."""
    g = torch.Generator().manual_seed(1)
    return [
        (torch.randn(ROWS, 3, 16, 16, generator=g), torch.randint(0, 5, (ROWS,), generator=g))
        for _ in range(STEPS)
    ]


def reference(target: str) -> tuple[nn.Module, list[float]]:
    """Train in torch, on the CPU, in float64."""
    module, losses = network(target).double().train(), []
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.01)
    for x, labels in batches():
        loss = nn.functional.cross_entropy(module(x.double()), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return module, losses


def main() -> int:
    """Run all combinations; give 1 if one is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    references = {t: reference(t) for t in ("cuda", "cpu")}
    models = {t: from_torch(network(t), (batches()[0][0],)) for t in references}
    failed = 0
    for target, fixed, layout, capture in itertools.product(
        ("cuda", "cpu"), (True, False), ("auto", "fused", "separate", "vector"), (None, False)
    ):
        module, losses = references[target]
        wanted = {n: p.detach().numpy() for n, p in module.named_parameters()}
        artifacts = onnxtrain.build(
            models[target],
            loss="cross_entropy",
            target=target,
            dims={"batch": ROWS} if fixed else None,
            optimizer=optim.AdamW(lr=1e-2, weight_decay=0.01),
        )
        label = f"{target:5}{'fixed' if fixed else 'free':6}{layout:9} capture={capture!s:6}"
        try:
            trainer = onnxtrain.Trainer(
                artifacts, device=args.device, layout=layout, capture=capture, threads=2
            )
            actual = [trainer.step(x.numpy(), y.numpy()).loss for x, y in batches()]
            loss = max(abs(a - b) / b for a, b in zip(actual, losses, strict=True))
            off = max(float(np.abs(trainer.parameters[n] - w).max()) for n, w in wanted.items())
            left = [n for s in trainer.step_models for n in placement(s, device=args.device).left]
            right = loss < 2e-2 and off < 2e-2
            note = f"captured={trainer.captured!s:6} loss {loss:.1e}, parameters {off:.1e}"
            note += f", on the CPU: {len(left)}"
        except Exception as error:  # every failure is a line of the table
            right, note = False, f"{type(error).__name__}: {str(error)[:200]}"
        failed += not right
        print("pass" if right else "FAIL", label, note, flush=True)
    print(f"{32 - failed} of 32 right")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
