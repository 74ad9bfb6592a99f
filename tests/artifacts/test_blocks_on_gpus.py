"""A transformer block built for CUDA, run on the CPU: gradients and losses equal torch."""

from __future__ import annotations

import functools

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from torch import nn

import onnxtrain
from onnxtrain import thresholds
from onnxtrain.artifacts import Artifacts
from onnxtrain.torch import from_torch
from tests.emulated_bfloat16 import emulated

BATCH, TOKENS, WIDTH, RATE = 4, 8, 128, 0.1
PRECISIONS = ("float32", "bf16-mixed")


class Block(nn.Module):
    """Token mixing and a feed-forward layer, each with a pre-norm and a residual connection."""

    def __init__(self, approximate: str) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.queries, self.keys, self.values = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.gelu, self.head = nn.GELU(approximate), nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = self.first(x)
        scores = self.queries(n) @ self.keys(n).transpose(1, 2) / WIDTH**0.5
        x = x + torch.softmax(scores, -1) @ self.values(n)
        x = x + self.narrow(self.gelu(self.wide(self.second(x))))
        return self.head(x.mean(1))


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    monkeypatch.setattr(thresholds, "MEMORY_BOUND_ELEMENTS", 1 << 10)


def net(approximate: str) -> Block:
    torch.manual_seed(0)
    return Block(approximate)


def batch(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((BATCH, TOKENS, WIDTH)).astype(np.float32)
    return x, rng.integers(0, 8, BATCH)


def built(approximate: str, precision: str) -> Artifacts:
    model = ir.to_proto(from_torch(net(approximate), (torch.from_numpy(batch()[0]),)))
    return onnxtrain.build(
        model,
        loss="cross_entropy",
        optimizer="adamw",
        target="cuda",
        precision=precision,
        dims={"batch": BATCH},
    )


class Gradients:
    """Runs the model of loss and gradients on the CPU."""

    def __init__(self, artifacts: Artifacts) -> None:
        spec = artifacts.manifest.model("gradients")
        assert spec is not None
        self.model = artifacts.models["gradients"]
        options = ort.SessionOptions()
        # Two casts in a row are one to an optimizer.
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        self.session = ort.InferenceSession(emulated(self.model).SerializeToString(), options)
        self.inputs = {t.role: t.name for t in spec.inputs if t.role in ("input", "target")}
        self.parameters = {t.name: artifacts.values[t.name] for t in spec.inputs_of("parameter")}

    @functools.cached_property
    def kinds(self) -> list[str]:
        return [n.op_type for n in self.model.graph.node]

    def __call__(self, x: np.ndarray, labels: np.ndarray) -> tuple[float, dict[str, np.ndarray]]:
        feeds = {self.inputs["input"]: x, self.inputs["target"]: labels, **self.parameters}
        names = [y.name for y in self.session.get_outputs()]
        results = dict(
            zip(names, (np.asarray(y) for y in self.session.run(names, feeds)), strict=True)
        )
        gradients = {n: results[f"{n}_grad"] for n in self.parameters}
        return float(results["loss"]), gradients


def torch_gradients(approximate: str, *, mixed: bool) -> dict[str, np.ndarray]:
    module, (x, labels) = net(approximate), (torch.from_numpy(a) for a in batch())
    if not mixed:
        module, x = module.double(), x.double()
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        scores = module(x).double()
    nn.functional.cross_entropy(scores, labels).backward()
    return {n: p.grad.numpy().copy() for n, p in module.named_parameters() if p.grad is not None}


def apart(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    joined = [np.concatenate([d[n].ravel() for n in sorted(a)]) for d in (a, b)]
    return float(np.linalg.norm(joined[0] - joined[1]) / np.linalg.norm(joined[0]))


@pytest.mark.parametrize("approximate", ["tanh", "none"])
def test_gradients_are_as_accurate_as_autocast(approximate: str) -> None:
    exact, theirs = (torch_gradients(approximate, mixed=m) for m in (False, True))
    wide, narrow = (Gradients(built(approximate, p)) for p in PRECISIONS)
    assert apart(exact, wide(*batch())[1]) < 1e-5
    assert apart(exact, narrow(*batch())[1]) < 1.25 * apart(exact, theirs)
    assert wide.kinds.count("LayerNormalization") == narrow.kinds.count("LayerNormalization") == 2
    assert "Sum" in wide.kinds
    assert narrow.kinds.count("Gather") == wide.kinds.count("Gather") + 1
    for model in (wide.model, narrow.model):
        onnx.checker.check_model(model)
        biased = [n for n in model.graph.node if n.op_type == "Gemm" and len(n.input) > 2]
        assert len(biased) == 1  # the head, whose result is small


def test_losses_equal_torch() -> None:
    module = net("tanh").double()
    update = torch.optim.SGD(module.parameters(), RATE)
    runs = [Gradients(built("tanh", p)) for p in PRECISIONS]
    losses: list[list[float]] = []
    for number in range(8):
        x, labels = batch(number % 2)
        update.zero_grad()
        loss = nn.functional.cross_entropy(
            module(torch.from_numpy(x).double()), torch.from_numpy(labels)
        )
        loss.backward()
        update.step()
        losses.append([loss.item()])
        for run in runs:
            value, gradients = run(x, labels)
            losses[-1].append(value)
            for name, g in gradients.items():
                run.parameters[name] = run.parameters[name] - np.float32(RATE) * g
    table = np.array(losses)
    np.testing.assert_allclose(table[:, 1], table[:, 0], rtol=1e-5)
    np.testing.assert_allclose(table[:, 2], table[:, 0], rtol=2e-2)
    assert table[-1, 0] < 0.7 * table[0, 0]
