"""The file order of training graphs makes onnxruntime run them with low peak memory."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import onnxtrain
from onnxtrain.torch import from_torch

LAYERS = 6


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [(nn.Linear(8, 8), nn.Tanh()) for _ in range(LAYERS)]
    return nn.Sequential(*(m for pair in layers for m in pair))


def ran(model: onnx.ModelProto, folder: Path) -> list[str]:
    """Return the outputs of nodes in the order that onnxruntime ran them."""
    options = onnxruntime.SessionOptions()
    options.enable_profiling = True
    options.profile_file_prefix = str(folder / "run")
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    feeds = {
        i.name: np.ones([d if isinstance(d, int) else 4 for d in i.shape], np.float32)
        for i in session.get_inputs()
    }
    session.run(None, feeds)
    events = json.loads(Path(session.end_profiling()).read_text())
    suffix = "_kernel_time"
    names = [e["name"].removesuffix(suffix) for e in events if e["name"].endswith(suffix)]
    outputs = {n.name: n.output[0] for n in model.graph.node}
    return [outputs[n] for n in names if n in outputs]


@pytest.mark.parametrize("target", ["cpu", "cuda", "wasm", "portable"])
def test_weights_have_their_gradients_before_the_next_layer(target: str, tmp_path: Path) -> None:
    model = onnxtrain.vjp(from_torch(network(), (torch.randn(4, 8),)), target=target)
    order = ran(model, tmp_path)
    at = [order.index(f"{2 * i}.weight_grad") for i in range(LAYERS)]
    # No gradient of a layer runs after gradients of the layers before it.
    assert at == sorted(at, reverse=True)
    last_forward = max(order.index(y) for y in order if y.startswith("tanh"))
    assert last_forward < at[-1]


def test_the_order_is_topological(tmp_path: Path) -> None:
    model = onnxtrain.vjp(from_torch(network(), (torch.randn(4, 8),)))
    known = {x.name for x in (*model.graph.input, *model.graph.initializer)}
    for node in model.graph.node:
        assert set(node.input) - {""} <= known
        known |= set(node.output)
