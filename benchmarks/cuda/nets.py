"""The nets to time on a GPU, and their files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from benchmarks.workloads import WORKLOADS, Workload

LARGE = 4096  # bytes from which a tensor counts as weights in a skeleton


def _transformer() -> Any:
    from benchmarks.cuda.encoder import Encoder

    return Encoder()


def _gpt2() -> Any:
    from benchmarks.workloads import text

    return text.GPT2(8000, width=768, layers=6, heads=12, context=128)


def _cnn() -> Any:
    return WORKLOADS["cnn"].module()


NETS: dict[str, Workload] = {
    w.name: w
    for w in (
        WORKLOADS["mlp"],
        Workload("cnn", "CNN 28x28, batch 256", _cnn, (256, 1, 28, 28), 10, 256),
        Workload(
            "transformer",
            "transformer encoder 6 x 768, ReLU, sequence 128, batch 32, vocabulary 8,000",
            _transformer,
            (32, 128),
            8000,
            32 * 128,
            words=True,
        ),
        Workload(
            "gpt2",
            "GPT-2-like 6 x 768, GELU, sequence 128, batch 32, vocabulary 8,000",
            _gpt2,
            (32, 128),
            8000,
            32 * 128,
            words=True,
        ),
    )
}


def exported(net: Workload) -> onnx.ModelProto:
    """Return the net as ONNX, its batch symbolic."""
    import torch

    from onnxtrain.torch import from_torch

    x, _ = net.batch()
    return ir.to_proto(from_torch(net.module(), (torch.from_numpy(x),)))


def skeleton(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with zeros for weights, which travels small."""
    for tensor in model.graph.initializer:
        array = ir.from_proto(tensor).numpy()
        if array.nbytes >= LARGE and array.dtype.kind == "f":
            tensor.CopyFrom(ir.to_proto(ir.tensor(np.zeros_like(array), name=tensor.name)))
    return model


def filled(path: Path, module: Any) -> onnx.ModelProto:
    """Return a skeleton with the weights of a module, which have the same names."""
    model = onnx.load(path)
    state = {n: t.detach().cpu().numpy() for n, t in module.state_dict().items()}
    for tensor in model.graph.initializer:
        array = state.get(tensor.name)
        if array is not None:
            tensor.CopyFrom(ir.to_proto(ir.tensor(array, name=tensor.name)))
    return model


if __name__ == "__main__":
    import sys

    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for net in NETS.values():
        onnx.save(skeleton(exported(net)), folder / f"{net.name}.onnx")
        print(net.name)
