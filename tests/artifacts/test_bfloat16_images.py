"""Convolutional nets in bf16-mixed for CUDA: activations stay bfloat16, as in autocast."""

from __future__ import annotations

import collections
import functools
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto
from torch import nn

import onnxtrain
from onnxtrain.artifacts import Artifacts
from onnxtrain.graph.memory_usage import Sizes, peak_bytes, run_order
from onnxtrain.torch import from_torch
from tests.emulated_bfloat16 import element_types, emulated

BATCH, CLASSES = 16, 5
# Each was run in bfloat16 on an H200 by onnxruntime-gpu 1.31.1 without a node on the CPU.
ON_CUDA = frozenset(
    {
        *("Add", "Cast", "Concat", "Conv", "Div", "Expand", "Gather", "Gemm", "HardSigmoid"),
        *(
            "HardSwish",
            "Identity",
            "LayerNormalization",
            "MatMul",
            "Max",
            "Mul",
            "Neg",
            "ReduceSum",
        ),
        *("Relu", "Reshape", "ScatterElements", "Slice", "Squeeze", "Sub", "Transpose"),
        *("Unsqueeze", "Where"),
    }
)
RATE = 0.05


@pytest.fixture(autouse=True)
def plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN's 16-bit convolutions need instructions that some machines only claim to have."""
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)


class Residual(nn.Module):
    """Every kind of convolution of a ResNet, and what MobileNets have besides, on 32x32 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv1, self.norm1 = nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.each, self.norm3 = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8)
        self.down, self.norm4 = nn.Conv2d(8, 12, 3, 2, 1, bias=False), nn.BatchNorm2d(12)
        self.share = nn.Conv2d(8, 8, 1)
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [rows, classes]."""
        x = nn.functional.max_pool2d(torch.relu(self.norm(self.first(x))), 3, 2, 1)
        y = nn.functional.hardswish(self.norm1(self.conv1(x)))
        y = y * nn.functional.hardsigmoid(self.share(y.mean((2, 3), keepdim=True)))
        y = torch.relu(self.norm3(self.each(self.norm2(self.conv2(y)))) + x)
        return self.head(torch.relu(self.norm4(self.down(y))).mean((2, 3)))


