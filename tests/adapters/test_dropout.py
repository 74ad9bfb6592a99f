"""Dropout of adapters, compared with torch by a fixed mask in place of Dropout."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

import onnxtrain
from tests.adapters.decoders import write
from tests.adapters.test_gradients import conv_net, drawn
from tests.small_nets import HEAD

RATIO = 0.25
NET = """g (float[N,6] x) => (float[N,5] y)
{
    h = Gemm(x, first, bias)
    y = MatMul(h, second)
}"""


def two_layers() -> onnx.ModelProto:
    model = onnx.parser.parse_model(HEAD + NET)
    rng = np.random.default_rng(1)
    shapes = {"first.weight": (6, 4), "first.bias": (4,), "second.weight": (4, 5)}
    for name, shape in shapes.items():
        array = rng.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(ir.serde.serialize_tensor(ir.Tensor(array, name=name)))
    names = {"first": "first.weight", "bias": "first.bias", "second": "second.weight"}
    for node in model.graph.node:
        node.input[:] = [names.get(x, x) for x in node.input]
    return model


def with_mask(adapted: onnxtrain.Adapted, masks: dict[str, np.ndarray]) -> onnx.ModelProto:
    """Return the model with Mul by a mask in place of each Dropout; masks by the input's name."""
    proto = ir.to_proto(adapted.model)
    dropouts = [n for n in proto.graph.node if n.op_type == "Dropout"]
    assert {n.input[0] for n in dropouts} == set(masks)
    for node in dropouts:
        mask = ir.Tensor(masks[node.input[0]], name=f"{node.input[0]}_mask")
        proto.graph.initializer.append(ir.serde.serialize_tensor(mask))
        node.op_type = "Mul"
        node.input[:] = [node.input[0], mask.name]
    return proto


def run(model: onnx.ModelProto, **feeds: np.ndarray) -> np.ndarray:
    return ort.InferenceSession(model.SerializeToString()).run(None, feeds)[0]


@pytest.mark.parametrize("dora", [False, True])
def test_only_branches_read_the_dropped_out_input(dora: bool) -> None:
    model = two_layers()
    options = {"rank": 2, "alpha": 3, "targets": ["first", "second"], "dora": dora}
    adapted = drawn(onnxtrain.lora(model, dropout=RATIO, **options))
    rng = np.random.default_rng(0)
    masks = {
        name: (rng.random((3, width)) > RATIO).astype(np.float32) / (1 - RATIO)
        for name, width in (("x", 6), ("h", 4))
    }
    # The second layer reads the sum that takes the place of the first one's output.
    sums = next(
        n.input[0]
        for n in ir.to_proto(adapted.model).graph.node
        if n.op_type == "Dropout" and n.input[0] != "x"
    )
    x = rng.standard_normal((3, 6)).astype(np.float32)
    got = run(with_mask(adapted, {"x": masks["x"], sums: masks["h"]}), x=x)

    values = {n: a.astype(np.float64) for n, a in adapted.parameters.items()}
    frozen = {t.name: ir.serde.deserialize_tensor(t).numpy() for t in model.graph.initializer}

    def layer(name: str, x: np.ndarray, mask: np.ndarray) -> np.ndarray:
        w, left = frozen[f"{name}.weight"].astype(np.float64), x * mask
        branch = 1.5 * values[f"{name}.lora_A"] @ values[f"{name}.lora_B"]
        y = x @ w + frozen.get(f"{name}.bias", 0.0)
        if not dora:
            return y + left @ branch
        factor = values[f"{name}.lora_magnitude"] / np.linalg.norm(w + branch, axis=0)
        return y + (factor - 1) * (left @ w) + factor * (left @ branch)

    expected = layer("second", layer("first", x, masks["x"]), masks["h"])
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_dora_convolutions_with_dropout() -> None:
    options = {"rank": 2, "targets": ["first", "third"], "dora": True}
    with_dropout = drawn(onnxtrain.lora(conv_net(), dropout=RATIO, **options))
    without = drawn(onnxtrain.lora(conv_net(), **options))
    proto = ir.to_proto(with_dropout.model)
    reads = [n.input[0] for n in proto.graph.node if n.op_type == "Dropout"]
    x = np.random.default_rng(0).standard_normal((2, 4, 6, 6)).astype(np.float32)
    one = with_mask(with_dropout, dict.fromkeys(reads, np.ones(1, np.float32)))
    np.testing.assert_allclose(run(one, x=x), run(ir.to_proto(without.model), x=x), atol=1e-5)
    # Nothing is left: the frozen net without its adapters.
    none = with_mask(with_dropout, dict.fromkeys(reads, np.zeros(1, np.float32)))
    np.testing.assert_allclose(run(none, x=x), run(ir.to_proto(without.plain), x=x), atol=1e-5)


def test_dora_with_dropout_trains_and_evaluates_exactly() -> None:
    options = {"rank": 2, "targets": ["first", "second"], "dora": True}
    x = np.random.default_rng(0).standard_normal((8, 6)).astype(np.float32)
    scores = []
    for dropout in (0.0, RATIO):
        adapted = drawn(onnxtrain.lora(two_layers(), dropout=dropout, **options))
        trainer = onnxtrain.Trainer(onnxtrain.build(adapted, loss="mse", optimizer="sgd"))
        scores.append(trainer.predict(x=x)["y"])
        first = trainer.gradients(x=x, target=np.zeros((8, 5), np.float32))
        assert all(np.abs(g).max() > 0 for g in first.values())
    np.testing.assert_allclose(scores[0], scores[1], atol=1e-5)


def test_embeddings_have_no_dropout(tmp_path) -> None:
    path = write(tmp_path).path
    adapted = onnxtrain.lora(path, 4, targets=["embed_tokens", "q_proj"], dropout=RATIO)
    dropped = [n for n in adapted.model.graph if n.op_type == "Dropout"]
    table = adapted.model.graph.initializers["model.embed_tokens.lora_embedding_A"]
    (lookup,) = (u.node for u in table.uses())
    assert len(dropped) == 2  # one per attention layer
    assert not any(x.producer() in dropped for x in lookup.inputs if x is not None)
    adapted.export_peft(tmp_path / "peft")
    again = onnxtrain.load_adapter(path, tmp_path / "peft")
    assert again.dropout == RATIO
    assert len([n for n in again.model.graph if n.op_type == "Dropout"]) == 2
