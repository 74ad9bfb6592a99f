"""Errors and reports for operators that have no gradient."""

from __future__ import annotations

from typing import cast

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

import onnxtrain
from onnxtrain.errors import LoadError, OnnxTrainError, PrepareError, UndifferentiableError
from onnxtrain.training import Trainer

HEAD = '<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1, "ai.onnx.ml": 1]>\n'
HIDDEN, WIDTH = 8, 4
LSTM = """g (float[3,2,4] x) => (float[3,1,2,2] out) {
    a = MatMul(x, front)
    y = com.microsoft.DynamicQuantizeLSTM<hidden_size=8>(a, w, r, , , , , , ws, wz, rs, rz)
    out = MatMul(y, head)
}"""


def with_weights(text: str, **arrays: np.ndarray) -> onnx.ModelProto:
    model = onnx.parser.parse_model(HEAD + text)
    for name, array in arrays.items():
        tensor = ir.serde.serialize_tensor(ir.Tensor(array, name=name))
        model.graph.initializer.append(tensor)
    return model


def lstm() -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    numbers = {
        "w": rng.integers(0, 255, (1, WIDTH, 4 * HIDDEN)).astype(np.uint8),
        "r": rng.integers(0, 255, (1, HIDDEN, 4 * HIDDEN)).astype(np.uint8),
        "front": rng.standard_normal((WIDTH, WIDTH)).astype(np.float32),
        "head": rng.standard_normal((HIDDEN, 2)).astype(np.float32),
    }
    for n in "wr":
        numbers[f"{n}s"] = np.array([0.01], np.float32)
        numbers[f"{n}z"] = np.array([128], np.uint8)
    return with_weights(LSTM, **numbers)


@pytest.mark.parametrize("straight", [False, True])
def test_training_before_a_quantized_lstm_names_it(straight: bool) -> None:
    """The file has no types of the operator's outputs; they follow from its attributes."""
    with pytest.raises(UndifferentiableError, match=r"DynamicQuantizeLSTM.*works on integers"):
        onnxtrain.build(lstm(), loss="mse", optimizer="sgd", straight_through=straight)


def test_layers_after_a_quantized_lstm_train() -> None:
    trainer = Trainer(onnxtrain.build(lstm(), loss="mse", optimizer="sgd:lr=0.1", train=["head"]))
    batch = {"x": np.ones((3, 2, 4), np.float32), "target": np.ones((3, 1, 2, 2), np.float32)}
    values = [float(trainer.step(**batch).loss) for _ in range(5)]
    assert values[-1] < values[0]


NAMED = """g (float[n,3] x) => (int64[n] label, seq(map(int64, float)) named) {
    label, p = ai.onnx.ml.LinearClassifier<classlabels_ints = [0, 1], multi_class = 1,
        coefficients = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6], intercepts = [0.0, 0.1],
        post_transform = "SOFTMAX">(x)
    named = ai.onnx.ml.ZipMap<classlabels_int64s = [0, 1]>(p)
}"""


@pytest.mark.parametrize("imports", [["", "ai.onnx.ml"], ["ai.onnx.ml"]])
def test_zipmap_outputs_become_tensors(imports: list[str]) -> None:
    """Default exports of skl2onnx train; the probabilities are columns of a tensor."""
    model = with_weights(NAMED)
    kept = [o for o in model.opset_import if o.domain in imports]
    del model.opset_import[:]
    model.opset_import.extend(kept)
    x = np.random.default_rng(5).standard_normal((4, 3)).astype(np.float32)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    label, maps = session.run(None, {"x": x})
    want = [[row[0], row[1]] for row in cast(list[dict[int, float]], maps)]
    made = onnxtrain.build(model, loss="mse", optimizer="adamw:lr=1e-2")
    assert "ZipMap left out: output 'named' is a tensor now" in onnxtrain.explain(model).repairs
    trainer = Trainer(made)
    predicted = trainer.predict(x=x)
    np.testing.assert_allclose(predicted["named"], want, rtol=1e-5)
    np.testing.assert_array_equal(predicted["label"], np.asarray(label))
    target = np.eye(2, dtype=np.float32)[[0, 1, 0, 1]]
    curve = [float(trainer.step(x=x, target=target).loss) for _ in range(10)]
    assert curve[-1] < curve[0]


def test_other_maps_raise() -> None:
    model = with_weights(NAMED.replace("ZipMap<", "CastMap<"))
    with pytest.raises(LoadError, match="output 'named'") as caught:
        onnxtrain.build(model, loss="mse", optimizer="sgd")
    assert "'zipmap': False" in str(caught.value)


BEAM = """g (int32[b,s] ids, int32[1] most, int32[1] least, int32[1] beams, int32[1] kept,
    float[1] penalty) => (float[b,kept] scores) {
    sequences, scores = com.microsoft.BeamSearch<eos_token_id = 1, pad_token_id = 0,
        decoder = d (int32[b,s] input_ids) => (int32[b,s] logits) { logits = Identity(input_ids) }
    >(ids, most, least, beams, kept, penalty)
}"""


ASKED = {
    "build": lambda model: onnxtrain.build(model, loss="mse", optimizer="sgd"),
    "vjp": lambda model: onnxtrain.vjp(model, wrt=["penalty"]),
}


@pytest.mark.parametrize("ask", ASKED)
def test_beam_search_error_says_that_it_generates_tokens(ask: str) -> None:
    model = with_weights(BEAM)
    with pytest.raises(OnnxTrainError, match="it generates tokens one after the other") as caught:
        ASKED[ask](model)
    assert isinstance(caught.value, PrepareError | UndifferentiableError)
    assert "BeamSearch" in str(caught.value)
