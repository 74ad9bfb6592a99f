"""LoRA for ONNX models: ``lora`` adds adapters, ``load_adapter`` loads those of PEFT.

Both return an ``Adapted``: the model with adapters, and the exports to PEFT, onnxruntime and a
merged model.
"""

from __future__ import annotations

import dataclasses
import functools
import json
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
    hyperparameter_problem,
    initial_values,
)
from onnxtrain.adapters.families import is_packed_by_heads, model_type, unverified_modules
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
from onnxtrain.graph.io import CheckedModel, Source, load
from onnxtrain.importer import expose_weights
from onnxtrain.importer.functions import inline_functions
from onnxtrain.importer.opset import OPSET, to_working_opset
from onnxtrain.importer.parameters import ADAPTERS


@dataclasses.dataclass(frozen=True)
class Adapted:
    """A model with adapters, accepted wherever a model is, such as in :func:`onnxtrain.build`.

    Only the adapters are trainable. Weights of the file are memory-mapped, not copied.
    """

    model: ir.Model
    """The graph with adapters; initializers of the file keep their names and bytes."""
    adapters: tuple[Adapter, ...]
    rank: int
    alpha: float
    dropout: float
    rslora: bool
    dora: bool
    family: str | None
    """transformers' ``model_type``, if it is known."""
    base: str | None
    """The file that the model was loaded from, if any."""
    plain: ir.Model
    """The graph without adapters; it shares the tensors of ``model``."""
    modules: tuple[str, ...]
    """All modules of the file that can have an adapter."""
    notes: tuple[str, ...] = ()
    """Warnings about the file, such as activations that it rounds to 8 bits."""

    def __post_init__(self) -> None:
        # Artifacts copy this entry, so that adapters can be exported wherever they are trained.
        fields = ("module", "kind", "a", "b", "magnitude", "scaling")
        tensors = [{n: getattr(a, n) for n in fields} for a in self.adapters]
        table = {"config": peft_config(self), "tensors": tensors}
        self.model.metadata_props[ADAPTERS] = json.dumps(table, sort_keys=True)

    def as_ir(self) -> ir.Model:
        """Return the model with adapters."""
        return self.model

    @property
    def parameters(self) -> dict[str, np.ndarray]:
        """The adapters' tensors by name, with their values in the model."""
        initializers = self.model.graph.initializers
        arrays: dict[str, np.ndarray] = {}
        for name in self.names:
            tensor = initializers[name].const_value
            assert tensor is not None
            arrays[name] = tensor.numpy()
        return arrays

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the trainable initializers."""
        return tuple(dict.fromkeys(n for a in self.adapters for n in a.parameters))

    @property
    def size(self) -> int:
        """The number of trainable parameters."""
        return sum(a.size for a in self.parameters.values())

    @property
    def not_in_peft(self) -> tuple[str, ...]:
        """Modules that PEFT cannot adapt: torch packs them with others, interleaved by head."""
        return tuple(a.module for a in self.adapters if is_packed_by_heads(a.module, self.family))

    @functools.cached_property
    def peft_problem(self) -> str | None:
        """Why the adapters cannot be exported to PEFT, or ``None``."""
        if self.not_in_peft:
            return (
                f"torch packs {self.not_in_peft[0]!r} with other modules of {self.family}, "
                "interleaved by head"
            )
        modules = [a.module for a in self.adapters]
        unknown = unverified_modules(self.plain, modules, self.family)
        if not unknown:
            return None
        family = repr(self.family) if self.family else "an unknown model_type"
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        return f"no rule for the names of {family} in transformers: {unknown[0]}{more}"

    def with_parameters(self, arrays: Mapping[str, np.ndarray]) -> Adapted:
        """Return a copy with other values of the adapters."""
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
        """Write a PEFT adapter directory, to load with ``PeftModel.from_pretrained`` in torch.

        Other trained layers, such as a new head, become ``modules_to_save``.

        Args:
            directory: the directory for adapter_config.json and adapter_model.safetensors.
            weights: a trainer, arrays by name, or the path of a checkpoint. Default: the values in
                the model.
            base_model: ``base_model_name_or_path`` of the configuration.
            task_type: ``task_type`` of the configuration, such as ``"CAUSAL_LM"``.

        Raises:
            PrepareError: if torch packs an adapted module with others, interleaved by head, or the
                names of its modules in transformers are unknown.
        """
        values = trained_values(self, weights)
        saved = saved_modules(self, non_adapter_values(self, weights))
        write_peft(directory, self, values, saved=saved, base_model=base_model, task_type=task_type)

    def export_ort_adapter(self, path: str | os.PathLike[str], weights: Weights = None) -> None:
        """Write an ``.onnx_adapter`` file, to load onto the base of :meth:`export_ort_base`.

        Args:
            path: the file to write.
            weights: see :meth:`export_peft`.
        """
        write_ort_adapter(path, self, trained_values(self, weights))

    def export_ort_base(self, path: str | os.PathLike[str] | None = None) -> Path:
        """Write the base model with inputs for adapters, and return its path.

        Without an active adapter it computes the same as the original. In the folder of the
        original it refers to the same external data; in other folders it has a copy.

        Args:
            path: the file to write. Default: ``model.lora.onnx`` beside ``model.onnx``.
        """
        return write_ort_base(path, self)

    def merge(self, weights: Weights = None, *, quantized: str = BRANCH) -> MergeResult:
        """Merge the adapters into the weights and return the model.

        Args:
            weights: see :meth:`export_peft`.
            quantized: how to merge into quantized layers. ``"branch"`` keeps their weights and adds
                the adapter as a branch; ``"requantize"`` quantizes the merged weights again, which
                costs some accuracy.
        """
        return merge(self, trained_values(self, weights), quantized)

    def export_merged(
        self,
        path: str | os.PathLike[str],
        weights: Weights = None,
        *,
        quantized: str = BRANCH,
    ) -> MergeResult:
        """Write the merged model, and return it with a report.

        Args:
            path: the file to write. In the folder of the original it refers to its external data.
            weights: see :meth:`export_peft`.
            quantized: see :meth:`merge`.
        """
        merged = self.merge(weights, quantized=quantized)
        save_with_external_references(merged.model, path)
        return merged

    def __str__(self) -> str:
        method = "DoRA" if self.dora else "LoRA"
        base = "" if self.base is None else f" on {os.path.basename(self.base)}"
        count = f"{len(self.adapters)} adapters, {self.size:,} parameters"
        lines = [f"{method} rank {self.rank}{base}: {count}", *(f"  {a}" for a in self.adapters)]
        return "\n".join([*lines, *(f"note: {n}" for n in self.notes)])


_MIN_OPSET = 13  # Branches use Slice, Pad and ReduceSum with inputs instead of attributes.
_INT8_ACCURACY_LEVEL = 4  # MatMulNBits quantizes its input to int8 from this accuracy_level on.


def lora(
    model: Source,
    rank: int = 8,
    alpha: float = 16,
    targets: str | Sequence[str] = "attention",
    dropout: float = 0.0,
    rslora: bool = False,
    dora: bool = False,
    *,
    blocks: bool = False,
    seed: int = 0,
    family: str | None = None,
) -> Adapted:
    """Add LoRA adapters to a model.

    An adapter adds ``scaling * (x A) B`` to the output of a frozen layer. ``B`` is initialized to
    zero, so a new adapter does not change the outputs. Neither the file nor its weights change.

    Args:
        model: a path, bytes, ``ModelProto`` or ``ir.Model``; it is not modified.
        rank: rank of the adapters, ``r`` in PEFT.
        alpha: scaling numerator: adapters are scaled by ``alpha / rank``.
        targets: layers that get an adapter: ``"attention"`` (the query, key, value and output
            projections), ``"all-linear"`` (all linear layers except the head), or names or globs of
            torch modules, nodes or weights.
        dropout: dropout probability of the adapters' inputs; not used for embeddings, as in PEFT.
        rslora: use rank-stabilized LoRA: scale by ``alpha / sqrt(rank)``.
        dora: use DoRA: also train a magnitude per output feature.
        blocks: let the inputs of each block of quantized weights share a row of A (QA-LoRA).
            Merging then only moves zero points: the result stays quantized and rounds nothing.
            Other layers get ordinary adapters.
        seed: random seed for the initial values.
        family: transformers' ``model_type``, such as ``"phi3"``; it decides the names of the
            modules and how torch packs them. Default: read from config.json or genai_config.json
            beside the file.

    Raises:
        PrepareError: if a target matches no layer, or the rank is too large for a layer.
    """
    _check(rank, alpha, dropout)
    path = _path_of(model)
    family = model_type(path) if family is None else family
    work = prepare_model(model)
    plain = work.clone()
    candidates = find_target_modules(find_base_layers(work.graph), family)
    selected = select_targets(candidates, targets)
    if blocks and dora:
        raise PrepareError("blocks and dora exclude each other\nhint: use one of them")
    specs = [AdapterSpec(t, rank, float(alpha), rslora, dora, blocks) for t in selected]
    check_ranks(specs)
    adapters = attach_adapters(work, specs, initial_values(specs, seed), dropout)
    modules = tuple(u.module for u in candidates)
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


def _path_of(model: Source) -> str | None:
    """Return the file that a model came from, if it is known."""
    if isinstance(model, CheckedModel):
        return model.path
    return os.fsdecode(model) if isinstance(model, str | os.PathLike) else None


def prepare_model(model: Source) -> ir.Model:
    """Return a copy of a model with its weights as initializers, at opset 13 or later."""
    work = load(model)
    if work.functions:
        work = inline_functions(work)
    work, _ = expose_weights(work)
    if work.opset_imports.get("", OPSET) < _MIN_OPSET:
        work = to_working_opset(work, fused=lambda key: False)
    return work


def _check(rank: int, alpha: float, dropout: float) -> None:
    problem = hyperparameter_problem(rank, alpha, dropout)
    if problem is not None:
        raise PrepareError(problem)


def training_notes(graph: ir.Graph) -> tuple[str, ...]:
    """Return warnings about a model to train."""
    int8_nodes = sum(
        node.op_type == "MatMulNBits"
        and node.attributes.get_int("accuracy_level", 0) >= _INT8_ACCURACY_LEVEL
        for node in graph
    )
    if not int8_nodes:
        return ()
    what = f"{int8_nodes} MatMulNBits node(s) round their input to 8 bits (accuracy_level 4)"
    return (f"{what}; training does not, so outputs of the served model differ by up to 1 %",)


def load_adapter(
    model: Source, directory: str | os.PathLike[str], *, family: str | None = None
) -> Adapted:
    """Load a PEFT adapter onto a model, to export it or to continue training.

    Args:
        model: a path, bytes, ``ModelProto`` or ``ir.Model``; or an :class:`Adapted`, whose adapters
            are replaced.
        directory: a directory of PEFT's ``save_pretrained`` or of :meth:`Adapted.export_peft`.
        family: see :func:`onnxtrain.lora`.

    Raises:
        CheckpointError: if the directory is damaged, or the model lacks a module of the adapter.
    """
    peft = PeftAdapter(directory)
    if isinstance(model, Adapted):
        family, model = family or model.family, CheckedModel(model.plain, model.base)
    path = _path_of(model)
    family = model_type(path) if family is None else family
    work = prepare_model(model)
    load_saved_modules(work, peft.saved, family, peft.label)
    plain = work.clone()
    candidates = find_target_modules(find_base_layers(work.graph), family)
    specs, values = [], dict[str, np.ndarray]()
    for module, parts in peft.tensors.items():
        target = _find_target(candidates, module, peft.label)
        if any(spec.target is target for spec in specs):
            raise CheckpointError(f"{peft.label}: two adapters for {target.module!r}")
        rank = int(parts["lora_A"].shape[0])
        spec = AdapterSpec(target, rank, peft.alpha(module), peft.rslora, peft.dora)
        specs.append(spec)
        values.update(_values_by_graph_name(spec, parts, peft.label))
    order = {u.module: i for i, u in enumerate(candidates)}
    specs.sort(key=lambda p: order[p.target.module])
    check_ranks(specs)
    adapters = attach_adapters(work, specs, values, peft.dropout)
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


def _find_target(candidates: Sequence[TargetModule], module: str, label: str) -> TargetModule:
    """Return the module that an adapter is for; prefixes such as ``model.`` may differ."""
    exact = [u for u in candidates if u.module == module]
    near = exact or [
        u for u in candidates if u.module.endswith("." + module) or module.endswith("." + u.module)
    ]
    if len(near) == 1:
        return near[0]
    last = module.split(".")[-1]
    names = [u.module for u in candidates]
    similar = [n for n in names if n.split(".")[-1] == last] or names
    raise CheckpointError(
        f"{label}: the model has no layer {module!r}\n"
        f"hint: it has {', '.join(similar[:4])}; if torch packs these layers, pass family="
    )


def _values_by_graph_name(
    spec: AdapterSpec, parts: dict[str, np.ndarray], label: str
) -> dict[str, np.ndarray]:
    """Return the tensors of a PEFT adapter with the names and layout of the graph."""
    lora_a, lora_b = parts["lora_A"], parts["lora_B"]
    if spec.target.kind != CONV:
        lora_a, lora_b = lora_a.T, lora_b.T
    arrays = dict(zip(spec.names, (lora_a, lora_b), strict=True))
    for (name, array), shape in zip(arrays.items(), spec.shapes, strict=True):
        if array.shape != shape:
            raise CheckpointError(
                f"{label}: {name!r} has shape {list(array.shape)}, expected {list(shape)}"
            )
    if spec.magnitude is not None:
        if "magnitude" not in parts:
            raise CheckpointError(f"{label}: magnitudes of {spec.target.module!r} are missing")
        magnitude = parts["magnitude"].reshape(-1)
        outputs = lora_b.shape[0] if spec.target.kind == CONV else lora_b.shape[1]
        if magnitude.size != outputs:
            raise CheckpointError(
                f"{label}: {spec.target.module!r} has {magnitude.size} magnitudes, "
                f"expected {outputs}"
            )
        arrays[spec.magnitude] = magnitude
    return {n: np.ascontiguousarray(a) for n, a in arrays.items()}
