"""Low-rank adapters beside the frozen layers of a model."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.adapters.adapted import Adapted
from onnxtrain.adapters.attach import Plan, attach, check_ranks, start_values
from onnxtrain.adapters.modules.choose import choose
from onnxtrain.adapters.modules.families import model_type
from onnxtrain.adapters.modules.layers import layers_of
from onnxtrain.adapters.modules.units import units_of
from onnxtrain.errors import PrepareError
from onnxtrain.graph.io import Source, load
from onnxtrain.graph.prepare import show_weights
from onnxtrain.graph.prepare.local_functions import inline_functions
from onnxtrain.graph.prepare.versions import OPSET, to_working_opset

_OLDEST = 13  # opset from which on the operators of a branch have the form that is emitted
_ROUNDING = 4  # accuracy_level at which MatMulNBits rounds its input


def lora(
    model: Source,
    rank: int = 8,
    alpha: float = 16,
    targets: str | Sequence[str] = "attention",
    dropout: float = 0.0,
    rslora: bool = False,
    dora: bool = False,
    *,
    seed: int = 0,
    family: str | None = None,
) -> Adapted:
    """Return the model with trainable low-rank branches beside frozen layers.

    A branch adds ``scaling * (x A) B`` to the output of a layer, where ``A`` and ``B`` are narrow.
    At the start they change nothing. The file and its weights stay as they are.

    Args:
        model: a path, bytes, ``ModelProto`` or ``ir.Model``; it is not changed.
        rank: how narrow the branches are.
        alpha: the branch is scaled by ``alpha / rank``.
        targets: ``"attention"`` (the projections of attention), ``"all-linear"`` (every linear
            layer but the head), or names or globs of layers, as torch or the file names them.
        dropout: the share of activations that a branch does not see in training; branches beside
            embeddings read row numbers and see all of them, as in PEFT.
        rslora: scale by ``alpha / sqrt(rank)`` instead.
        dora: train a magnitude per output beside the direction (DoRA).
        seed: of the drawn start values.
        family: the kind of model as transformers names it (``"phi3"``), where no config.json or
            genai_config.json beside the file tells it. It decides how torch packs its modules.

    Raises:
        PrepareError: if a target matches no layer, or the rank does not fit.
    """
    _check(rank, alpha, dropout)
    path = os.fsdecode(model) if isinstance(model, str | os.PathLike) else None
    family = model_type(path) if family is None else family
    work = ready(model)
    plain = copy_of(work)
    units = units_of(layers_of(work.graph), family)
    plans = [Plan(unit, rank, float(alpha), rslora, dora) for unit in choose(units, targets)]
    check_ranks(plans)
    adapters = attach(work, plans, start_values(plans, seed), dropout)
    modules = tuple(u.module for u in units)
    return Adapted(
        work, adapters, rank, float(alpha), dropout, rslora, dora, family, path, plain, modules,
        notes(plain.graph),
    )  # fmt: skip


def copy_of(model: ir.Model) -> ir.Model:
    """Return a copy of a graph; its tensors are the same."""
    copy = model.clone()
    copy.meta.update(model.meta)
    return copy


def ready(model: Source) -> ir.Model:
    """Return a copy of a model with its weights as initializers, at an opset with our forms."""
    work = load(model)
    if work.functions:
        work = inline_functions(work)
    work, _ = show_weights(work)
    if work.opset_imports.get("", OPSET) < _OLDEST:
        work = to_working_opset(work, fused=lambda key: False)
    return work


def _check(rank: int, alpha: float, dropout: float) -> None:
    if rank < 1:
        raise PrepareError(f"rank must be at least 1: {rank}")
    if not alpha > 0 or not math.isfinite(alpha):
        raise PrepareError(f"alpha must be above 0: {alpha}")
    if not 0.0 <= dropout < 1.0:
        raise PrepareError(f"dropout must lie in [0, 1): {dropout}")


def notes(graph: ir.Graph) -> tuple[str, ...]:
    """Return what a user of a model should know before training."""
    rounding = sum(
        node.op_type == "MatMulNBits" and node.attributes.get_int("accuracy_level", 0) >= _ROUNDING
        for node in graph
    )
    if not rounding:
        return ()
    what = f"{rounding} product(s) of the file round their input to 8 bits (accuracy_level 4)"
    return (f"{what}: up to a percent off. Training does not, so the served file differs from it",)


__all__ = ["copy_of", "lora", "notes", "ready"]
