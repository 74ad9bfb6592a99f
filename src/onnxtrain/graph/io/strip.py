"""Notes of exporters that tell about the author's machine, and nothing about the model."""

from __future__ import annotations

import re
from typing import Any

import onnx_ir as ir

from onnxtrain.graph.captured_values import subgraphs_of

_TRACE_KEYS = re.compile(r"stack_?trace|source_?(file|location)", re.IGNORECASE)
_FILES = re.compile(
    r"""File\ ["'][^"'\n]+["'],\ line\ \d+       # a line of a Python traceback
    |(?:^|[\s"'(=:])(?:/|[A-Za-z]:[\\/])[^\s"']*[\\/][^\s"']+\.(?:py|ipynb|cpp|cc|cu|h)\b""",
    re.VERBOSE,
)


def strip_traces(model: ir.Model) -> None:
    """Remove stack traces and source paths from metadata and doc strings, subgraphs included."""
    _clean(model)
    pending: list[Any] = [model.graph, *model.functions.values()]
    while pending:
        graph = pending.pop()
        _clean(graph)
        for value in (*graph.inputs, *graph.outputs, *getattr(graph, "initializers", {}).values()):
            _clean(value)
        for node in graph:
            _clean(node)
            for value in node.outputs:
                _clean(value)
            pending += subgraphs_of(node)


def _clean(thing: Any) -> None:
    notes = thing.metadata_props
    for key in [k for k, text in notes.items() if _TRACE_KEYS.search(k) or _FILES.search(text)]:
        del notes[key]
    if thing.doc_string and _FILES.search(thing.doc_string):
        thing.doc_string = None


__all__ = ["strip_traces"]
