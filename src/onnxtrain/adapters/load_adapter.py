"""Adapters that PEFT trained, put onto a file: training goes on."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from onnxtrain.adapters.adapted import Adapted
from onnxtrain.adapters.attach import Plan, attach, check_ranks
from onnxtrain.adapters.files.peft import PeftAdapter
from onnxtrain.adapters.files.saved_modules import put_saved
from onnxtrain.adapters.lora import copy_of, notes, ready
from onnxtrain.adapters.modules.families import model_type
from onnxtrain.adapters.modules.layers import CONV, layers_of
from onnxtrain.adapters.modules.units import Unit, units_of
from onnxtrain.errors import CheckpointError
from onnxtrain.graph.io import Source


def load_adapter(
    model: Source, directory: str | os.PathLike[str], *, family: str | None = None
) -> Adapted:
    """Return the model with the adapters of a PEFT directory, ready to be trained further.

    Args:
        model: a path, bytes, ``ModelProto`` or ``ir.Model``, or an :class:`Adapted`, whose own
            adapters then give way.
        directory: what ``save_pretrained`` of PEFT, or :meth:`Adapted.export_peft`, wrote.
        family: as in :func:`onnxtrain.lora`.

    Raises:
        CheckpointError: if the directory is damaged, or its adapters do not fit the model.
    """
    peft = PeftAdapter(directory)
    path: str | None = None
    if isinstance(model, Adapted):
        path, family, model = model.base, family or model.family, model.plain
    elif isinstance(model, str | os.PathLike):
        path = os.fsdecode(model)
    family = model_type(path) if family is None else family
    work = ready(model)
    put_saved(work, peft.saved, family, peft.label)
    plain = copy_of(work)
    units = units_of(layers_of(work.graph), family)
    plans, values = [], dict[str, np.ndarray]()
    for module, parts in peft.tensors.items():
        unit = _unit(units, module, peft.label)
        plan = Plan(unit, _rank(parts["lora_A"]), peft.alpha(module), peft.rslora, peft.dora)
        plans.append(plan)
        values.update(_values(plan, parts, peft.label))
    order = {u.module: i for i, u in enumerate(units)}
    plans.sort(key=lambda p: order[p.unit.module])
    check_ranks(plans)
    adapters = attach(work, plans, values, peft.dropout)
    return Adapted(
        work, adapters, peft.rank, peft.alpha(), peft.dropout, peft.rslora, peft.dora, family, path,
        plain, tuple(order), notes(plain.graph),
    )  # fmt: skip


def _unit(units: Sequence[Unit], module: str, label: str) -> Unit:
    """Return the unit that an adapter is for; a path may lack its first names, or have more."""
    exact = [u for u in units if u.module == module]
    near = exact or [
        u for u in units if u.module.endswith("." + module) or module.endswith("." + u.module)
    ]
    if len(near) == 1:
        return near[0]
    last = module.split(".")[-1]
    alike = [u.module for u in units if u.module.split(".")[-1] == last] or [
        u.module for u in units
    ]
    raise CheckpointError(
        f"{label}: the model has no layer {module!r}\n"
        f"hint: it has {', '.join(alike[:4])}; family= tells which layers torch packs into one"
    )


def _rank(first: np.ndarray) -> int:
    return int(first.shape[0])


def _values(plan: Plan, parts: dict[str, np.ndarray], label: str) -> dict[str, np.ndarray]:
    """Return the tensors of an adapter by the graph's names, in its layout."""
    first, second = parts["lora_A"], parts["lora_B"]
    if plan.unit.kind != CONV:
        first, second = first.T, second.T
    arrays = dict(zip(plan.names, (first, second), strict=True))
    for (name, array), shape in zip(arrays.items(), plan.shapes, strict=True):
        if array.shape != shape:
            raise CheckpointError(
                f"{label}: {name!r} has shape {list(array.shape)}, the model wants {list(shape)}"
            )
    if plan.magnitude is not None:
        if "magnitude" not in parts:
            raise CheckpointError(f"{label}: {plan.unit.module!r} has no magnitudes")
        arrays[plan.magnitude] = parts["magnitude"].reshape(-1)
    return {n: np.ascontiguousarray(a) for n, a in arrays.items()}


__all__ = ["load_adapter"]
