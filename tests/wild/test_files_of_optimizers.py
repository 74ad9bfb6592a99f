"""Patterns that kept whole families of files from training: one small file for each."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

import onnxtrain
from onnxtrain.errors import OnnxTrainError
from tests.graph.contrib.fused_case import normal

WIDTH, WORDS, PLACES = 8, 12, 6
BERT = """g (int32[b,s] ids, int32[b,s] kinds, int32[b,s] mask) => (float[b,s,8] y) {
    h, lengths = com.microsoft.EmbedLayerNormalization<epsilon=1e-12>
        (ids, kinds, words, places, segments, gamma, beta, mask)
    y = com.microsoft.Attention<num_heads=2>(h, joint, bias, lengths)
}"""


def parsed(text: str, imports: str = "", **weights: np.ndarray) -> onnx.ModelProto:
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17{imports}]> {text}')
    for name, array in weights.items():
        model.graph.initializer.append(ir.serde.serialize_tensor(ir.Tensor(array, name=name)))
    return model


def test_a_fused_encoder_takes_lengths_from_its_own_embedding() -> None:
    """The mask of the attention is [batch]: how many tokens each sequence has."""
    weights = {
        "words": normal(WORDS, WIDTH),
        "places": normal(PLACES, WIDTH)[::-1].copy(),
        "segments": normal(2, WIDTH),
        "gamma": 1 + normal(WIDTH) / 4,
        "beta": normal(WIDTH) / 4,
        "joint": normal(WIDTH, 3 * WIDTH) / 2,
        "bias": normal(3 * WIDTH) / 4,
    }
    weights = {n: w.astype(np.float32) for n, w in weights.items()}
    model = parsed(BERT, ', "com.microsoft": 1', **weights)
    feeds = {
        "ids": np.array([[1, 5, 7, 2], [3, 4, 9, 0]], np.int32),
        "kinds": np.array([[0, 0, 1, 1], [0, 0, 0, 0]], np.int32),
        "mask": np.array([[1, 1, 1, 1], [1, 1, 0, 0]], np.int32),
    }
    dy = normal(2, 4, WIDTH)
    dy[1, 2:] = 0
    made = onnxtrain.vjp(model)
    names = [x.name for x in made.graph.input]
    assert set(weights) <= set(names)
    session = onnxruntime.InferenceSession(made.SerializeToString())
    results = session.run(None, {**feeds, **weights, "y_grad": dy})
    outputs = dict(zip([y.name for y in session.get_outputs()], results, strict=True))
    original = onnxruntime.InferenceSession(model.SerializeToString())
    want = np.asarray(original.run(["y"], feeds)[0])
    got = np.asarray(outputs["y"])
    np.testing.assert_allclose(got[0], want[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(got[1, :2], want[1, :2], rtol=1e-4, atol=1e-5)
    for name in ("words", "joint"):
        gradient = np.asarray(outputs[f"{name}_grad"], np.float64)
        way = (gradient / np.abs(gradient).max()).astype(np.float32)
        values = []
        for sign in (1, -1):
            moved = parsed(
                BERT,
                ', "com.microsoft": 1',
                **{**weights, name: weights[name] + sign * 0.003 * way},
            )
            run = onnxruntime.InferenceSession(moved.SerializeToString()).run(["y"], feeds)[0]
            values.append(float((np.asarray(run, np.float64) * dy).sum()))
        derivative = (values[0] - values[1]) / 0.006
        assert derivative == pytest.approx(float((gradient * way).sum()), rel=2e-3)


@pytest.mark.parametrize("domain", ["com.microsoft.nchwc", "com.acme"])
def test_operators_of_a_private_layout_are_named_with_their_domain(domain: str) -> None:
    model = parsed(
        f"g (float[1,8,4,4] x) => (float[1,8,4,4] y) {{ y = {domain}.Conv(x, w) }}",
        f', "{domain}": 1',
        w=normal(8, 8, 1, 1),
    )
    with pytest.raises(OnnxTrainError, match=domain.replace(".", r"\.")):
        onnxtrain.build(model, loss="mse", optimizer="sgd")
