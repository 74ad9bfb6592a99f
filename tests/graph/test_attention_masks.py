"""Integer masks of the Attention operator are added to the scores, as runtimes do."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest

import onnxtrain


@pytest.mark.parametrize("keys", [5, 3])
def test_integer_masks_are_added(keys):
    text = f"""<ir_version: 11, opset_import: ["" : 23]>
    g (float[2,5,8] q, float[2,5,8] k, float[2,5,8] v, int64[5,{keys}] mask) => (float[2,5,8] y) {{
        y = Attention <q_num_heads = 2, kv_num_heads = 2> (q, k, v, mask)
    }}"""
    model = onnx.parser.parse_model(text)
    rng = np.random.default_rng(0)
    feeds = {n: rng.standard_normal((2, 5, 8)).astype(np.float32) for n in "qkv"}
    feeds["mask"] = rng.integers(-3, 2, (5, keys))
    gradient = onnxtrain.vjp(model, ["q", "k", "v"])
    u = rng.standard_normal((2, 5, 8)).astype(np.float32)
    session = onnxruntime.InferenceSession(gradient.SerializeToString())
    y, dq, *_ = session.run(None, {**feeds, "y_grad": u})
    original = onnxruntime.InferenceSession(model.SerializeToString())
    if keys == 5:  # shorter masks are for newer kernels
        np.testing.assert_allclose(y, original.run(None, feeds)[0], rtol=1e-5, atol=1e-6)
        step = 1e-2 * dq / np.linalg.norm(dq)
        sides = [original.run(None, {**feeds, "q": feeds["q"] + s * step})[0] for s in (1, -1)]
        derivative = float(((sides[0] - sides[1]).astype(np.float64) * u).sum())
        assert derivative == pytest.approx(2e-2 * np.linalg.norm(dq), rel=1e-2)
    else:
        wide = {**feeds, "mask": np.full((5, 5), -(2**40))}
        wide["mask"][:, :keys] = feeds["mask"]
        full = onnx.parser.parse_model(text.replace(f"int64[5,{keys}]", "int64[5,5]"))
        session = onnxruntime.InferenceSession(full.SerializeToString())
        np.testing.assert_allclose(y, session.run(None, wide)[0], rtol=1e-5, atol=1e-6)
