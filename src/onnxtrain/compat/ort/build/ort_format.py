"""Models in onnxruntime's own format, by onnxruntime's own tool."""

from __future__ import annotations

import importlib
from pathlib import Path

from onnxtrain.runtime.session import runtime


def write_ort_format(path: Path, custom_op_library: str | None) -> None:
    """Write ``<name>.ort`` and ``<name>.required_operators.config`` next to a model."""
    runtime()
    tool = importlib.import_module("onnxruntime.tools.convert_onnx_models_to_ort")
    tool.convert_onnx_models_to_ort(
        path,
        output_dir=path.parent,
        custom_op_library_path=None if custom_op_library is None else Path(custom_op_library),
        optimization_styles=[tool.OptimizationStyle.Fixed],
    )
