"""Whole layers that train beside adapters, in PEFT's way: ``modules_to_save``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from onnxtrain.adapters.modules.families import renamed
from onnxtrain.adapters.modules.frozen_weights import frozen_weight
from onnxtrain.adapters.modules.layers import LINEAR, Layer, layers_of
from onnxtrain.errors import CheckpointError, PrepareError
from onnxtrain.graph.nodes import is_op

if TYPE_CHECKING:
    from onnxtrain.adapters.adapted import Adapted

Saved = dict[str, dict[str, np.ndarray]]
"""Module -> ``weight`` and ``bias``, in torch's layout."""


def saved_modules(adapted: Adapted, values: Mapping[str, np.ndarray]) -> Saved:
    """Return whole modules by torch's names and layouts.

    Args:
        adapted: the model that they are of.
        values: trained weights of its file, by name.

    Raises:
        PrepareError: a weight is of no module that can be told.
    """
    model = adapted.plain.clone()
    _set_all(model, values)
    places = _places(model, adapted.family)
    saved: Saved = {}
    for name, array in values.items():
        module, part, layer = places.get(name) or _by_name(name)
        if layer is not None and layer.kind == LINEAR and part == "weight":
            array = frozen_weight(layer).T
        saved.setdefault(module, {})[part] = np.ascontiguousarray(array)
    return saved


def put_saved(model: ir.Model, saved: Saved, family: str | None, label: str) -> None:
    """Give a model the weights of whole modules, in place.

    Raises:
        CheckpointError: the model has no such module, or of another size.
    """
    places = {(m, p): (n, layer) for n, (m, p, layer) in _places(model, family).items()}
    names = model.graph.initializers
    for module, parts in saved.items():
        for part, array in parts.items():
            name, layer = places.get((module, part), (f"{module}.{part}", None))
            if name not in names:
                raise CheckpointError(f"{label}: the model has no {module}.{part} to save")
            if layer is not None and layer.kind == LINEAR and part == "weight":
                array = _as_stored(layer, names[name], array)
            tensor = names[name].const_value
            if tensor is None or tuple(tensor.shape) != array.shape:
                raise CheckpointError(
                    f"{label}: {module}.{part} has shape {list(array.shape)}, the model another\n"
                    "hint: onnxtrain.replace_head makes a last layer for other classes"
                )
            _set_all(model, {name: array})


def _as_stored(layer: Layer, weight: ir.Value, array: np.ndarray) -> np.ndarray:
    """Return [outputs, inputs] as the file holds it."""
    tensor, as_rows = weight.const_value, frozen_weight(layer)
    stored = None if tensor is None else tensor.numpy()
    if stored is not None and np.array_equal(stored, as_rows):
        return array.T
    return array


def _places(model: ir.Model, family: str | None) -> dict[str, tuple[str, str, Layer | None]]:
    """Return the module and the part of it that each stored tensor of a layer is."""
    places: dict[str, tuple[str, str, Layer | None]] = {}
    for layer in layers_of(model.graph):
        if len(layer.parts) > 1 or len(layer.weights) != 1:
            continue
        module = renamed(layer.module, family)
        places[layer.weights[0].name or ""] = module, "weight", layer
        for bias in _biases(layer):
            places[bias] = module, "bias", layer
    return places


def _biases(layer: Layer) -> Iterable[str]:
    node = layer.node
    values = list(node.inputs[2:3]) if is_op(node, "Gemm", "Conv") else []
    if is_op(node, "MatMul"):
        behind = [u.node for u in node.outputs[0].uses() if is_op(u.node, "Add")]
        values = [x for n in behind for x in n.inputs]
    return [x.name or "" for x in values if x is not None and x.is_initializer()]


def _by_name(name: str) -> tuple[str, str, Layer | None]:
    module, _, part = name.rpartition(".")
    if not module or part not in ("weight", "bias"):
        raise PrepareError(
            f"{name!r} trained beside the adapters, and PEFT has no place for it\n"
            "hint: train weights and biases of layers with names, or use export_merged"
        )
    return module, part, None


def _set_all(model: ir.Model, values: Mapping[str, np.ndarray]) -> None:
    for name, array in values.items():
        x = model.graph.initializers[name]
        dtype = x.dtype or ir.DataType.FLOAT
        x.const_value = ir.Tensor(
            np.ascontiguousarray(array.astype(dtype.numpy())), dtype, name=name
        )


__all__ = ["Saved", "put_saved", "saved_modules"]
