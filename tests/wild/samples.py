"""Graphs of each producer, small enough for the repository: weights are generated on demand.

``python -m tests.wild.samples`` takes them from the files of ``make wild``.
"""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir

from tests.wild.places import FILES

KEPT = Path(__file__).parent / "kept"
SAMPLES = (
    *("genai/qwen3-int4", "genai/gemma2-fp16", "mobius/mistral.onnx", "mobius/bert.onnx"),
    *("optimum/gpt2-fused1.onnx", "optimum/t5-encoder_model.onnx"),
    *("keras/lstm.onnx", "keras/conv.onnx", "sklearn/mlp.onnx", "sklearn/pca.onnx"),
)
SMALL = 2048
"""Bytes: tensors up to this size stay, and so do tables of rotations and biases of zeros."""
DRAWN = "drawn"
"""The documentation of a tensor whose values are drawn."""


def sample(label: str) -> Path:
    """Return where the graph of a file is kept."""
    return KEPT / f"{label.replace('/', '-').removesuffix('.onnx')}.onnx"


def keep(label: str) -> None:
    """Write the graph of a file, without the values of its larger weights."""
    path = FILES / label
    model = onnx.load(path / "model.onnx" if path.is_dir() else path)
    for tensor in model.graph.initializer:
        array = ir.serde.deserialize_tensor(tensor).numpy()
        if array.nbytes > SMALL and "cache" not in tensor.name and array.any():
            dims, kind = list(tensor.dims), tensor.data_type
            doc = f"{DRAWN} {array.astype(np.float64).std():.3g}"
            tensor.CopyFrom(
                onnx.TensorProto(name=tensor.name, dims=dims, data_type=kind, doc_string=doc)
            )
    KEPT.mkdir(exist_ok=True)
    sample(label).write_bytes(model.SerializeToString(deterministic=True))


def filled(label: str, folder: Path) -> Path:
    """Return a file with the graph that is kept and weights of the size that they had."""
    model, rng = onnx.load(sample(label)), np.random.default_rng(4)
    for tensor in model.graph.initializer:
        if tensor.doc_string.startswith(DRAWN):
            dtype = ir.DataType(tensor.data_type).numpy()
            array = _drawn(rng, tuple(tensor.dims), dtype, float(tensor.doc_string.split()[1]))
            tensor.CopyFrom(ir.serde.serialize_tensor(ir.Tensor(array, name=tensor.name)))
    path = folder / sample(label).name
    path.write_bytes(model.SerializeToString())
    return path


def _drawn(
    rng: np.random.Generator, dims: tuple[int, ...], dtype: np.dtype, size: float
) -> np.ndarray:
    if dtype.kind == "f" or dtype == ml_dtypes.bfloat16:
        return (rng.standard_normal(dims) * size).astype(dtype)
    return rng.integers(0, np.iinfo(dtype).max + 1, dims).astype(dtype)


if __name__ == "__main__":
    for each in SAMPLES:
        keep(each)
