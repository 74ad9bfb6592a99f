"""onnxruntime-training-examples: the getting-started sample of ``ORTTrainer``, as last published.

``train_ort.py`` trains with ``ORTTrainer``, ``train.py`` is its torch original. They differ in the
optimizer; the run of ``train.py`` uses the one of ``train_ort.py``, so all losses must agree. Both
have a fixed seed and no dropout. The corpus has the format of WikiText-2, and gives five steps an
epoch: Adam divides by gradients near zero, so rounding grows, to 2e-4 after 27 steps.
"""

from __future__ import annotations

import json
import random
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from tests.upstream import stubs
from tests.upstream.process import run_script
from tests.upstream.results import Result

COMMIT = "967245e"
"""The last commit that has the sample."""
FOLDER = "orttrainer/getting-started"
HOW = "getting-started: `train_ort.py` and its torch original, on `install()`"
TOLERANCE = 1e-4
LOSSES = Path("losses.json")


def run(project: str, checkout: Path) -> list[Result]:
    """Run both programs, then compare the losses of all their steps and evaluations."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_corpus(folder)
        results, losses = [], []
        for program in ("train.py", "train_ort.py"):
            for file in ("model.py", program):
                shown = ["git", "-C", str(checkout), "show", f"{COMMIT}:{FOLDER}/{file}"]
                text = subprocess.run(shown, capture_output=True, text=True, check=True).stdout
                text = text.replace("\ndropout = 0.2", "\ntorch.manual_seed(0); dropout = 0.0")
                (folder / file).write_text(text)
            setup = f"{__name__}:{'original' if program == 'train.py' else 'on_onnxruntime'}"
            results.append(
                run_script(project, folder / program, how=HOW, setup=setup, folder=folder)
            )
            if results[-1].outcome == "pass":
                losses.append(json.loads((folder / LOSSES).read_text()))
        return [*results, _compared(project, losses)]


def _compared(project: str, losses: list[list[float]]) -> Result:
    program = "losses of train_ort.py and train.py"
    if len(losses) < 2 or len(losses[0]) != len(losses[1]):
        return Result(project, program, "fail", "the programs took other steps", HOW)
    worst = max(abs(a - b) for a, b in zip(*losses, strict=True))
    if not worst <= TOLERANCE:
        return Result(project, program, "fail", f"they differ by {worst:.2g}", HOW)
    return Result(project, program, "pass", how=HOW)


def write_corpus(folder: Path, *, lines: int = 300) -> None:
    """Write a generated corpus: titles and sentences of a few words, a line each."""
    rng = random.Random(0)
    nouns = [f"{a}{b}" for a in ("riv", "mount", "cast", "vill") for b in ("er", "ain", "le", "a")]
    verbs = ["crosses", "follows", "joins", "borders", "overlooks"]
    for name, count in (("train", lines), ("valid", lines // 5), ("test", lines // 5)):
        text = []
        for i in range(count):
            first, second, third = rng.choices(nouns, k=3)
            sentence = f" The {first} {rng.choice(verbs)} the {second} <unk> , near a {third} . "
            text += [f" = {first.title()} = "] if i % 20 == 0 else [sentence]
        (folder / f"wiki.{name}.tokens").write_text("\n".join(text))


def on_onnxruntime() -> None:
    """Prepare the process of ``train_ort.py``."""
    import onnxtrain.compat.ort

    onnxtrain.compat.ort.install()
    stubs.install("torchtext")
    _log_losses(onnxtrain.compat.ort.ORTTrainer, "train_step", "eval_step")


def original() -> None:
    """Prepare the process of ``train.py``: the optimizer of ``train_ort.py``."""
    import torch

    stubs.install("torchtext")
    _log_losses(torch.nn.CrossEntropyLoss, "forward")
    optim: Any = torch.optim
    adam, constant = optim.AdamW, optim.lr_scheduler.ConstantLR
    optim.SGD = lambda parameters, lr: adam(parameters, lr=0.001, weight_decay=0.0)
    optim.lr_scheduler.StepLR = lambda optimizer, size, gamma: constant(optimizer, factor=1.0)
    clip = torch.nn.utils.clip_grad_norm_
    torch.nn.utils.clip_grad_norm_ = lambda parameters, limit: clip(parameters, 1.0)


def _log_losses(owner: Any, *methods: str) -> None:
    """Write the first result of each call to a file: the loss."""
    losses: list[float] = []
    for method in methods:
        call = getattr(owner, method)

        def logged(self: Any, *args: Any, _call: Any = call, **kwargs: Any) -> Any:
            result = _call(self, *args, **kwargs)
            losses.append(float((result[0] if isinstance(result, list) else result).detach()))
            LOSSES.write_text(json.dumps(losses))
            return result

        setattr(owner, method, logged)
