"""Forward and backward as two models give what the joint model gives."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest

import onnxtrain
from tests.zoo.export import export
from tests.zoo.models import ZOO


def _session(model) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model.SerializeToString(), options)


@pytest.mark.parametrize("name", ["lenet", "gpt2", "gru"])
def test_split_equals_vjp(name: str) -> None:
    model = export(ZOO[name]).model
    cut, joint = onnxtrain.split(model), onnxtrain.vjp(model)
    values = onnxtrain.parameters(model)
    forward, backward, both = (_session(m) for m in (cut.forward, cut.backward, joint))
    names = [o.name for o in forward.get_outputs()]
    runs = []
    for rows in (3, 2):  # two forwards before their backwards
        feeds = {f"input_{i}": t.numpy() for i, t in enumerate(ZOO[name].inputs(rows))} | values
        made = dict(zip(names, forward.run(None, feeds), strict=True))
        runs.append((feeds, made))
    rng = np.random.default_rng(0)
    for feeds, made in runs:
        seeds = {
            f"{o}_grad": rng.standard_normal(made[o].shape).astype(np.float32) for o in cut.outputs
        }
        known = {n: made[n] for n in cut.saved} | {n: feeds[n] for n in cut.passed}
        grads = backward.run(None, known | seeds)
        want = both.run([f"{n}_grad" for n in cut.wrt], feeds | seeds)
        for g, w in zip(grads, want, strict=True):
            np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-5)


def test_cheap_values_are_not_saved() -> None:
    model = export(ZOO["gpt2"]).model
    cut = onnxtrain.split(model)
    makers = {y: n.op_type for n in cut.forward.graph.node for y in n.output}
    shown = {o.name for o in cut.forward.graph.output[: len(cut.outputs)]}
    kinds = {makers[s] for s in cut.saved if s not in shown}
    assert not kinds & {"Reshape", "Transpose", "Unsqueeze", "Shape", "Cast"}
