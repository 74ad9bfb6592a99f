"""chunked_attention: equal gradients, and the scores of one chunk at a time."""

from __future__ import annotations

import collections
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx import parser

import onnxtrain
from onnxtrain import thresholds
from onnxtrain.graph.memory_usage import Sizes, peak_bytes, run_order

HEAD = '<ir_version: 10, opset_import: ["": 21]>\n'
BATCH, HEADS, ROWS, WIDTH = 6, 2, 32, 2
SCORES = 4 * BATCH * HEADS * ROWS * ROWS
SHAPES = {
    "q": (BATCH, HEADS, ROWS, WIDTH),
    "k": (BATCH, HEADS, WIDTH, ROWS),
    "v": (BATCH, HEADS, ROWS, WIDTH),
    "y_grad": (BATCH, HEADS, ROWS, WIDTH),
    "m": (BATCH, 1, ROWS, ROWS),
    "n": (1, 1, ROWS, ROWS),
}
PLAIN = "s = MatMul(q, k) p = Softmax(s) o = MatMul(p, v) y = Neg(o)"
MASKED = "s = MatMul(q, k) t = Add(s, m) p = Softmax<axis = -1>(t) o = MatMul(p, v) y = Neg(o)"
SCALED = """c = Constant<value_float = 0.7>() s = MatMul(q, k) u = Mul(s, c) t = Add(n, u)
            p = Softmax<axis = 3>(t) o = MatMul(p, v) y = Neg(o)"""
HIDDEN = """c = Constant<value_float = -1e9>() z = Constant<value_float = 0.0>() s = MatMul(q, k)
            h = Greater(m, z) t = Where(h, s, c) p = Softmax(t) o = MatMul(p, v) y = Neg(o)"""
TRIPLE = (("q", ROWS, WIDTH), ("k", WIDTH, ROWS), ("v", ROWS, WIDTH))
BODIES = {"plain": PLAIN, "masked": MASKED, "scaled": SCALED, "hidden": HIDDEN}
READ_TWICE = "s = MatMul(q, k) p = Softmax(s) o = MatMul(p, v) r = ReduceMax(p) y = Add(o, r)"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thresholds, "ATTENTION_CHUNK_BYTES", SCORES // 3)
    monkeypatch.setattr(thresholds, "REMATERIALIZE_BYTES", 1 << 10)


def model(body: str) -> onnx.ModelProto:
    names = [n for n in ("q", "k", "v", "m", "n") if f"({n}," in body or f", {n})" in body]
    inputs = ", ".join(f"float[{', '.join(map(str, SHAPES[n]))}] {n}" for n in names)
    text = f"g ({inputs}) => (float[{', '.join(map(str, SHAPES['y_grad']))}] y) {{ {body} }}"
    return parser.parse_model(HEAD + text)


def given(name: str) -> np.ndarray:
    rng = np.random.default_rng(sum(map(ord, name)))
    return rng.standard_normal(SHAPES[name]).astype(np.float32)


def gradients(made: onnx.ModelProto) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(made.SerializeToString())
    feeds = {x.name: given(x.name) for x in session.get_inputs()}
    return [np.asarray(g) for g in session.run(None, feeds)[1:]]


def reference(body: str) -> list[np.ndarray]:
    values = {n: torch.tensor(given(n), dtype=torch.float64) for n in SHAPES}
    q, k, v = (values[n].requires_grad_() for n in "qkv")
    scores = q @ k
    if body is MASKED:
        scores = scores + values["m"]
    if body is HIDDEN:
        scores = torch.where(values["m"] > 0, scores, -1e9)
    if body is SCALED:
        scores = scores * 0.7 + values["n"]
    y = -(torch.softmax(scores, -1) @ v)
    return [g.numpy() for g in torch.autograd.grad(y, (q, k, v), values["y_grad"])]


