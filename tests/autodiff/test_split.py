"""`split`: the forward and backward models compute the same gradients as `vjp`."""

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
    forward, backward, vjp = (_session(m) for m in (cut.forward, cut.backward, joint))
    names = [o.name for o in forward.get_outputs()]
    runs = []
    for rows in (3, 2):  # two forwards before their backwards
        feeds = {f"input_{i}": t.numpy() for i, t in enumerate(ZOO[name].inputs(rows))} | values
        results = dict(zip(names, forward.run(None, feeds), strict=True))
        runs.append((feeds, results))
    rng = np.random.default_rng(0)
    for feeds, results in runs:
        cotangents = {
            f"{o}_grad": rng.standard_normal(results[o].shape).astype(np.float32)
            for o in cut.outputs
        }
        saved = {n: results[n] for n in cut.saved} | {n: feeds[n] for n in cut.passed}
        actual = backward.run(None, saved | cotangents)
        expected = vjp.run([f"{n}_grad" for n in cut.wrt], feeds | cotangents)
        for a, b in zip(actual, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_cheap_values_are_not_saved() -> None:
    model = export(ZOO["gpt2"]).model
    cut = onnxtrain.split(model)
    producers = {y: n.op_type for n in cut.forward.graph.node for y in n.output}
    outputs = {o.name for o in cut.forward.graph.output[: len(cut.outputs)]}
    kinds = {producers[s] for s in cut.saved if s not in outputs}
    assert not kinds & {"Reshape", "Transpose", "Unsqueeze", "Shape", "Cast"}
