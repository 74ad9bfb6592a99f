"""New names for the parameters of an exported model, in all places that name them."""

from __future__ import annotations

import json
from collections.abc import Callable

import onnx_ir as ir

from onnxtrain.artifacts.pretrained_weights import ALIASES, aliases_of
from onnxtrain.graph.roles import FROZEN, PARAMETERS


def rename_initializers(model: ir.Model, new_name: Callable[[str], str]) -> None:
    """Rename initializers in place, and what the model's metadata calls by their names."""
    graph, notes = model.graph, model.metadata_props
    for name in list(graph.initializers):
        if new_name(name) != name:
            value = graph.initializers.pop(name)
            value.name = new_name(name)
            graph.register_initializer(value)
    for key in (PARAMETERS, FROZEN):
        if key in notes:
            notes[key] = json.dumps(sorted(map(new_name, json.loads(notes[key]))))
    if ALIASES in notes:
        tied = {new_name(n): [new_name(x) for x in xs] for n, xs in aliases_of(model).items()}
        notes[ALIASES] = json.dumps(tied, sort_keys=True)


__all__ = ["rename_initializers"]
