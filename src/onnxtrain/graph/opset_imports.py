"""Opset imports: what a runtime does without and this library adds, and what the file had."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph.nodes import subgraphs_of

RUNTIME_DOMAIN = "com.microsoft"
"""The domain of onnxruntime's own operators, which it takes without an import."""
_REPAIRS = "onnxtrain.load_repairs"  # key in Model.meta: what `load` changed, in words
_FILE_OPSET = "onnxtrain.file_opset"  # key in Model.meta: of the standard, as the file has it


def import_runtime_domain(model: ir.Model) -> None:
    """Add the import of onnxruntime's domain where nodes use it and nothing imports it."""
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
    """Record that ``load`` changed something."""
    model.meta[_REPAIRS] = (*load_repairs(model), line)


def load_repairs(model: ir.Model) -> tuple[str, ...]:
    """Say what ``load`` changed of a model so that it is valid."""
    return model.meta.get(_REPAIRS, ())


def record_file_opset(model: ir.Model, opset: int) -> None:
    """Record of which opset the file is that a model comes from."""
    model.meta[_FILE_OPSET] = opset


def file_opset(model: ir.Model) -> int:
    """Return the opset that the file was of: whoever runs the file has its operators."""
    return model.meta.get(_FILE_OPSET, model.opset_imports.get("", 0))
