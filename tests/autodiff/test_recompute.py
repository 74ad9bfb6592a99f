"""Activation checkpointing: recomputed blocks give the same values with less memory."""

from __future__ import annotations

import collections
import functools
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

from onnxtrain import losses, optim
from onnxtrain.artifacts import Artifacts
from onnxtrain.artifacts.build import build
from onnxtrain.autodiff.gradients import load_normalized
from onnxtrain.autodiff.recompute import find_blocks
from onnxtrain.errors import PrepareError
from onnxtrain.torch import from_torch
from onnxtrain.torch.exporters import suppress_output
from onnxtrain.training import Trainer
from tests.training.nets import Block, batches, exported

LEVEL = onnxruntime.GraphOptimizationLevel
WIDTH, TIME, WORDS = 16, 6, 11


class Deep(nn.Module):
    """A sequence of transformer blocks with dropout."""

    def __init__(self, layers: int = 4, width: int = WIDTH) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WORDS, width)
        parts = [nn.Sequential(Block(width, 2), nn.Dropout(0.2)) for _ in range(layers)]
        self.blocks = nn.Sequential(*parts)
        self.head = nn.Linear(width, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.tokens(ids)))


@functools.cache
def deep(layers: int = 4, width: int = WIDTH) -> onnx.ModelProto:
    torch.manual_seed(0)
    buffer = io.BytesIO()
    with suppress_output():
        torch.onnx.export(
            Deep(layers, width).train(),
            (torch.zeros(2, TIME, dtype=torch.long),),
            buffer,
            dynamo=False,
            opset_version=17,
            input_names=["x"],
            output_names=["y"],
            dynamic_axes={"x": {0: "batch", 1: "time"}},
            training=torch.onnx.TrainingMode.TRAINING,
            do_constant_folding=False,
        )
    return onnx.load_from_string(buffer.getvalue())


def build_sgd(model: Any, recompute: Any, **options: Any) -> Artifacts:
    options = {"optimizer": optim.SGD(lr=0.1), "loss": losses.CrossEntropy(axis=-1), **options}
    return build(model, recompute=recompute, **options)


def counts(model: onnx.ModelProto) -> collections.Counter[str]:
    return collections.Counter(n.op_type for n in model.graph.node)


