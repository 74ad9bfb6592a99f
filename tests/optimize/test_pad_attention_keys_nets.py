"""pad_attention_keys in nets with odd lengths on CUDA: all rows of matmuls are aligned."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

import onnxtrain
from onnxtrain import optim, thresholds
from onnxtrain.targets import find
from onnxtrain.torch import from_torch
from tests.optimize.key_padding import fill_up_short_rows, last_size, row_lengths

F = nn.functional
CUDA = find("cuda")
PLAIN = CUDA.without("pad-attention-keys")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    fill_up_short_rows(monkeypatch)


class Layer(nn.Module):
    """Attention of several heads, which may share keys and values, and a linear layer."""

    def __init__(self, shared: int, causal: bool) -> None:
        super().__init__()
        self.shared, self.causal, self.norm = shared, causal, nn.LayerNorm(16)
        self.q, self.kv, self.out = (
            nn.Linear(16, 16),
            nn.Linear(16, 32 // shared),
            nn.Linear(16, 16),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        q, kv = (part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in (self.q(h), self.kv(h)))
        k, v = (part.repeat_interleave(self.shared, 1) for part in kv.chunk(2, 1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Packed(nn.Module):
    """torch's own attention, whose projection is one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attend = nn.LayerNorm(16), nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.attend(h, h, h, need_weights=False)[0]


class AttentionNet(nn.Module):
    """A small vision transformer: 12 patches and a token for the class make 13 positions."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.patches, self.token = nn.Linear(6, 16), nn.Parameter(torch.randn(1, 1, 16))
        self.places = nn.Parameter(torch.randn(1, 13, 16))
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.cat([self.token.expand(x.shape[0], -1, -1), self.patches(x)], 1)
        return self.head(self.layers(h + self.places)[:, 0])


KINDS = ["packed", "open", "causal", "grouped"]


def attention_net(kind: str) -> AttentionNet:
    torch.manual_seed(0)
    if kind == "packed":
        return AttentionNet(Packed(), Packed())
    return AttentionNet(*(Layer(2 if kind == "grouped" else 1, kind == "causal") for _ in range(2)))


def built(
    module: nn.Module, precision: str = "float32", recompute: str = ""
) -> onnxtrain.Artifacts:
    model = from_torch(module, (torch.randn(2, 12, 6),))
    return onnxtrain.build(
        model,
        loss="cross_entropy",
        optimizer=optim.SGD(lr=0.01),
        target="cuda",
        precision=precision,
        dims={"batch": 2},
        recompute=recompute or (),
    )


def unaligned(model: onnx.ModelProto, word: int) -> list[list[str]]:
    """Return the products of attention with rows that are no whole words, as they lie in memory."""
    graph = ir.from_proto(onnx.shape_inference.infer_shapes(model, data_prop=True)).graph
    odd = []
    for node in graph:
        if node.op_type != "MatMul":
            continue
        sides = [x for x in node.inputs if x is not None]
        for i, x in enumerate(sides):
            turn = x.producer()
            if turn is not None and turn.op_type == "Transpose" and turn.inputs[0] is not None:
                perm = turn.attributes["perm"].as_ints()
                if perm[-2:] == (len(perm) - 1, len(perm) - 2):  # the product's kernel does that
                    sides[i] = turn.inputs[0]
        values = [*sides, node.outputs[0]]
        if all(x.shape is not None and len(x.shape) == 4 for x in values):
            odd += [[str(x.shape) for x in values]] * any(last_size(x) % word for x in values)
    return odd


@pytest.mark.parametrize(("kind", "recompute"), [*((k, "") for k in KINDS), ("packed", "auto")])
def test_losses_follow_torch(kind: str, recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if recompute or kind == "open":
        monkeypatch.setattr(thresholds, "MASK_IN_MATMUL_RATIO", 0)
    module = attention_net(kind)
    artifacts = built(module, recompute=recompute)
    assert row_lengths(artifacts.models["step"]) == {16}
    assert unaligned(artifacts.models["step"], 4) == []
    trainer = onnxtrain.Trainer(artifacts, threads=1)
    update = torch.optim.SGD(module.parameters(), lr=0.01)
    for seed in range(5):
        g = torch.Generator().manual_seed(seed)
        x, labels = torch.randn(2, 12, 6, generator=g), torch.randint(0, 3, (2,), generator=g)
        loss = F.cross_entropy(module(x), labels)
        update.zero_grad()
        loss.backward()
        update.step()
        actual = trainer.step(x.numpy(), labels.numpy()).loss
        assert actual == pytest.approx(loss.item(), rel=1e-5)
    for name, p in module.named_parameters():
        np.testing.assert_allclose(
            trainer.parameters[name], p.detach(), rtol=1e-4, atol=1e-6, err_msg=name
        )


@pytest.mark.parametrize("kind", ["packed", "grouped"])
def test_models_for_evaluation_and_export_stay(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = built(attention_net(kind))
    monkeypatch.setattr(thresholds, "PADDED_ATTENTION_KEYS", 14)
    plain = built(attention_net(kind))
    assert made.models["step"] != plain.models["step"]
    assert unaligned(plain.models["step"], 4) != []
    assert made.manifest.parameters == plain.manifest.parameters
    for role in ("eval", "infer"):
        assert made.models[role] == plain.models[role]


@pytest.mark.parametrize("kind", ["packed", "causal"])
@pytest.mark.parametrize("precision", ["bf16-mixed", "fp16-mixed"])
def test_sixteen_bits(kind: str, precision: str) -> None:
    artifacts = built(attention_net(kind), precision)
    onnx.checker.check_model(artifacts.models["step"], full_check=True)
    assert row_lengths(artifacts.models["step"]) == {16}
    if precision == "bf16-mixed":  # no kernel on the CPU
        return
    x, labels = np.random.default_rng(0).normal(size=(2, 12, 6)), np.array([0, 2])
    losses = []
    for made in (artifacts, built(attention_net(kind))):
        trainer = onnxtrain.Trainer(made, threads=1)
        losses.append([trainer.step(x.astype(np.float32), labels).loss for _ in range(5)])
    np.testing.assert_allclose(*losses, rtol=5e-3)
