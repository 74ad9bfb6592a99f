"""Helpers: pad short rows of attention scores, and read row lengths from a model."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest

from onnxtrain import thresholds


def fill_up_short_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rows of any length be filled up, by a mask."""
    monkeypatch.setattr(thresholds, "PADDED_ATTENTION_KEYS", 3)
    monkeypatch.setattr(thresholds, "PADDED_ATTENTION_SCORES", 8)
    monkeypatch.setattr(thresholds, "MASK_IN_MATMUL_RATIO", 1 << 10)


def last_size(x: ir.Value | None) -> int:
    """Return the size of the last axis, or 0 if it is not known or there is none."""
    size = x.shape[-1] if x is not None and x.shape is not None and len(x.shape) else 0
    return size if isinstance(size, int) else 0


def row_lengths(model: onnx.ModelProto) -> set[int]:
    """Return how long the rows of scores are, wherever a softmax makes some."""
    graph = ir.from_proto(onnx.shape_inference.infer_shapes(model, data_prop=True)).graph
    rows = [n.outputs[0] for n in graph if n.op_type == "Softmax"]
    return {d for d in (last_size(x) for x in rows) if d}
