"""Gradients of adapters, compared with torch in float64 on the dequantized weights."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch.nn import functional as F

import onnxtrain
from onnxtrain.losses import CrossEntropy, LossTerm
from tests.adapters.decoders import VOCABULARY, batch, write
from tests.adapters.reference import branches_of, logits, weights_of
from tests.small_nets import HEAD

IGNORED = -100


def drawn(adapted: onnxtrain.Adapted) -> onnxtrain.Adapted:
    """Return random values for all A and B: with the initial zeros, B hides errors in A."""
    rng = np.random.default_rng(2)
    values = {
        n: a * rng.uniform(0.8, 1.2, a.shape)
        if n.endswith("magnitude")
        else rng.standard_normal(a.shape) * 0.1
        for n, a in adapted.parameters.items()
    }
    return adapted.with_parameters({n: a.astype(np.float32) for n, a in values.items()})


def close(got: np.ndarray, expected: torch.Tensor | None) -> None:
    assert expected is not None
    array = expected.numpy()
    assert np.abs(got - array).max() <= 1e-4 * np.abs(array).max()
    assert np.abs(array).max() > 0


@pytest.mark.parametrize("int4", [False, True], ids=["fp32", "int4"])
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("llama", {"rslora": True, "targets": ["q_proj", "v_proj", "down_proj"]}),
        ("llama", {"dora": True}),
        ("phi3", {}),
        ("phi3", {"dora": True}),
    ],
    ids=["llama", "rslora", "dora", "phi3", "phi3-dora"],
)
def test_decoders(tmp_path, family, options, int4):
    decoder = write(tmp_path, family=family, int4=int4)
    adapted = drawn(onnxtrain.lora(decoder.path, rank=4, **{"targets": "all-linear", **options}))
    feeds = batch()
    labels = np.where(feeds["attention_mask"] == 1, feeds["input_ids"], IGNORED)
    loss = LossTerm(CrossEntropy(axis=-1, ignore_index=IGNORED), output="logits")
    trainer = onnxtrain.Trainer(onnxtrain.build(adapted, loss=loss, optimizer="sgd"))
    ours = trainer.gradients(**feeds, labels=labels)

    branches = branches_of(adapted, adapted.parameters)
    ids, mask = (torch.from_numpy(feeds[n]) for n in ("input_ids", "attention_mask"))
    scores = logits(weights_of(decoder, branches), ids, mask).reshape(-1, VOCABULARY)
    F.cross_entropy(scores, torch.from_numpy(labels).reshape(-1)).backward()
    for a in adapted.adapters:
        branch = branches[a.module]
        close(ours[a.a].T, branch.a.grad)
        close(ours[a.b].T, branch.b.grad)
        if a.magnitude is not None:
            assert branch.magnitude is not None
            close(ours[a.magnitude], branch.magnitude.grad)


CONVS = """g (float[N,4,H,W] x) => (float[N,K] y)
{
    a = Conv <kernel_shape = [3,3], pads = [1,1,1,1], strides = [2,2]> (x, first, first_b)
    b = Relu(a)
    c = Conv <group = 2> (b, second)
    d = Tanh(c)
    e = Conv(d, third)
    f = GlobalAveragePool(e)
    y = Flatten(f)
}"""
KERNELS = {
    "first.weight": (6, 4, 3, 3),
    "first.bias": (6,),
    "second.weight": (6, 3, 1, 1),
    "third.weight": (8, 6, 1, 1),
}


def conv_net() -> onnx.ModelProto:
    model = onnx.parser.parse_model(HEAD + CONVS)
    rng = np.random.default_rng(4)
    for name, shape in KERNELS.items():
        array = rng.standard_normal(shape).astype(np.float32) * 0.4
        model.graph.initializer.append(ir.serde.serialize_tensor(ir.Tensor(array, name=name)))
    texts = {"first": "first.weight", "first_b": "first.bias"}
    for node in model.graph.node:
        for i, name in enumerate(node.input):
            node.input[i] = texts.get(name, f"{name}.weight" if len(name) > 1 else name)
    return model


@pytest.mark.parametrize("dora", [False, True])
def test_convolutions(dora):
    model = conv_net()
    targets = ["first", "third"] if dora else ["first", "second", "third"]
    adapted = drawn(onnxtrain.lora(model, rank=2, alpha=3, targets=targets, dora=dora))
    trainer = onnxtrain.Trainer(onnxtrain.build(adapted, loss="mse", optimizer="sgd"))
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 4, 6, 6)).astype(np.float32)
    target = rng.standard_normal((2, 8)).astype(np.float32)
    (given,) = (n for n in trainer.inputs if n != "x")
    ours = trainer.gradients(**{"x": x, given: target})

    frozen = {
        t.name: torch.tensor(ir.serde.deserialize_tensor(t).numpy()).double()
        for t in model.graph.initializer
    }
    leaves = {
        n: torch.tensor(a, dtype=torch.float64, requires_grad=True)
        for n, a in adapted.parameters.items()
    }

    def conv(h: torch.Tensor, name: str, **window: int) -> torch.Tensor:
        weight, bias = frozen[f"{name}.weight"], frozen.get(f"{name}.bias")
        groups = window.pop("groups", 1)
        base = F.conv2d(h, weight, **window, groups=groups)
        if f"{name}.lora_A" in leaves:
            a, b = leaves[f"{name}.lora_A"], leaves[f"{name}.lora_B"]
            base = base + 1.5 * F.conv2d(F.conv2d(h, a, **window), b, groups=groups)
            if dora:
                whole = weight + 1.5 * (b.flatten(1) @ a.flatten(1)).reshape(weight.shape)
                length = whole.flatten(1).norm(dim=1).detach()
                base = base * (leaves[f"{name}.lora_magnitude"] / length).reshape(1, -1, 1, 1)
        return base if bias is None else base + bias.reshape(1, -1, 1, 1)

    h = F.relu(conv(torch.tensor(x).double(), "first", stride=2, padding=1))
    y = conv(torch.tanh(conv(h, "second", groups=2)), "third").mean((2, 3))
    F.mse_loss(y, torch.tensor(target).double()).backward()
    assert set(ours) == set(leaves)
    for name, leaf in leaves.items():
        close(ours[name], leaf.grad)


def test_embeddings(tmp_path):
    decoder = write(tmp_path)
    adapted = drawn(onnxtrain.lora(decoder.path, rank=4, targets=["embed_tokens", "lm_head"]))
    feeds = batch()
    loss = LossTerm(CrossEntropy(axis=-1), output="logits")
    trainer = onnxtrain.Trainer(onnxtrain.build(adapted, loss=loss, optimizer="sgd"))
    ours = trainer.gradients(**feeds, labels=feeds["input_ids"])
    branches = branches_of(adapted, adapted.parameters)
    table = branches["model.embed_tokens"]
    plain = weights_of(decoder, branches)

    def weight(module: str) -> torch.Tensor:
        delta = table.scaling * (table.b @ table.a).T
        return plain(module) + delta if module == "model.embed_tokens" else plain(module)

    ids, mask = (torch.from_numpy(feeds[n]) for n in ("input_ids", "attention_mask"))
    scores = logits(weight, ids, mask).reshape(-1, VOCABULARY)
    F.cross_entropy(scores, ids.reshape(-1)).backward()
    for a in adapted.adapters:
        close(ours[a.a].T, branches[a.module].a.grad)
        close(ours[a.b].T, branches[a.module].b.grad)
