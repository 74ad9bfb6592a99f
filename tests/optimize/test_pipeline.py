"""The order of passes: one table, with reasons, for everything that differentiates."""

from __future__ import annotations

import ast
import itertools
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

import onnxtrain
from onnxtrain.optimize import pipeline
from onnxtrain.optimize.pipeline import AFTER, AFTER_LAST_GRADIENT, BEFORE, FINAL, INPUTS
from onnxtrain.targets import find
from onnxtrain.torch import from_torch

SRC = Path(onnxtrain.__file__).parent


def test_every_pass_is_documented() -> None:
    entries = [p.rewrite for p in (*INPUTS, *BEFORE, *AFTER, *AFTER_LAST_GRADIENT, *FINAL)]
    assert len(entries) == len(set(entries))
    assert all(f.__doc__ for f in entries)


def test_the_order_of_passes_has_reasons() -> None:
    source = Path(pipeline.__file__).read_text()
    lines = [line.strip() for line in source.splitlines()]
    silent = [
        line
        for before, line in itertools.pairwise(lines)
        if line.startswith("Pass(") and not before.startswith(("#", "Pass("))
    ]
    assert silent == []


def test_passes_compare_operators_with_their_domain() -> None:
    files = (SRC / "optimize").rglob("*.py")
    assert [f.name for f in files if ".op_type " in f.read_text()] == [], "use is_op"


def test_only_one_module_differentiates_a_model() -> None:
    callers = set()
    for path in SRC.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            called = node.func if isinstance(node, ast.Call) else None
            if isinstance(called, ast.Name) and called.id in (
                "differentiate",
                "differentiate_with_recompute",
            ):
                callers.add(path.relative_to(SRC).as_posix())
    # Bodies of loops and branches have sweeps of their own.
    # What explain tries out on a copy is thrown away.
    # Gradient nodes of a model are sweeps that its author asks for.
    assert callers == {
        "autodiff/explain.py",
        "autodiff/gradient_nodes.py",
        "autodiff/gradients.py",
        "autodiff/recompute.py",
        "autodiff/rules/control_flow.py",
        "autodiff/differentiate.py",
    }


class Norm(nn.Module):
    """A normalisation on the statistics of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.norm(x))


class Total(Norm):
    """The sum of it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).sum()


@pytest.mark.parametrize("target", ["cuda", "webgpu"])
@pytest.mark.parametrize("entry", ["vjp", "jvp", "grad", "split"])
def test_no_training_mode_where_the_runtime_lacks_it(entry: str, target: str) -> None:
    net = Total() if entry == "grad" else Norm()
    model = from_torch(net.train(), (torch.randn(4, 3, 5, 5),), train=True)
    assert find(target).lacks("BatchNormalization.training_mode")
    if entry == "grad":
        of = model.graph.outputs[0].name
        models = [onnxtrain.grad(model, ["norm.weight", "norm.bias"], of, target=target)]
    elif entry == "split":
        halves = onnxtrain.split(model, target=target)
        models = [halves.forward, halves.backward]
    else:
        models = [getattr(onnxtrain, entry)(model, target=target)]
    for made in models:
        norms = [n for n in made.graph.node if n.op_type == "BatchNormalization"]
        assert not [n for n in norms if any(a.name == "training_mode" for a in n.attribute)]


def test_gradients_of_batch_statistics_are_the_same_for_every_target() -> None:
    x = torch.randn(4, 3, 5, 5)
    model = from_torch(Norm().train(), (x,), train=True)
    weights = list(onnxtrain.parameters(model).values())
    results = []
    for target in ("cpu", "cuda", "webgpu", "portable"):
        made = onnxtrain.vjp(model, target=target)
        session = onnxruntime.InferenceSession(
            made.SerializeToString(), providers=["CPUExecutionProvider"]
        )
        cotangents = [
            np.ones([4, 3, 5, 5][: len(i.shape)] if len(i.shape) == 4 else [3], np.float32)
            for i in session.get_inputs()[1 + len(weights) :]
        ]
        values = [x.numpy(), *weights, *cotangents]
        names = [i.name for i in session.get_inputs()]
        results.append(session.run(None, dict(zip(names, values, strict=True))))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
