"""Add the opset import of onnxruntime's domain where a file lacks it, and record load repairs."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph.nodes import subgraphs_of

RUNTIME_DOMAIN = "com.microsoft"
"""The domain of onnxruntime's own operators, which onnxruntime accepts without an import."""
# Key in Graph.meta: one line per repair. Model.clone() copies Graph.meta but drops Model.meta.
_REPAIRS = "onnxtrain.load_repairs"


def import_runtime_domain(model: ir.Model) -> None:
    """Add the opset import of onnxruntime's domain where nodes use the domain without importing it.

    onnxruntime loads such files, but onnx's checker and inference reject them.
    """
    bodies = [(model.graph, model.opset_imports)]
    bodies += [(f.graph, f.opset_imports) for f in model.functions.values()]
    added = False
    for graph, imports in bodies:
        if RUNTIME_DOMAIN in imports:
            continue
        if _uses_runtime_domain(graph):
            imports[RUNTIME_DOMAIN] = 1
            added = True
    if added:
        model.opset_imports.setdefault(RUNTIME_DOMAIN, 1)
        record_load_repair(model, f"the missing opset import of {RUNTIME_DOMAIN} was added")


def _uses_runtime_domain(graph: ir.Graph) -> bool:
    pending = [graph]
    while pending:
        for node in pending.pop():
            if node.domain == RUNTIME_DOMAIN:
                return True
            pending += subgraphs_of(node)
    return False


def record_load_repair(model: ir.Model, line: str) -> None:
    """Record a line that describes what ``load`` changed in a model."""
    model.graph.meta[_REPAIRS] = (*load_repairs(model), line)


def load_repairs(model: ir.Model) -> tuple[str, ...]:
    """Return what ``load`` changed to make a model valid, one line per change."""
    return model.graph.meta.get(_REPAIRS, ())
