"""The graph that a session of the CPU really runs: fused and folded."""

from __future__ import annotations

import tempfile
from pathlib import Path

import onnx

from onnxtrain.runtime import session as runtime


def executed_graph(source: bytes | str) -> onnx.ModelProto:
    """Return what onnxruntime makes of a model; nodes that it did not make keep their names.

    Its nodes are in some order that respects their inputs, not in that of a run. Weights that lie
    in other files stay there.

    Args:
        source: as for :func:`onnxtrain.runtime.session.create`.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "executed.onnx"
        options = runtime.session_options(1)
        options.optimized_model_filepath = str(path)
        options.add_session_config_entry("session.disable_prepacking", "1")
        runtime.create(source, threads=1, options=options)
        return onnx.load(path, load_external_data=False)
