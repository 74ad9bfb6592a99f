"""Passes for GPUs: decomposed operators are fused, and values stay."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

import onnxtrain
from onnxtrain import optim, thresholds
from onnxtrain.runtime import session as runtime
from onnxtrain.torch import from_torch
from tests.cases.checks import gradient
from tests.cases.collect import CASES

F = nn.functional


def halves_in_front(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3))))


def by_products(x: torch.Tensor) -> torch.Tensor:
    return x * 0.5 * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))


def by_erf(x: torch.Tensor) -> torch.Tensor:
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


def by_erf_behind(x: torch.Tensor) -> torch.Tensor:
    return (torch.erf(x * 0.7071067811865475) + 1.0) * x * 0.5


def near_miss(x: torch.Tensor) -> torch.Tensor:
    return x * 0.5 * (1.0 + torch.erf(x / 1.5))


class Bent(nn.Module):
    def __init__(self, bend: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.bend = nn.Linear(6, 8), nn.Linear(8, 3), bend

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.bend(self.a(x)))


def operators(artifacts: onnxtrain.Artifacts, role: str = "step") -> collections.Counter[str]:
    return collections.Counter(n.op_type for n in artifacts.models[role].graph.node)


def follows_torch(
    module: nn.Module, artifacts: onnxtrain.Artifacts, shape: tuple[int, ...], steps: int = 4
) -> None:
    """Train both on the same batches; compare losses and all parameters."""
    trainer = onnxtrain.Trainer(artifacts)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, weight_decay=0.0)
    module.train()
    for seed in range(steps):
        torch.manual_seed(seed)
        x = torch.randn(*shape)
        y = module(x)
        target = torch.randn_like(y)
        loss = F.mse_loss(y, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert trainer.step(x.numpy(), target.numpy()).loss == pytest.approx(loss.item(), rel=1e-4)
    for name, p in module.named_parameters():
        np.testing.assert_allclose(
            trainer.parameters[name], p.detach(), rtol=1e-3, atol=1e-4, err_msg=name
        )


ADAMW = optim.AdamW(lr=0.01, weight_decay=0.0)


@pytest.mark.parametrize("bend", [halves_in_front, by_products, by_erf, by_erf_behind])
def test_gelu_is_matched_by_its_values(bend: Callable) -> None:
    module = Bent(bend)
    model = from_torch(module, (torch.randn(4, 6),))
    made = onnxtrain.build(model, loss="mse", optimizer=ADAMW, target="cuda")
    assert operators(made)["Gelu"] == 1
    assert operators(made)["Pow"] == 0
    follows_torch(module, made, (4, 6))


def test_what_is_not_quite_gelu_stays() -> None:
    module = Bent(near_miss)
    model = from_torch(module, (torch.randn(4, 6),))
    made = onnxtrain.build(model, loss="mse", optimizer=ADAMW, target="cuda")
    assert operators(made)["Gelu"] == 0
    follows_torch(module, made, (4, 6))


class Attends(nn.Module):
    """Attention whose first row may see nothing; the guard is written as exporters write it."""

    mask: torch.Tensor

    def __init__(self, mask: torch.Tensor, given: bool, seen: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.given, self.seen = nn.Linear(8, 24), given, seen
        self.low = float(mask.min())
        self.register_buffer("mask", mask)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        mask = self.mask
        if self.given:  # not a constant of the graph
            mask = mask + 0.0 * x[:1, :, :1]
            mask = torch.where(mask < 0, self.low, 0.0) if self.seen else mask
        scores = q @ k.transpose(-1, -2) * 0.35 + mask
        p = torch.softmax(scores, -1)
        p = torch.where(torch.isnan(p), 0.0, p)
        return torch.tanh(p @ v)


@pytest.mark.parametrize("given", [False, True], ids=["constant", "computed"])
@pytest.mark.parametrize("kind", ["causal", "first row masked"])
def test_nan_guards_move_behind_the_matmul(kind: str, given: bool) -> None:
    mask = torch.triu(torch.full((5, 5), float("-inf")), 1)
    if kind != "causal":
        mask[0] = float("-inf")
    module = Attends(mask, given)
    model = from_torch(module, (torch.randn(2, 5, 8),))
    made = onnxtrain.build(model, loss="mse", optimizer=ADAMW, target="cuda")
    counts = operators(made)
    assert counts["IsNaN"] == 0
    assert counts["Softmax"] == 1
    trainer = onnxtrain.Trainer(made)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, weight_decay=0.0)
    for seed in range(4):
        torch.manual_seed(seed)
        x, target = torch.randn(2, 5, 8), torch.randn(2, 5, 8)
        y = module(x)
        loss = F.mse_loss(y, target)
        optimizer.zero_grad()
        loss.backward()
        grads = [torch.nan_to_num(p.grad) for p in module.parameters() if p.grad is not None]
        for p, g in zip(module.parameters(), grads, strict=True):
            p.grad = g
        if kind == "causal":
            optimizer.step()
        actual = trainer.step(x.numpy(), target.numpy()).loss
        if kind == "causal" or seed == 0:
            assert actual == pytest.approx(loss.item(), rel=1e-5)
        assert math.isfinite(actual)


@pytest.mark.parametrize("given", [False, True], ids=["constant", "computed"])
@pytest.mark.parametrize("kind", ["low", "both", "unseen"])
def test_rows_of_low_finite_scores_are_not_masked(kind: str, given: bool) -> None:
    mask = torch.zeros(5, 5)
    mask[0] = torch.finfo(torch.float32).min  # as exporters write it: all keys weigh the same
    if kind == "both":
        mask[0, :2] = float("-inf")
    module = Attends(mask, given, seen=kind == "low")
    model = from_torch(module, (torch.randn(2, 5, 8),))
    made = onnxtrain.build(model, loss="mse", optimizer="sgd:lr=1", target="cuda")
    assert operators(made)["IsNaN"] == (kind == "both" or (given and kind == "unseen"))
    x, target = torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    loss = F.mse_loss(module(x), target)
    loss.backward()
    trainer = onnxtrain.Trainer(made)
    assert trainer.step(x.numpy(), target.numpy()).loss == pytest.approx(loss.item(), rel=1e-5)
    for name, p in module.named_parameters():
        assert p.grad is not None
        np.testing.assert_allclose(trainer.parameters[name], (p - p.grad).detach(), atol=1e-6)


def test_gradients_where_a_whole_row_is_masked() -> None:
    """torch's own gradient is NaN there; the row gives nothing, so the rest has the gradient."""
    mask = torch.triu(torch.full((5, 5), float("-inf")), 1)
    mask[0] = float("-inf")
    module = Attends(mask, given=True)
    model = from_torch(module, (torch.randn(2, 5, 8),))
    guarded, moved = (onnxtrain.vjp(model, target=t) for t in ("cpu", "cuda"))
    results = []
    for proto in (guarded, moved):
        session = runtime.create(proto.SerializeToString())
        rng, feeds = np.random.default_rng(0), {}
        for i in sorted(session.get_inputs(), key=lambda i: i.name):
            sizes = [d if isinstance(d, int) else 2 for d in i.shape]
            feeds[i.name] = rng.standard_normal(sizes).astype(np.float32)
        names = [o.name for o in session.get_outputs()]
        results.append(dict(zip(names, runtime.run(session, names, feeds), strict=True)))
    assert results[0].keys() == results[1].keys()
    for name, array in results[0].items():
        assert np.isfinite(array).all(), name
        np.testing.assert_allclose(results[1][name], array, rtol=1e-4, atol=1e-5, err_msg=name)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv2d(3, 5, 3, 2, 1, bias=False), nn.BatchNorm2d(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.conv(x))).mean((2, 3))


