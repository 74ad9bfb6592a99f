"""The part of an evaluation model that is needed to make some values, with trained weights."""

from __future__ import annotations

import os
from collections.abc import Sequence

import onnx
import onnx_ir as ir

from onnxtrain.compat.ort.build.embed import KEY
from onnxtrain.compat.ort.errors import OrtError, as_ort_errors
from onnxtrain.compat.ort.store import Store
from onnxtrain.graph.io import load, save
from onnxtrain.graph.simplify import remove_dead


def export_for_inference(
    source: str | bytes, store: Store, names: Sequence[str], path: str | os.PathLike[str]
) -> None:
    """Write a model whose outputs are ``names``, whose weights are those of ``store``."""
    if not names:
        raise OrtError("Expected a non empty vector of graph output names. Got an empty vector.")
    if isinstance(source, str) and source.endswith(".ort"):
        raise OrtError("Only an evaluation model in ONNX format can be exported, not an .ort file")
    with as_ort_errors():
        model = load(source, allow_domains=domains_of(source))
    graph = model.graph
    values = {y.name: y for node in graph for y in node.outputs}
    unknown = [n for n in names if n not in values]
    if unknown:
        raise OrtError(
            f"Expected graph output for inference graph {unknown[0]} could not be found. "
            "Please regenerate the eval graph."
        )
    graph.outputs.clear()
    graph.outputs.extend(values[n] for n in names)
    for x in [x for x in graph.inputs if x.name in store.values]:
        graph.inputs.remove(x)
        x.const_value = ir.Tensor(store.array(x.name or ""), name=x.name)
        graph.register_initializer(x)
    remove_dead(model)
    for x in list(graph.inputs):
        if not x.uses() and not x.is_graph_output():
            graph.inputs.remove(x)
    model.metadata_props.pop(KEY, None)
    graph.name = "inference_model"
    with as_ort_errors():
        save(model, path)


def domains_of(source: str | os.PathLike[str] | bytes) -> set[str]:
    """Return every operator domain that a model imports, for one whose author is trusted."""
    if isinstance(source, bytes):
        model = onnx.load_from_string(source)
    else:
        model = onnx.load(source, load_external_data=False)
    return {o.domain for o in model.opset_import}
