"""fold_scale_into_rotary: the tables of a rotation contain the scale of attention."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import parser

import onnxtrain
from onnxtrain.optimize import pipeline
from onnxtrain.optimize.rotary_embedding import fold_scale_into_rotary

BATCH, LENGTH, HEADS, GROUPS, SIZE = 2, 5, 4, 2, 8
PACKED = {"x": HEADS + 2 * GROUPS}
APART = {"x": HEADS, "k": GROUPS, "v": GROUPS}


def model(heads: dict[str, int], settings: str) -> onnx.ModelProto:
    """Return attention with rotation over inputs with the given numbers of heads."""
    given = [f"float[B, S, {h * SIZE}] {n}" for n, h in heads.items()]
    given += ["int32[B] lengths", "int32 total", f"float[{LENGTH}, {SIZE // 2}] cos"]
    given += [f"float[{LENGTH}, {SIZE // 2}] sin"]
    queries = ", ".join([*heads, *['""'] * (3 - len(heads))])
    return parser.parse_model(f"""<ir_version: 11, opset_import: ["": 23, "com.microsoft": 1]>
        g ({", ".join(given)}) => (float[B, S, {HEADS * SIZE}] y) {{
            y = com.microsoft.GroupQueryAttention
                <num_heads = {HEADS}, kv_num_heads = {GROUPS}, do_rotary = 1{settings}>
                ({queries}, "", "", lengths, total, cos, sin)
        }}""")


def results(
    heads: dict[str, int], wanted: list[str], settings: str = ""
) -> tuple[list[str], list[np.ndarray]]:
    made = onnxtrain.vjp(model(heads, settings), wrt=wanted)
    rng = np.random.default_rng(1)
    shapes = {n: (BATCH, LENGTH, h * SIZE) for n, h in heads.items()}
    shapes["y_grad"] = (BATCH, LENGTH, HEADS * SIZE)
    drawn = {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    feeds: dict[str, np.ndarray] = {**drawn}
    feeds["lengths"] = np.array([LENGTH - 1, 2], np.int32)
    feeds["total"] = np.array(LENGTH, np.int32)
    angles = np.outer(np.arange(LENGTH), 0.7 ** np.arange(SIZE // 2)).astype(np.float32)
    feeds |= {"cos": np.cos(angles), "sin": np.sin(angles)}
    session = onnxruntime.InferenceSession(made.SerializeToString())
    given = {x.name: feeds[x.name] for x in session.get_inputs()}
    kinds = [n.op_type for n in made.graph.node]
    return kinds, [np.asarray(y) for y in session.run(None, given)]


@pytest.mark.parametrize("heads", [PACKED, APART], ids=["packed", "apart"])
@pytest.mark.parametrize("settings", ["", ", scale = 0.3"], ids=["by size", "given"])
def test_only_tables_are_scaled(heads, settings, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds, have = results(heads, list(heads), settings)
    rest = tuple(p for p in pipeline.FINAL if p.rewrite is not fold_scale_into_rotary)
    monkeypatch.setattr(pipeline, "FINAL", rest)
    before, want = results(heads, list(heads), settings)
    for a, b in zip(have, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert kinds.count("RotaryEmbedding") == 4
    # A factor less in each direction, and three tables with it, which all layers share.
    assert kinds.count("Mul") == before.count("Mul") - 2 + 3
    fewer = [len([k for k in of if k in ("Split", "Concat")]) for of in (kinds, before)]
    assert fewer[0] == fewer[1] - (2 if heads is PACKED else 0)


def test_the_gradient_of_queries_is_scaled_too() -> None:
    _, (_, both, *_) = results(APART, list(APART))
    _, (_, alone) = results(APART, ["x"])
    np.testing.assert_allclose(alone, both, rtol=1e-6)
    assert np.abs(alone).max() > 0.01


@pytest.mark.parametrize("setting", ["", "<interleaved=1>"])
def test_rotations_of_the_file_itself_keep_positions_and_settings(setting: str) -> None:
    """A later pass sees only what the file's operator was taken apart to."""
    text = f"""<ir_version: 11, opset_import: ["": 23]>
    g (float[B,3,S,8] x, float[M,4] c, float[M,4] d, int64[B,S] p) => (float[B,3,S,8] y)
    <float k = {{3}}> {{
        u = Mul(x, k)
        y = RotaryEmbedding{setting}(u, c, d, p)
    }}"""
    file = parser.parse_model(text)
    rng = np.random.default_rng(3)
    sizes = {"x": (2, 3, 5, 8), "c": (16, 4), "d": (16, 4)}
    feeds: dict[str, Any] = {n: rng.standard_normal(s).astype(np.float32) for n, s in sizes.items()}
    feeds["p"] = rng.integers(0, 16, (2, 5))
    want = onnxruntime.InferenceSession(file.SerializeToString()).run(None, feeds)
    dy = rng.standard_normal(sizes["x"]).astype(np.float32)
    made = onnxtrain.vjp(file, wrt=["x"])
    session = onnxruntime.InferenceSession(made.SerializeToString())
    y, dx = map(np.asarray, session.run(["y", "x_grad"], {**feeds, "y_grad": dy}))
    np.testing.assert_allclose(y, want[0], rtol=1e-5, atol=1e-5)
    # The rotation is linear: the gradient of a product with dy.
    np.testing.assert_allclose((dx * feeds["x"]).sum(), (dy * y).sum(), rtol=1e-4)
