"""Stands in for mlprodict: conversion by skl2onnx, runs by onnxruntime, plain graph edits."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import skl2onnx


def to_onnx(model: Any, X: Any = None, rewrite_ops: bool = False, **kwargs: Any) -> Any:
    """Convert an estimator."""
    del rewrite_ops
    return skl2onnx.to_onnx(model, X, **kwargs)


class OnnxInference:
    """A model in a session, with outputs by name."""

    def __init__(self, model: Any, runtime: str = "python", **_: Any) -> None:
        del runtime
        data = model if isinstance(model, bytes) else model.SerializeToString()
        providers = ["CPUExecutionProvider"]
        self.session = onnxruntime.InferenceSession(data, providers=providers)

    def run(self, feeds: Mapping[str, np.ndarray], **_: Any) -> dict[str, np.ndarray]:
        names = [y.name for y in self.session.get_outputs()]
        outputs: Any = self.session.run(names, dict(feeds))
        return dict(zip(names, outputs, strict=True))


def random_feed(inputs: Sequence[onnx.ValueInfoProto], batch: int = 10) -> dict[str, np.ndarray]:
    """Return random values for inputs; an unknown dimension has ``batch`` elements."""
    feeds = {}
    generator = np.random.default_rng(0)
    for x in inputs:
        kind = x.type.tensor_type
        shape = [d.dim_value or batch for d in kind.shape.dim]
        feeds[x.name] = generator.random(shape).astype(ir.DataType(kind.elem_type).numpy())
    return feeds


def onnx_simple_text_plot(model: Any, **_: Any) -> str:
    """Return inputs, initializers, nodes and outputs, one per line."""
    graph = model.graph if hasattr(model, "graph") else model
    lines = [f"opset: domain={o.domain!r} version={o.version}" for o in model.opset_import]
    lines += [f"input: name={x.name!r}" for x in graph.input]
    lines += [f"init: name={x.name!r}" for x in graph.initializer]
    lines += [f"{n.op_type}({', '.join(n.input)}) -> {', '.join(n.output)}" for n in graph.node]
    lines += [f"output: name={y.name!r}" for y in graph.output]
    return "\n".join(lines)


def plot_onnx(model: Any, ax: Any = None, **_: Any) -> Any:
    """Write the text of a graph into an axis."""
    ax.text(0, 0, onnx_simple_text_plot(model), fontsize=4)
    return ax


def select_model_inputs_outputs(
    model: onnx.ModelProto, outputs: Any = None, infer_shapes: bool = False, **_: Any
) -> onnx.ModelProto:
    """Return the part of a model that computes some of its values."""
    del infer_shapes
    names = [outputs] if isinstance(outputs, str) else list(outputs)
    selected = copy.deepcopy(model)
    inferred = onnx.shape_inference.infer_shapes(model).graph
    known = {x.name: x for x in [*inferred.value_info, *inferred.output, *inferred.input]}
    del selected.graph.output[:]
    for name in names:
        unknown = onnx.ValueInfoProto(name=name)
        unknown.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
        selected.graph.output.append(known.get(name, unknown))
    return onnx_remove_node_unused(selected)


def onnx_rename_names(
    model: onnx.ModelProto, recursive: bool = True, replace: Any = None, **_: Any
) -> onnx.ModelProto:
    """Rename values of a graph, in place."""
    del recursive
    graph = model.graph
    for x in [*graph.initializer, *graph.input, *graph.output]:
        x.name = replace.get(x.name, x.name)
    for node in graph.node:
        for names in (node.input, node.output):
            names[:] = [replace.get(name, name) for name in names]
    return model


def onnx_remove_node_unused(model: onnx.ModelProto, **_: Any) -> onnx.ModelProto:
    """Return a model without nodes and initializers that no output needs."""
    result = copy.deepcopy(model)
    graph = result.graph
    needed, nodes = {y.name for y in graph.output}, []
    for node in reversed(graph.node):
        if needed & set(node.output):
            nodes.append(node)
            inner = [g for a in node.attribute for g in (a.g, *a.graphs)]
            needed |= {*node.input, *(n for g in inner for m in g.node for n in m.input)}
    kept = [x for x in graph.initializer if x.name in needed]
    nodes = [copy.deepcopy(node) for node in reversed(nodes)]
    kept = [copy.deepcopy(x) for x in kept]
    del graph.node[:], graph.initializer[:]
    graph.node.extend(nodes)
    graph.initializer.extend(kept)
    return result


onnx_remove_node = onnx_remove_node_unused


def _apply_optimisation_on_graph(
    function: Any, model: onnx.ModelProto, recursive: bool = True, **kwargs: Any
) -> onnx.ModelProto:
    """Return a model with the graph that a function returns for its graph."""
    result = copy.deepcopy(model)
    result.graph.CopyFrom(function(model.graph, recursive=recursive, **kwargs))
    return result


def _apply_remove_node_fct_node(function: Any, node: Any, recursive: bool = True, **_: Any) -> Any:
    del function, recursive
    return node