def test_batch_statistics_via_layer_norm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(thresholds, "NORM_KERNEL_POSITIONS", 2)
    module = Normed()
    model = from_torch(module, (torch.randn(4, 3, 9, 9),))
    made = onnxtrain.build(model, loss="mse", optimizer=ADAMW, target="cuda")
    counts = operators(made)
    assert counts["LayerNormalization"] == 1, "forward and backward share it"
    graph = made.models["step"].graph
    numbers = {t.name: ir.from_proto(t).numpy().ravel().tolist() for t in graph.initializer}
    axes = [
        numbers[n.input[1]]
        for n in graph.node
        if n.op_type in ("ReduceMean", "ReduceSum")
        if len(n.input) > 1
    ]
    assert [0, 2, 3] not in axes
    assert [2, 3] in axes
    follows_torch(module, made, (4, 3, 9, 9))
    trainer = onnxtrain.Trainer(made)
    flat = np.zeros((4, 3, 9, 9), np.float32)  # images of equal values: no deviation at all
    assert math.isfinite(trainer.step(flat, np.zeros((4, 5), np.float32)).loss)
    for name, value in trainer.parameters.items():
        assert np.isfinite(value).all(), name


def test_onnx_is_standard() -> None:
    model = from_torch(Normed(), (torch.randn(4, 3, 9, 9),))
    made = onnxtrain.build(model, loss="mse", optimizer=ADAMW, target="cuda")
    for proto in made.models.values():
        onnx.checker.check_model(proto, full_check=True)
        assert {n.domain for n in proto.graph.node} <= {"", "ai.onnx"}


