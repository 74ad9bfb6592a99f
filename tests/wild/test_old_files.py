"""Files of the first exporters: initializers listed as inputs, some of them unused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx

import onnxtrain
from tests.wild import graphs as g


def test_counters_of_batch_normalization(tmp_path: Path) -> None:
    """Such files count batches in a tensor that no node reads; the runtime loads them."""
    weights = {
        "scale": np.ones(3, np.float32),
        "shift": np.zeros(3, np.float32),
        "mean": g.random(3),
        "var": np.ones(3, np.float32),
        "count": np.int64(7),
    }
    nodes = [g.node("BatchNormalization", "x scale shift mean var", "y")]
    model = g.model(nodes, {"x": (4, 3, 2, 2)}, {"y": (4, 3, 2, 2)}, weights, opset=9)
    model.ir_version = 3
    model.graph.input.extend(
        g.info(n, np.shape(a), g.INT64 if n == "count" else g.FLOAT) for n, a in weights.items()
    )
    x = np.random.default_rng(1).standard_normal((4, 3, 2, 2)).astype(np.float32)
    before = g.run(model, {"x": x})[0]
    made = onnxtrain.build(model, loss="mse", optimizer="adamw:lr=1e-2")
    trainer = onnxtrain.Trainer(made)
    np.testing.assert_allclose(trainer.predict(x=x)["y"], before, rtol=1e-5, atol=1e-6)
    trainer.step(x=x, target=np.zeros_like(x))
    trainer.export(tmp_path / "trained.onnx")
    exported = onnx.load(tmp_path / "trained.onnx")
    assert [i.name for i in exported.graph.input] == ["x"]
    after = g.run(exported, {"x": x})[0]
    np.testing.assert_allclose(trainer.predict(x=x)["y"], after, rtol=1e-5, atol=1e-6)
    assert np.abs(after - before).max() > 1e-3
