"""A model with adapters: frozen weights as they were, and small matrices that train."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx_ir as ir

from onnxtrain.adapters.adapter import Adapter
from onnxtrain.adapters.files.merge import BRANCH, Merged, merge
from onnxtrain.adapters.files.onnx_adapter import write_ort_adapter, write_ort_base
from onnxtrain.adapters.files.peft import peft_config, write_peft
from onnxtrain.adapters.files.refer import save_referring
from onnxtrain.adapters.files.saved_modules import saved_modules
from onnxtrain.adapters.files.trained_values import Weights, other_values, trained_values
from onnxtrain.adapters.modules.families import foreign
from onnxtrain.graph.roles import ADAPTERS


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
        return tuple(a.module for a in self.adapters if foreign(a.module, self.family))

    def with_parameters(self, arrays: Mapping[str, np.ndarray]) -> Adapted:
        """Return the same model with other values of its adapters."""
        model = self.model.clone()
        model.meta.update(self.model.meta)
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
        saved = saved_modules(self, other_values(self, weights))
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

    def merge(self, weights: Weights = None, *, quantised: str = BRANCH) -> Merged:
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
    ) -> Merged:
        """Write a model without adapters that computes the same, and return it with a report.

        Args:
            path: of the file. In the folder of the original it refers to its external data.
            weights: as in :meth:`export_peft`.
            quantised: as in :meth:`merge`.
        """
        merged = self.merge(weights, quantised=quantised)
        save_referring(merged.model, path)
        return merged

    def __str__(self) -> str:
        kinds = "DoRA" if self.dora else "LoRA"
        where = "" if self.base is None else f" on {os.path.basename(self.base)}"
        count = f"{len(self.adapters)} adapters, {self.size:,} parameters"
        lines = [f"{kinds} rank {self.rank}{where}: {count}", *(f"  {a}" for a in self.adapters)]
        return "\n".join([*lines, *(f"note: {n}" for n in self.notes)])


__all__ = ["Adapted", "Adapter"]