class Tied(nn.Module):
    """A head that shares its weight with the embedding, or has one of its own."""

    def __init__(self, tied: bool, words: int = 37) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.mix = nn.Embedding(words, 12), nn.Linear(12, 12)
        self.head = None if tied else nn.Linear(12, words, bias=False)
        self.words = words

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.mix(self.embed(x)))
        scores = h @ self.embed.weight.T if self.head is None else self.head(h)
        return scores.reshape(-1, self.words)


@pytest.mark.parametrize("precision", ["float32", "bf16-mixed"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "own"])
def test_a_vocabulary_is_padded(
    tied: bool, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thresholds, "PADDED_VOCABULARY_CLASSES", 8)
    module = Tied(tied)
    x = torch.randint(0, 37, (4, 5))
    model = from_torch(module, (x,))
    made = onnxtrain.build(
        model, loss="cross_entropy", optimizer=ADAMW, target="cuda", precision=precision
    )
    inferred = onnx.shape_inference.infer_shapes(made.models["step"], data_prop=True)
    sizes = {d.dim_value for v in inferred.graph.value_info for d in v.type.tensor_type.shape.dim}
    assert 40 in sizes
    onnx.checker.check_model(made.models["step"], full_check=True)
    assert made.manifest.parameters[0].shape == (37, 12)
    if precision != "float32":  # no kernel on the CPU
        return
    trainer = onnxtrain.Trainer(made)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, weight_decay=0.0)
    for seed in range(4):
        g = torch.Generator().manual_seed(seed)
        x, labels = (torch.randint(0, 37, s, generator=g) for s in ((4, 5), (20,)))
        loss = F.cross_entropy(module(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        actual = trainer.step(x.numpy(), labels.numpy()).loss
        assert actual == pytest.approx(loss.item(), rel=1e-5)
    for name, p in module.named_parameters():
        np.testing.assert_allclose(
            trainer.parameters[name], p.detach(), rtol=1e-3, atol=1e-5, err_msg=name
        )


@pytest.mark.parametrize("operator", ["Atan", "Celu", "Col2Im", "DFT", "Det"])
def test_operators_without_a_kernel_are_decomposed(operator: str) -> None:
    left = {
        case.name
        for case in CASES
        if case.op == operator
        and operator in {n.op_type for n in gradient(case, target="cuda").vjp.graph.node}
    }
    # Four rows have no short formula, and sizes that come at run time no weight of ones.
    assert {name for name in left if "run-time" not in name} <= {
        "Det-batches",
        "Det-rank-three-of-four",
    }


class Cut(nn.Module):
    """Attention whose projection is one, cut up by indices, as torch's own writes it."""

    def __init__(self, *taken: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.taken, self.into, self.out = taken, nn.Linear(8, 24), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole = self.into(x).unflatten(-1, (3, 8)).movedim(-2, 0)
        q, k, v = (whole[i] for i in self.taken)
        return self.out((torch.softmax(q @ k.transpose(-1, -2), -1) @ v).mean(1))


@pytest.mark.parametrize(("taken", "halved"), [((0, 1, 2), True), ((0, 1, 1), False)])
def test_slices_of_a_projection_stay_in_16_bits(taken: tuple[int, ...], halved: bool) -> None:
    x, labels = torch.randn(2, 5, 8), torch.tensor([0, 2])
    model = from_torch(Cut(*taken), (x,))
    losses = []
    for precision in ("fp16-mixed", "float32"):
        artifacts = onnxtrain.build(
            model, loss="cross_entropy", optimizer="sgd", target="cuda", precision=precision
        )
        graph = ir.from_proto(artifacts.models["step"]).graph
        parts = {n.outputs[0].dtype for n in graph if n.op_type == "Gather"}
        # One after the other, gradients of parts lie in 16 bits; what adds up does so in float32.
        derivatives = {n.outputs[0].dtype for n in graph if n.op_type in ("Concat", "Pad")}
        if precision == "fp16-mixed":
            assert ir.DataType.FLOAT16 in parts
            assert (ir.DataType.FLOAT16 in derivatives) == halved
        trainer = onnxtrain.Trainer(artifacts, threads=1)
        losses.append([trainer.step(x.numpy(), labels.numpy()).loss for _ in range(3)])
    np.testing.assert_allclose(*losses, rtol=5e-3)