def run_plain(
    artifacts: Artifacts, batch: tuple[np.ndarray, ...], poison: float | None = None
) -> dict[str, np.ndarray]:
    """Return all outputs of the training graph, run without graph optimizations."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = LEVEL.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(artifacts.models["train"].SerializeToString(), options)
    spec = artifacts.manifest.model("train")
    assert spec is not None
    feeds: dict[str, Any] = {
        t.name: x.astype(t.dtype) for t, x in zip(spec.inputs, batch, strict=False)
    }
    for t in spec.inputs:
        if t.role in ("parameter", "buffer"):
            feeds[t.name] = np.array(artifacts.values[t.name])
        elif t.role == "accumulator":
            feeds[t.name] = np.zeros([d for d in t.shape if isinstance(d, int)], np.float32)
        elif t.role in ("reset", "rng"):
            feeds[t.name] = np.array([True]) if t.role == "reset" else np.array([5, 1], np.float32)
    if poison is not None:
        feeds["head.bias"][0] = poison
    names = [y.name for y in session.get_outputs()]
    return dict(zip(names, session.run(None, feeds), strict=True))


TOKENS = batches("transformer", 1, size=4)[0]
RECOMPUTE = [
    "auto",
    ("blocks.[0-9]",),
    ("blocks.1", "blocks.3"),
    ("*/blocks.[02]/*Add_1_output_0",),
]


@functools.cache
def deep_artifacts(recompute: Any) -> Artifacts:
    return build_sgd(deep(), recompute)


@pytest.mark.parametrize("recompute", RECOMPUTE, ids=str)
@pytest.mark.parametrize("poison", [None, np.nan, np.inf])
def test_gradients_are_bitwise_equal(recompute: Any, poison: float | None) -> None:
    """Also with NaN and infinity in the gradients that the recomputed nodes depend on."""
    plain, recomputed = deep_artifacts(()), deep_artifacts(recompute)
    assert counts(recomputed.models["train"])["Softmax"] > counts(plain.models["train"])["Softmax"]
    expected, actual = run_plain(plain, TOKENS, poison), run_plain(recomputed, TOKENS, poison)
    for name, value in expected.items():
        np.testing.assert_array_equal(actual[name].view(np.int32), value.view(np.int32), name)


@pytest.mark.parametrize("layout", ["fused", "separate", "vector"])
def test_training_with_dropout_is_the_same(layout: str) -> None:
    """Up to rounding: onnxruntime may fuse more nodes of the forward pass."""
    trainers = [
        Trainer(deep_artifacts(recompute), layout=layout, threads=1, seed=3)
        for recompute in ((), "auto")
    ]
    for batch in batches("transformer", 6):
        expected, actual = (t.step(*batch).loss for t in trainers)
        assert actual == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("target", ["cpu", "cuda", "webgpu"])
def test_batch_norm_and_pooling(target: str) -> None:
    """Running statistics are updated once; the indices of MaxPool are recomputed as well."""
    model, batch = exported("cnn", training=True), batches("cnn", 1)[0]
    variants = [
        build_sgd(model, recompute, loss="cross_entropy", target=target)
        for recompute in ((), ["/Relu_1_output_0"], ["conv1", "norm1"])
    ]
    outputs = [run_plain(a, batch) for a in variants]
    for other in outputs[1:]:
        for name, value in outputs[0].items():
            np.testing.assert_array_equal(other[name], value, err_msg=name)


@pytest.mark.parametrize("precision", ["bf16-mixed", "fp16-mixed"])
def test_mixed_precision(precision: str) -> None:
    variants = [build_sgd(deep(), recompute, precision=precision) for recompute in ((), "auto")]
    losses = [[Trainer(a, threads=1, seed=1).step(*TOKENS).loss] for a in variants]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_native_dropout_is_not_recomputed() -> None:
    artifacts = build_sgd(deep(), "auto", randomness="native")
    assert counts(artifacts.models["train"])["Dropout"] == 4
    assert counts(artifacts.models["train"])["Softmax"] > 4


def test_onnxruntime_does_not_merge_the_copies(tmp_path: Path) -> None:
    """Its common subexpression elimination runs already at the basic level."""
    softmax_counts = []
    for level in (LEVEL.ORT_ENABLE_BASIC, LEVEL.ORT_ENABLE_ALL):
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = level
        options.log_severity_level = 4
        options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
        model = deep_artifacts(("blocks.[0-9]",)).models["step"]
        onnxruntime.InferenceSession(model.SerializeToString(), options)
        softmax_counts.append(counts(onnx.load(tmp_path / "optimized.onnx"))["Softmax"])
    assert softmax_counts == [8, 8]


def test_find_blocks_by_scope_or_value() -> None:
    nodes = list(load_normalized(deep()).graph)
    blocks = find_blocks(nodes, ["blocks.[0-9]"], set())
    assert len(blocks) == 4
    assert not set(blocks[0]) & set(blocks[1])
    between = find_blocks(nodes, ["*/blocks.[02]/*Add_1_output_0"], set())
    assert len(between) == 2
    assert between[1][-1].outputs[0].name == "/blocks/blocks.2/blocks.2.0/Add_1_output_0"
    with pytest.raises(
        PrepareError, match=r"unknown scope, node or value: 'blocks.x'\nhint: did you mean blocks\."
    ):
        find_blocks(nodes, ["blocks.x"], set())


def test_scopes_of_the_dynamo_exporter() -> None:
    """This exporter writes scopes into the metadata of nodes."""
    model = from_torch(Deep(2).train(), (torch.zeros(2, TIME, dtype=torch.long),))
    plain, recomputed = (
        build_sgd(model, recompute).models["train"] for recompute in ((), ["blocks.[01]"])
    )
    assert [counts(m)["Softmax"] for m in (plain, recomputed)] == [2, 4]


def test_building_twice_gives_the_same_bytes() -> None:
    first, second = (
        build_sgd(deep(), "auto").models["step"],
        deep_artifacts("auto").models["step"],
    )
    assert first.SerializeToString(deterministic=True) == second.SerializeToString(
        deterministic=True
    )


CHILD = """
import sys, pathlib, numpy as np
from onnxtrain.training import Trainer
def peak():
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(x.split()[1]) for x in lines if x.startswith("VmHWM"))
trainer = Trainer(sys.argv[1], threads=1, layout="vector")
ids = np.arange(32 * 64).reshape(32, 64) % 11
before = peak()
for _ in range(2):
    trainer.step(ids, ids)
print(peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads peak memory from /proc")
def test_peak_memory_falls(tmp_path: Path) -> None:
    """Without recomputation, the activations of all eight blocks are alive at once."""
    peaks = []
    for i, recompute in enumerate(((), "auto")):
        build_sgd(deep(8, 32), recompute).save(tmp_path / str(i))
        command = [sys.executable, "-c", CHILD, str(tmp_path / str(i))]
        process = subprocess.run(command, capture_output=True, text=True, check=True, timeout=1200)
        peaks.append(int(process.stdout))
    assert peaks[1] < 0.6 * peaks[0]
