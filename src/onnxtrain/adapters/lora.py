"""Low-rank adapters beside the frozen layers of a model.

A model with adapters: frozen weights as they were, and small matrices that train.

Adapters that PEFT trained, put onto a file: training goes on.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from onnxtrain.adapters.branches import (
    Adapter,
    AdapterSpec,
    attach_adapters,
    check_ranks,
    initial_values,
)
from onnxtrain.adapters.families import is_packed_by_heads, model_type
from onnxtrain.adapters.layers import (
    CONV,
    TargetModule,
    find_base_layers,
    find_target_modules,
    select_targets,
)
from onnxtrain.adapters.merge import BRANCH, MergeResult, merge
from onnxtrain.adapters.ort_adapter import (
    save_with_external_references,
    write_ort_adapter,
    write_ort_base,
)
from onnxtrain.adapters.peft import (
    PeftAdapter,
    Weights,
    load_saved_modules,
    non_adapter_values,
    peft_config,
    saved_modules,
    trained_values,
    write_peft,
)
from onnxtrain.errors import CheckpointError, PrepareError
from onnxtrain.graph.io import Source, load
from onnxtrain.importer import expose_weights
from onnxtrain.importer.functions import inline_functions
from onnxtrain.importer.opset import OPSET, to_working_opset
from onnxtrain.importer.parameters import ADAPTERS


@dataclasses.dataclass(frozen=True)
class Adapted:
    """A model with adapters: :func:`onnxtrain.build` and all else take it as a model.

    Only the adapters train. The weights of the file are not copied: they stay mapped.
    """

    model: ir.Model
    """The graph with its branches; initializers of the file keep their names and bytes."""
    adapters: tuple[Adapter, ...]
    rank: int
    alpha: float
    dropout: float
    rslora: bool
    dora: bool
    family: str | None
    """The kind of model, as transformers names it, if it is known."""
    base: str | None
    """The file that the model came from, if it is one."""
    plain: ir.Model
    """The graph without branches; its tensors are those of ``model``."""
    modules: tuple[str, ...]
    """All modules of the file that could have an adapter."""
    notes: tuple[str, ...] = ()
    """What a user should know before training."""

    def __post_init__(self) -> None:
        # Artifacts take it along, so that adapters can be written wherever they were trained.
        kept = ("module", "kind", "a", "b", "magnitude", "scaling")
        rows = [{n: getattr(a, n) for n in kept} for a in self.adapters]
        table = {"config": peft_config(self), "tensors": rows}
        self.model.metadata_props[ADAPTERS] = json.dumps(table, sort_keys=True)

    def as_ir(self) -> ir.Model:
        """Return the model, for whatever takes models."""
        return self.model

    @property
    def parameters(self) -> dict[str, np.ndarray]:
        """The adapters' tensors by name, as they are in the model."""
        known = self.model.graph.initializers
        arrays: dict[str, np.ndarray] = {}
        for name in self.names:
            tensor = known[name].const_value
            assert tensor is not None
            arrays[name] = tensor.numpy()
        return arrays

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all initializers that train, each once."""
        return tuple(dict.fromkeys(n for a in self.adapters for n in a.parameters))

    @property
    def size(self) -> int:
        """How many numbers train."""
        return sum(a.size for a in self.parameters.values())

    @property
    def foreign(self) -> tuple[str, ...]:
        """Modules that torch has only as a part of others, so that PEFT has no adapter for them."""
        return tuple(a.module for a in self.adapters if is_packed_by_heads(a.module, self.family))

    def with_parameters(self, arrays: Mapping[str, np.ndarray]) -> Adapted:
        """Return the same model with other values of its adapters."""
        model = self.model.clone()
        for name, array in arrays.items():
            x = model.graph.initializers[name]
            assert x.const_value is not None
            dtype = x.const_value.dtype
            x.const_value = ir.Tensor(np.asarray(array).astype(dtype.numpy()), dtype, name=name)
        return dataclasses.replace(self, model=model)

    def export_peft(
        self,
        directory: str | os.PathLike[str],
        weights: Weights = None,
        *,
        base_model: str = "",
        task_type: str | None = None,
    ) -> None:
        """Write the adapters as a directory of PEFT, which loads them onto the torch original.

        Layers of the file that trained beside them, such as a new head, are ``modules_to_save``.

        Args:
            directory: where adapter_config.json and adapter_model.safetensors go.
            weights: a trainer, arrays by name, or the path of a checkpoint; ``None`` stands for the
                values in the model.
            base_model: what the configuration calls the torch original.
            task_type: PEFT's word for the task, such as ``"CAUSAL_LM"``.

        Raises:
            PrepareError: if torch packs an adapted module with others, head by head.
        """
        values = trained_values(self, weights)
        saved = saved_modules(self, non_adapter_values(self, weights))
        write_peft(directory, self, values, saved=saved, base_model=base_model, task_type=task_type)

    def export_ort_adapter(self, path: str | os.PathLike[str], weights: Weights = None) -> None:
        """Write the adapters as an ``.onnx_adapter`` file, for a base of :meth:`export_ort_base`.

        Args:
            path: of the file.
            weights: as in :meth:`export_peft`.
        """
        write_ort_adapter(path, self, trained_values(self, weights))

    def export_ort_base(self, path: str | os.PathLike[str] | None = None) -> Path:
        """Write the file once with inputs for adapters, and return where it is.

        Without an adapter it computes what the file computes. In the folder of the file it refers
        to its external data; elsewhere it has a copy of them.

        Args:
            path: of the file; by default it is beside the original, ``model.lora.onnx``.
        """
        return write_ort_base(path, self)

    def merge(self, weights: Weights = None, *, quantised: str = BRANCH) -> MergeResult:
        """Return a model without adapters that computes the same.

        Args:
            weights: as in :meth:`export_peft`.
            quantised: what becomes of quantised layers: ``"branch"`` keeps their weights and the
                branch beside them, ``"requantise"`` rounds the sum again, which loses a little.
        """
        return merge(self, trained_values(self, weights), quantised)

    def export_merged(
        self,
        path: str | os.PathLike[str],
        weights: Weights = None,
        *,
        quantised: str = BRANCH,
    ) -> MergeResult:
        """Write a model without adapters that computes the same, and return it with a report.

        Args:
            path: of the file. In the folder of the original it refers to its external data.
            weights: as in :meth:`export_peft`.
            quantised: as in :meth:`merge`.
        """
        merged = self.merge(weights, quantised=quantised)
        save_with_external_references(merged.model, path)
        return merged

    def __str__(self) -> str:
        kinds = "DoRA" if self.dora else "LoRA"
        where = "" if self.base is None else f" on {os.path.basename(self.base)}"
        count = f"{len(self.adapters)} adapters, {self.size:,} parameters"
        lines = [f"{kinds} rank {self.rank}{where}: {count}", *(f"  {a}" for a in self.adapters)]
        return "\n".join([*lines, *(f"note: {n}" for n in self.notes)])


_MIN_OPSET = 13  # opset from which on the operators of a branch have the form that is emitted
_INT8_ACCURACY_LEVEL = 4  # accuracy_level at which MatMulNBits rounds its input


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
    work = prepare_model(model)
    plain = copy_model(work)
    units = find_target_modules(find_base_layers(work.graph), family)
    plans = [
        AdapterSpec(unit, rank, float(alpha), rslora, dora)
        for unit in select_targets(units, targets)
    ]
    check_ranks(plans)
    adapters = attach_adapters(work, plans, initial_values(plans, seed), dropout)
    modules = tuple(u.module for u in units)
    return Adapted(
        work,
        adapters,
        rank,
        float(alpha),
        dropout,
        rslora,
        dora,
        family,
        path,
        plain,
        modules,
        training_notes(plain.graph),
    )


def copy_model(model: ir.Model) -> ir.Model:
    """Return a copy of a graph; its tensors are the same."""
    return model.clone()


def prepare_model(model: Source) -> ir.Model:
    """Return a copy of a model with its weights as initializers, at an opset with our forms."""
    work = load(model)
    if work.functions:
        work = inline_functions(work)
    work, _ = expose_weights(work)
    if work.opset_imports.get("", OPSET) < _MIN_OPSET:
        work = to_working_opset(work, fused=lambda key: False)
    return work


def _check(rank: int, alpha: float, dropout: float) -> None:
    if rank < 1:
        raise PrepareError(f"rank must be at least 1: {rank}")
    if not alpha > 0 or not math.isfinite(alpha):
        raise PrepareError(f"alpha must be above 0: {alpha}")
    if not 0.0 <= dropout < 1.0:
        raise PrepareError(f"dropout must lie in [0, 1): {dropout}")


def training_notes(graph: ir.Graph) -> tuple[str, ...]:
    """Return what a user of a model should know before training."""
    rounding = sum(
        node.op_type == "MatMulNBits"
        and node.attributes.get_int("accuracy_level", 0) >= _INT8_ACCURACY_LEVEL
        for node in graph
    )
    if not rounding:
        return ()
    what = f"{rounding} product(s) of the file round their input to 8 bits (accuracy_level 4)"
    return (f"{what}: up to a percent off. Training does not, so the served file differs from it",)


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
    work = prepare_model(model)
    load_saved_modules(work, peft.saved, family, peft.label)
    plain = copy_model(work)
    units = find_target_modules(find_base_layers(work.graph), family)
    plans, values = [], dict[str, np.ndarray]()
    for module, parts in peft.tensors.items():
        unit = _find_target(units, module, peft.label)
        plan = AdapterSpec(unit, _rank(parts["lora_A"]), peft.alpha(module), peft.rslora, peft.dora)
        plans.append(plan)
        values.update(_values_by_graph_name(plan, parts, peft.label))
    order = {u.module: i for i, u in enumerate(units)}
    plans.sort(key=lambda p: order[p.unit.module])
    check_ranks(plans)
    adapters = attach_adapters(work, plans, values, peft.dropout)
    return Adapted(
        work,
        adapters,
        peft.rank,
        peft.alpha(),
        peft.dropout,
        peft.rslora,
        peft.dora,
        family,
        path,
        plain,
        tuple(order),
        training_notes(plain.graph),
    )


def _find_target(units: Sequence[TargetModule], module: str, label: str) -> TargetModule:
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


def _values_by_graph_name(
    plan: AdapterSpec, parts: dict[str, np.ndarray], label: str
) -> dict[str, np.ndarray]:
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