def batch(number: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(number)
    x = rng.standard_normal((BATCH, 3, 32, 32)).astype(np.float32)
    return x, x.mean((2, 3)).argmax(1) + (x[:, 0, 0, 0] > 0)


def net() -> nn.Module:
    torch.manual_seed(0)
    return Residual()


@functools.cache
def exported() -> onnx.ModelProto:
    return ir.to_proto(from_torch(net(), (torch.from_numpy(batch()[0]),)))


@functools.cache
def made(precision: str, model: Any = None) -> Artifacts:
    return onnxtrain.build(
        exported() if model is None else model(),
        loss="cross_entropy",
        optimizer="sgd",
        target="cuda",
        precision=precision,
        dims={"batch": BATCH},
    )


class Steps:
    """SGD with the train graph of CUDA, run on the CPU."""

    def __init__(self, precision: str) -> None:
        artifacts = made(precision)
        model, spec = artifacts.models["train"], artifacts.manifest.model("train")
        assert spec is not None
        options = ort.SessionOptions()
        # Two casts in a row are one to an optimizer.
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        self.session = ort.InferenceSession(emulated(model).SerializeToString(), options)
        self.roles = {t.name: t for t in spec.inputs}
        self.values = {t.name: artifacts.values[t.name] for t in spec.inputs_of("parameter")}
        self.buffers = {t.name: artifacts.values[t.name] for t in spec.inputs_of("buffer")}

    def run(self, x: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
        feeds: dict[str, np.ndarray] = {**self.values, **self.buffers}
        for name, t in self.roles.items():
            if t.role == "accumulator":
                feeds[name] = np.zeros([d for d in t.shape if isinstance(d, int)], np.float32)
            elif t.role == "reset":
                feeds[name] = np.array([True])
            elif name not in feeds:
                feeds[name] = x if "float" in t.dtype else labels
        outputs = [y.name for y in self.session.get_outputs()]
        arrays = [np.asarray(y) for y in self.session.run(None, feeds)]
        return dict(zip(outputs, arrays, strict=True))

    def gradients(self, outputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {
            n: next(v for k, v in outputs.items() if k.startswith(f"{n}_grad")) for n in self.values
        }

    def step(self, x: np.ndarray, labels: np.ndarray) -> float:
        outputs = self.run(x, labels)
        for name, g in self.gradients(outputs).items():
            self.values[name] = self.values[name] - np.float32(RATE) * g
        for name in self.buffers:
            self.buffers[name] = outputs.get(f"{name}.out", self.buffers[name])
        return float(outputs["loss"])


def torch_gradients(module: nn.Module, *, mixed: bool) -> dict[str, np.ndarray]:
    """Return gradients in float64, or as autocast computes them."""
    x, labels = (torch.from_numpy(a) for a in batch())
    module, x = (module, x) if mixed else (module.double(), x.double())
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        scores = module(x).double()
    nn.functional.cross_entropy(scores, labels).backward()
    return {n: p.grad.numpy().copy() for n, p in module.named_parameters() if p.grad is not None}


def apart(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    joined = [np.concatenate([d[n].ravel() for n in sorted(a)]) for d in (a, b)]
    return float(np.linalg.norm(joined[0] - joined[1]) / np.linalg.norm(joined[0]))


def test_gradients_are_as_accurate_as_autocast() -> None:
    exact, theirs = torch_gradients(net(), mixed=False), torch_gradients(net(), mixed=True)
    steps = {p: Steps(p) for p in ("float32", "bf16-mixed")}
    ours = {p: s.gradients(s.run(*batch())) for p, s in steps.items()}
    assert apart(exact, ours["float32"]) < 1e-5
    assert apart(exact, ours["bf16-mixed"]) < 1.5 * apart(exact, theirs)


def test_losses_stay_near_those_of_float32() -> None:
    wide, narrow = Steps("float32"), Steps("bf16-mixed")
    losses = [(wide.step(*batch(n)), narrow.step(*batch(n))) for n in range(20)]
    np.testing.assert_allclose([b for _, b in losses], [a for a, _ in losses], rtol=2e-2)
    assert losses[-1][0] < losses[0][0]


def test_activations_stay_bfloat16() -> None:
    """Images are cast at the borders only: the input image, the pooling, strided gradients."""
    model = made("bf16-mixed").models["train"]
    onnx.checker.check_model(model, full_check=True)
    types = element_types(model)
    kinds = collections.defaultdict(set)
    for node in model.graph.node:
        kinds[node.op_type].add(types[node.output[0]])
    assert kinds["Conv"] == {TensorProto.BFLOAT16}
    assert kinds["ConvTranspose"] <= {TensorProto.FLOAT}
    assert "MaxPool" not in kinds
    inferred = onnx.shape_inference.infer_shapes(model).graph
    shapes = {
        v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in inferred.value_info
    }
    casts = [n for n in model.graph.node if n.op_type == "Cast"]
    floats = {TensorProto.FLOAT, TensorProto.BFLOAT16}
    casts = [n for n in casts if {types[n.input[0]], types[n.output[0]]} == floats]
    casts = [n for n in casts if len(shapes[n.output[0]]) == 4 and shapes[n.output[0]][0] == BATCH]
    borders = {"input": 1, "means": 6, "strided": 2, "statistics of few positions": 1}
    assert len(casts) <= sum(borders.values())


def test_no_node_leaves_the_device() -> None:
    model = made("bf16-mixed").models["train"]
    types = element_types(model)
    narrow = {
        n.op_type
        for n in model.graph.node
        if TensorProto.BFLOAT16 in {types.get(v) for v in (*n.input, *n.output)}
    }
    assert narrow <= ON_CUDA


def test_float32_is_unchanged() -> None:
    model = made("float32").models["train"]
    assert model.opset_import[0].version == 21
    assert TensorProto.BFLOAT16 not in element_types(model).values()


def test_activations_take_half_the_memory() -> None:
    peaks = {}
    for precision in ("float32", "bf16-mixed"):
        proto = onnx.shape_inference.infer_shapes(made(precision).models["train"])
        graph = ir.from_proto(proto).graph
        outputs = {y.name or "" for y in graph.outputs}
        peaks[precision] = peak_bytes(run_order(list(graph)), Sizes(), outputs)
    assert peaks["bf16-mixed"] < 0.8 * peaks["float32"]


def with_extra(operator: str) -> onnx.ModelProto:
    """Return the net with one more operator on the input image."""
    model = onnx.ModelProto.FromString(exported().SerializeToString())
    name = model.graph.input[0].name
    for node in model.graph.node:
        for i, x in enumerate(node.input):
            node.input[i] = "seen" if x == name else x
    model.graph.node.insert(0, onnx.NodeProto(op_type=operator, input=[name], output=["seen"]))
    return model


def elu() -> onnx.ModelProto:
    return with_extra("Elu")


def softplus() -> onnx.ModelProto:
    return with_extra("Softplus")


def few_convolutions() -> onnx.ModelProto:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 8, 8), nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 5)]
    x = torch.from_numpy(batch()[0])
    return ir.to_proto(from_torch(nn.Sequential(*layers), (x,)))


def many_small_products() -> onnx.ModelProto:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, 4, 3, 2, 1)]
    layers += [nn.Conv2d(4, 4, 3, padding=1) for _ in range(7)]
    layers += [nn.AvgPool2d(16), nn.Flatten(), *(nn.Linear(4, 4) for _ in range(9))]
    x = torch.from_numpy(batch()[0])
    return ir.to_proto(from_torch(nn.Sequential(*layers, nn.Linear(4, 5)), (x,)))


@pytest.mark.parametrize(
    ("model", "raised"),
    [(elu, False), (softplus, True), (few_convolutions, False), (many_small_products, True)],
)
def test_only_what_the_device_runs_is_raised(model: Any, raised: bool) -> None:
    """CUDA has no Elu of opset 22, so a net is raised only if most of its work gains from it."""
    train = made("bf16-mixed", model).models["train"]
    types = element_types(train)
    kinds = {types[n.output[0]] for n in train.graph.node if n.op_type == "Conv"}
    assert train.opset_import[0].version == (22 if raised else 21)
    assert kinds == {TensorProto.BFLOAT16 if raised else TensorProto.FLOAT}


def test_zero_bias_of_an_exporter_goes_in_any_type() -> None:
    for precision in ("float32", "bf16-mixed"):
        biases = [
            n
            for n in made(precision).models["train"].graph.node
            if n.op_type == "Conv" and len(n.input) > 2
        ]
        assert len(biases) == 2, precision  # each and share


def test_batch_statistics_of_the_first_layers_come_from_layer_normalization() -> None:
    kinds = collections.Counter(n.op_type for n in made("bf16-mixed").models["train"].graph.node)
    assert kinds["LayerNormalization"] >= 1
