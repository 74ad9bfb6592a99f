"""The memory of a training run before it starts, and what would fit a budget."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir

from onnxtrain.adapters import lora
from onnxtrain.artifacts import Artifacts, build
from onnxtrain.errors import OnnxTrainError, PrepareError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.io import Source, load
from onnxtrain.losses import LossLike, LossTerm
from onnxtrain.optim import Optimizer
from onnxtrain.planning.amounts import amount, read_memory, read_tokens
from onnxtrain.planning.parts import Run
from onnxtrain.planning.ways import Way, ways
from onnxtrain.text import without_cache

_MANIFEST = "manifest.json"
_IDS = "input_ids"


@dataclasses.dataclass(frozen=True)
class Plan:
    """The memory that training takes on the CPU, predicted.

    Attributes:
        parts: bytes by what they are for.
        sizes: the numbers that symbolic sizes stand for.
        at: the node at which activations take most.
        memory: the budget in bytes, if there is one.
        ways: what would take less.
        unknown: how many values have a size that cannot be told; they count as nothing.
    """

    parts: Mapping[str, int]
    sizes: Mapping[str, int]
    at: str
    memory: int | None
    ways: tuple[Way, ...]
    unknown: int

    @property
    def peak(self) -> int:
        """Everything, in bytes."""
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        """Whether the run fits the budget as it is."""
        return self.memory is None or self.peak <= self.memory

    def check(self) -> None:
        """Refuse a run that does not fit.

        Raises:
            OnnxTrainError: with the ways that fit, or with the least memory that would do.
        """
        if self.fits or self.memory is None:
            return
        what = f"training takes about {amount(self.peak)}, more than {amount(self.memory)}"
        fitting = [w for w in self.ways if w.peak <= self.memory]
        if fitting:
            hint = " or ".join(f"{w.name} ({amount(w.peak)})" for w in fitting)
        else:
            least = min(self.ways, key=lambda w: w.peak, default=None)
            hint = f"at least {amount(self.peak if least is None else least.peak)} are needed"
            hint += "" if least is None else f", with {least.name}"
        raise OnnxTrainError(f"{what}\nhint: {hint}")

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain data, ready for JSON."""
        return {**dataclasses.asdict(self), "peak": self.peak, "fits": self.fits}

    def __str__(self) -> str:
        sizes = ", ".join(f"{n} = {v}" for n, v in self.sizes.items())
        lines = [f"about {amount(self.peak)} at the peak{f' at {sizes}' if sizes else ''}"]
        lines += [f"  {amount(b):>8}  {name}" for name, b in self.parts.items() if b]
        lines.append(f"most activations at {self.at}")
        if self.unknown:
            lines.append(f"{self.unknown} value(s) of unknown size count as nothing")
        if self.memory is not None:
            lines.append(f"{'fits' if self.fits else 'does not fit'} {amount(self.memory)}")
        for way in self.ways:
            mark = "" if self.memory is None or way.peak > self.memory else " fits"
            lines.append(f"  {amount(way.peak):>8}{mark}  {way.name}: {way.note}")
        return "\n".join(lines)


def plan(
    model: Source | Artifacts,
    *,
    loss: LossLike | None = None,
    optimizer: str | Optimizer = "adamw",
    memory: str | int | None = None,
    tokens: str | None = None,
    batch: int | None = None,
    sizes: Mapping[str, int] | None = None,
    recompute: str | Sequence[str] = (),
    **options: Any,
) -> Plan:
    """Return the peak of memory that training takes on the CPU, without training.

    The training graph is built, onnxruntime says what it would run, and results are counted from
    the node that makes them to the last that reads them, in the order of a run, with the gaps that
    its arena leaves. What batches the caller holds besides the current one is not in it.

    Args:
        model: anything :func:`onnxtrain.build` takes, artifacts, or their directory.
        loss: as for ``build``; language models are taken for ``"causal_lm"``, and others for the
            mean square of their first output, which takes as much memory as other losses.
        optimizer: as for ``build``.
        memory: a budget, ``"2GB"`` say; then ``ways`` tells what would fit.
        tokens: sequences and their length, ``"4x512"``.
        batch: the size of the batch.
        sizes: numbers for symbolic sizes, by name; others count as one.
        recompute: as for ``build``.
        options: any other of ``build``.
    """
    budget = None if memory is None else read_memory(memory)
    source = _artifacts(model)
    if source is None:
        work = without_cache(model)  # pyright: ignore[reportArgumentType]
        chosen = _loss(work) if loss is None else loss
        asked = {"loss": chosen, "optimizer": optimizer, "recompute": recompute, "check": False}
        asked |= options

        def rebuild(**other: Any) -> Artifacts:
            return build(work, **(asked | other))

        def adapt() -> Artifacts:
            return build(lora(work, targets="all-linear"), **asked)

        run = Run(rebuild())
        trains_all = not isinstance(model, Artifacts) and not hasattr(model, "adapters")
        others = rebuild, adapt if trains_all else None
    else:
        run, others = Run(source), (None, None)
    symbols = _symbols(run, tokens, batch, sizes or {})
    name = _batch_symbol(run)
    step, parts = run.step(symbols), run.parts(symbols)
    less = () if budget is None else ways(run, symbols, name, budget, *others)
    worth = tuple(w for w in less if w.peak < sum(parts.values()))
    return Plan(parts, symbols, step.at, budget, worth, len(step.unknown))


def _artifacts(model: Source | Artifacts) -> Artifacts | None:
    if isinstance(model, Artifacts):
        return model
    if isinstance(model, str | os.PathLike) and (Path(os.fsdecode(model)) / _MANIFEST).exists():
        return Artifacts.load(os.fsdecode(model))
    return None


def _loss(model: ir.Model) -> LossLike:
    """Return a loss that takes as much memory as any other for the kind of model."""
    model = load(model)
    outputs = [y for y in model.graph.outputs if S.is_float(y)]
    if not outputs:
        raise PrepareError("the model has no float output to train\nhint: say which loss")
    first = outputs[0]
    if any(x.name == _IDS for x in model.graph.inputs) and len(S.dims_of(first) or ()) == 3:
        return "causal_lm"
    return [LossTerm("mse", output=first.name)]


def _symbols(
    run: Run, tokens: str | None, batch: int | None, sizes: Mapping[str, int]
) -> dict[str, int]:
    """Return a number for each symbol of the inputs."""
    inputs = run.spec.inputs_of("input", "target")
    names = dict.fromkeys(d for t in inputs for d in t.shape if isinstance(d, str))
    plain = {n: 1 for n in names if n.isidentifier()}
    unknown = sorted(set(sizes) - set(plain))
    if unknown:
        raise PrepareError(
            f"no such size: {', '.join(unknown)}\nhint: {', '.join(plain) or 'all are fixed'}"
        )
    if tokens is not None:
        rows = next((t.shape for t in inputs if len(t.shape) == 2), ())
        count, length = read_tokens(tokens)
        wanted = {d: n for d, n in zip(rows, (count, length), strict=False) if isinstance(d, str)}
        if not wanted:
            raise PrepareError(f"tokens {tokens}: no input has open sizes [batch, sequence]")
        plain |= wanted
    name = _batch_symbol(run)
    if batch is not None:
        if name is None:
            raise PrepareError("batch: the model's batch is fixed\nhint: leave it out")
        plain[name] = batch
    return {**plain, **sizes}


def _batch_symbol(run: Run) -> str | None:
    inputs = run.spec.inputs_of("input", "target")
    return next((t.shape[0] for t in inputs if t.shape and isinstance(t.shape[0], str)), None)