def counts(made: onnx.ModelProto) -> collections.Counter[str]:
    return collections.Counter(n.op_type for n in made.graph.node)


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_gradients_are_those_of_torch(body: str) -> None:
    made = onnxtrain.vjp(model(body), wrt=["q", "k", "v"], target="cuda")
    assert counts(made)["Softmax"] == 6, "three parts, each computed twice"
    for got, want in zip(gradients(made), reference(body), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_scores_of_one_chunk_at_a_time(body: str) -> None:
    made = onnxtrain.vjp(model(body), wrt=["q", "k", "v"], target="cuda")
    kept = onnxtrain.vjp(model(body), wrt=["q", "k", "v"], target="cpu")
    peaks = []
    for m in (made, kept):
        graph = ir.from_proto(m).graph
        outputs = {y.name or "" for y in graph.outputs}
        peaks.append(peak_bytes(run_order(list(graph)), Sizes(), outputs))
    # Four tensors of a part's scores, and all that is as small as queries.
    assert peaks[0] < 4 * SCORES // 3 + 12 * 4 * BATCH * HEADS * ROWS * WIDTH
    assert peaks[1] > 2 * SCORES


def test_onnxruntime_does_not_merge_recomputed_nodes(tmp_path: Path) -> None:
    made = onnxtrain.vjp(model(PLAIN), wrt=["q", "k", "v"], target="cuda")
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "run.onnx")
    onnxruntime.InferenceSession(made.SerializeToString(), options)
    assert counts(onnx.load(tmp_path / "run.onnx"))["Softmax"] == 6


@pytest.mark.parametrize("target", ["cpu", "wasm", "webgpu", "portable"])
def test_other_targets_do_not_chunk(target: str) -> None:
    made = onnxtrain.vjp(model(PLAIN), wrt=["q", "k", "v"], target=target)
    assert counts(made)["Softmax"] == 1


def test_short_sequences_are_not_chunked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thresholds, "LONG_ATTENTION_RATIO", ROWS // WIDTH + 1)
    made = onnxtrain.vjp(model(PLAIN), wrt=["q", "k", "v"], target="cuda")
    assert counts(made)["Softmax"] == 1


def test_weights_with_other_readers_are_not_chunked() -> None:
    made = onnxtrain.vjp(model(READ_TWICE), wrt=["q", "k", "v"], target="cuda")
    assert counts(made)["Split"] == 0


def test_a_second_output_of_attention() -> None:
    text = f"g ({', '.join(f'float[{BATCH}, {HEADS}, {a}, {b}] {n}' for n, a, b in TRIPLE)})"
    text += (
        f" => (float z, float[{BATCH}, {HEADS}, {ROWS}, {WIDTH}] y) {{ z = ReduceSum(q) {PLAIN} }}"
    )
    text = text.replace("z = ReduceSum(q)", "z = ReduceSum<keepdims = 0>(q)")
    made = onnxtrain.vjp(
        parser.parse_model(HEAD + text), wrt=["q", "k", "v"], outputs=["y"], target="cuda"
    )
    session = onnxruntime.InferenceSession(made.SerializeToString())
    got = session.run(None, {x.name: given(x.name) for x in session.get_inputs()})[2:]
    for a, b in zip(got, reference(PLAIN), strict=True):
        np.testing.assert_allclose(np.asarray(a), b, rtol=2e-4, atol=2e-5)


def test_concat_takes_no_more_operands_than_graph_capture_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(thresholds, "ATTENTION_CHUNK_BYTES", 1)
    monkeypatch.setattr(thresholds, "CUDA_GRAPH_CONCAT_INPUTS", 9)
    made = onnxtrain.vjp(model(PLAIN), wrt=["q", "k", "v"], target="cuda")
    most = max(len(n.input) for n in made.graph.node if n.op_type == "Concat")
    assert counts(made)["Softmax"] == 6
    assert most == 9
    for got, want in zip(gradients(made), reference(PLAIN), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-5)
