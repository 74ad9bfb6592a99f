"""Stands in for ``onnxcustom.plotting`` where the other imports of onnxcustom are changed."""

from __future__ import annotations

from typing import Any

from tests.upstream.stubs.mlprodict import plot_onnx


def plot_onnxs(*models: Any, ax: Any = None, **_: Any) -> Any:
    """Write the text of graphs into axes."""
    import matplotlib.pyplot as plt

    if ax is None or isinstance(ax, str):
        ax = plt.subplots(1, len(models))[1]
    for model, one in zip(models, [ax] if len(models) == 1 else ax, strict=True):
        plot_onnx(model, ax=one)
    return ax
