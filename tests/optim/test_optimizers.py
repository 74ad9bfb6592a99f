"""Every optimizer against torch.optim, step by step; LAMB and Lion against their papers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch

from onnxtrain import optim
from onnxtrain.errors import PrepareError
from onnxtrain.graph.builder import OpBuilder

STEPS = 100
SHAPES = {"fc.weight": (4, 3), "fc.bias": (3,), "conv.weight": (2, 3, 2, 2), "scale": ()}


def optimizer_session(
    optimizer: optim.Optimizer, target: str = "cpu"
) -> tuple[onnxruntime.InferenceSession, dict[str, np.ndarray]]:
    """Build the optimizer graph over SHAPES; return a session and the initial state."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="optimizer")
    op = OpBuilder(graph, target=target)
    lr = op.input("learning_rate", ir.DataType.FLOAT, [1])
    step = op.input("step", ir.DataType.INT64, [1])
    parameters = {n: op.input(n, ir.DataType.FLOAT, s) for n, s in SHAPES.items()}
    gradients = {n: op.input(f"{n}_grad", ir.DataType.FLOAT, s) for n, s in SHAPES.items()}
    slots = {
        f"{n}.{s.name}": s
        for n, shape in SHAPES.items()
        for s in optimizer.slots(n, shape, ir.DataType.FLOAT)
    }
    state = {n: op.input(n, s.dtype, s.dims) for n, s in slots.items()}
    new_parameters, new_state = optimizer.apply(op, parameters, gradients, state, lr, step)
    assert new_state.keys() == state.keys()
    for name, value in {**new_parameters, **new_state}.items():
        out = op.Identity(value)
        out.name = f"{name}.out"
        graph.outputs.append(out)
    proto = ir.to_proto(ir.Model(graph, ir_version=10))
    assert {n.domain for n in proto.graph.node} == {""}
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    return session, {n: np.full(s.dims, s.init, np.float32) for n, s in slots.items()}


def draw() -> tuple[dict[str, np.ndarray], list[dict[str, np.ndarray]]]:
    rng = np.random.default_rng(0)
    start = {n: rng.standard_normal(s).astype(np.float32) for n, s in SHAPES.items()}
    grads = [
        {n: np.asarray(rng.standard_normal(s), np.float32) for n, s in SHAPES.items()}
        for _ in range(STEPS)
    ]
    return {n: np.asarray(v) for n, v in start.items()}, grads


def run(
    optimizer: optim.Optimizer,
    lrs: Callable[[int], float],
    target: str = "cpu",
    slot: str | None = None,
) -> list[dict[str, np.ndarray]]:
    """Return the parameters, or one slot of their state, after each step."""
    session, state = optimizer_session(optimizer, target)
    values, grads = draw()
    trace = []
    for t, g in enumerate(grads, 1):
        feeds: dict[str, Any] = {
            "learning_rate": np.array([lrs(t)], np.float32),
            "step": np.array([t], np.int64),
            **values,
            **{f"{n}_grad": v for n, v in g.items()},
            **state,
        }
        known = {i.name for i in session.get_inputs()}
        outs = dict(
            zip(
                (o.name for o in session.get_outputs()),
                session.run(None, {k: v for k, v in feeds.items() if k in known}),
                strict=True,
            )
        )
        values = {n: outs[f"{n}.out"] for n in values}
        state = {n: outs[f"{n}.out"] for n in state}
        trace.append(values if slot is None else {n: state[f"{n}.{slot}"] for n in values})
    return trace


def torch_run(
    make: Callable[..., torch.optim.Optimizer],
    lrs: Callable[[int], float],
    groups: Callable[[str], dict] | None = None,
) -> list[dict[str, np.ndarray]]:
    start, grads = draw()
    params = {n: torch.nn.Parameter(torch.tensor(v)) for n, v in start.items()}
    if groups is None:
        opt = make(list(params.values()), lr=lrs(1))
    else:
        opt = make([{"params": [p], **groups(n)} for n, p in params.items()], lr=lrs(1))
    base = [g["lr"] for g in opt.param_groups]
    trace = []
    for t, g in enumerate(grads, 1):
        for group, first in zip(opt.param_groups, base, strict=True):
            group["lr"] = first * lrs(t) / lrs(1)
        for n, p in params.items():
            p.grad = torch.tensor(g[n])
        opt.step()
        trace.append({n: p.detach().numpy().copy() for n, p in params.items()})
    return trace


def assert_same(
    ours: list[dict[str, np.ndarray]], theirs: list[dict[str, np.ndarray]], rtol: float = 1e-5
) -> None:
    for t, (a, b) in enumerate(zip(ours, theirs, strict=True), 1):
        for name in a:
            error = np.linalg.norm(a[name] - b[name]) / np.linalg.norm(b[name])
            assert error <= rtol, f"step {t}, {name}: {error:.2e}"


TORCH = torch.optim
CASES: dict[str, tuple[optim.Optimizer, Callable[..., torch.optim.Optimizer]]] = {
    "sgd": (optim.SGD(lr=0.1), lambda p, lr: TORCH.SGD(p, lr=lr)),
    "sgd-momentum": (
        optim.SGD(momentum=0.9, weight_decay=0.01),
        lambda p, lr: TORCH.SGD(p, lr=lr, momentum=0.9, weight_decay=0.01),
    ),
    "sgd-nesterov": (
        optim.SGD(momentum=0.8, nesterov=True),
        lambda p, lr: TORCH.SGD(p, lr=lr, momentum=0.8, nesterov=True),
    ),
    "sgd-dampening": (
        optim.SGD(momentum=0.8, dampening=0.3),
        lambda p, lr: TORCH.SGD(p, lr=lr, momentum=0.8, dampening=0.3),
    ),
    # The anchor of these tests is zero: the term is that of weight decay then.
    "sgd-proximal": (
        optim.SGD(momentum=0.5, proximal=0.05),
        lambda p, lr: TORCH.SGD(p, lr=lr, momentum=0.5, weight_decay=0.05),
    ),
    "adam-proximal": (
        optim.Adam(proximal=0.05),
        lambda p, lr: TORCH.Adam(p, lr=lr, weight_decay=0.05),
    ),
    "adam": (optim.Adam(), lambda p, lr: TORCH.Adam(p, lr=lr)),
    "adam-decay-amsgrad": (
        optim.Adam(weight_decay=0.1, amsgrad=True, betas=(0.8, 0.99)),
        lambda p, lr: TORCH.Adam(p, lr=lr, weight_decay=0.1, amsgrad=True, betas=(0.8, 0.99)),
    ),
    "adamw": (
        optim.AdamW(weight_decay=0.05),
        lambda p, lr: TORCH.AdamW(p, lr=lr, weight_decay=0.05),
    ),
    "adagrad": (
        optim.Adagrad(lr_decay=0.1, weight_decay=0.01, initial_accumulator_value=0.1),
        lambda p, lr: TORCH.Adagrad(
            p, lr=lr, lr_decay=0.1, weight_decay=0.01, initial_accumulator_value=0.1
        ),
    ),
    "rmsprop": (optim.RMSprop(), lambda p, lr: TORCH.RMSprop(p, lr=lr)),
    "rmsprop-centered-momentum": (
        optim.RMSprop(momentum=0.5, centered=True, weight_decay=0.01),
        lambda p, lr: TORCH.RMSprop(p, lr=lr, momentum=0.5, centered=True, weight_decay=0.01),
    ),
    "adadelta": (
        optim.Adadelta(weight_decay=0.01),
        lambda p, lr: TORCH.Adadelta(p, lr=lr, weight_decay=0.01),
    ),
    "adafactor": (
        optim.Adafactor(weight_decay=0.01),
        lambda p, lr: TORCH.Adafactor(p, lr=lr, weight_decay=0.01),
    ),
    "nadam": (
        optim.NAdam(weight_decay=0.01, momentum_decay=0.03),
        lambda p, lr: TORCH.NAdam(p, lr=lr, weight_decay=0.01, momentum_decay=0.03),
    ),
    "nadam-decoupled": (
        optim.NAdam(weight_decay=0.1, decoupled_weight_decay=True),
        lambda p, lr: TORCH.NAdam(p, lr=lr, weight_decay=0.1, decoupled_weight_decay=True),
    ),
    "radam": (
        optim.RAdam(weight_decay=0.01),
        lambda p, lr: TORCH.RAdam(p, lr=lr, weight_decay=0.01),
    ),
    # Its variance is never bounded: all steps are those of momentum.
    "radam-short-memory": (
        optim.RAdam(betas=(0.9, 0.6), weight_decay=0.1, decoupled_weight_decay=True),
        lambda p, lr: TORCH.RAdam(
            p, lr=lr, betas=(0.9, 0.6), weight_decay=0.1, decoupled_weight_decay=True
        ),
    ),
    "adamax": (
        optim.Adamax(weight_decay=0.01),
        lambda p, lr: TORCH.Adamax(p, lr=lr, weight_decay=0.01),
    ),
}
# Their step size is state, or follows the learning rate of the step before.
CONSTANT_RATE: dict[str, tuple[optim.Optimizer, Callable[..., torch.optim.Optimizer]]] = {
    "asgd": (
        optim.ASGD(lambd=0.01, weight_decay=0.01),
        lambda p, lr: TORCH.ASGD(p, lr=lr, lambd=0.01, weight_decay=0.01),
    ),
    "rprop": (optim.Rprop(lr=0.01), lambda p, lr: TORCH.Rprop(p, lr=lr)),
    "muon": (
        optim.Muon(adamw=["fc.w*"], betas=(0.8, 0.99)),
        lambda p, lr: TORCH.AdamW(p, lr=lr, weight_decay=0.1, betas=(0.8, 0.99)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_follows_torch(name: str) -> None:
    ours, theirs = CASES[name]
    lrs = lambda t: 0.02 / (1 + 0.1 * t)  # noqa: E731 - a schedule: the rate changes every step
    assert_same(run(ours, lrs), torch_run(theirs, lrs))


@pytest.mark.parametrize("name", CONSTANT_RATE)
def test_follows_torch_at_a_constant_rate(name: str) -> None:
    ours, theirs = CONSTANT_RATE[name]
    lrs = lambda t: 0.01  # noqa: E731
    assert_same(run(ours, lrs), torch_run(theirs, lrs))


@pytest.mark.parametrize("shape", [(4, 3), (3, 7), (5, 5)])
@pytest.mark.parametrize(
    "options", [{}, {"nesterov": False, "adjust_lr_fn": "match_rms_adamw", "ns_steps": 3}]
)
def test_muon_follows_torch_on_matrices(
    shape: tuple[int, int], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # torch orthogonalizes a copy in bfloat16; in float32 the two are comparable.
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    monkeypatch.setitem(globals(), "SHAPES", {"fc.weight": shape})
    lrs = lambda t: 0.02 / (1 + 0.1 * t)  # noqa: E731
    ours = run(optim.Muon(**options), lrs)
    assert_same(ours, torch_run(lambda p, lr: TORCH.Muon(p, lr=lr, **options), lrs), rtol=1e-4)


def test_asgd_averages_parameters_from_t0() -> None:
    trace = run(optim.ASGD(lr=0.1, t0=3), lambda t: 0.1, slot="ax")
    start, grads = draw()
    parameter = torch.nn.Parameter(torch.tensor(start["fc.weight"]))
    theirs = TORCH.ASGD([parameter], lr=0.1, t0=3)
    for ours, g in zip(trace, grads, strict=True):
        parameter.grad = torch.tensor(g["fc.weight"])
        theirs.step()
        expected = theirs.state[parameter]["ax"].numpy()
        np.testing.assert_allclose(ours["fc.weight"], expected, rtol=1e-5, atol=1e-6)


def _numpy_run(step: Callable[..., np.ndarray], lr: float) -> list[dict[str, np.ndarray]]:
    start, grads = draw()
    values = {n: v.astype(np.float64) for n, v in start.items()}
    memory: dict[str, dict[str, Any]] = {n: {} for n in values}
    trace = []
    for t, g in enumerate(grads, 1):
        values = {n: step(p, g[n].astype(np.float64), memory[n], t, lr) for n, p in values.items()}
        trace.append(values)
    return trace


def lamb_step(p, g, memory, t, lr, wd=0.01, b1=0.9, b2=0.999, eps=1e-6):
    """Algorithm 2 of the LAMB paper, with bias correction."""
    memory["m"] = b1 * memory.get("m", 0.0) + (1 - b1) * g
    memory["v"] = b2 * memory.get("v", 0.0) + (1 - b2) * g * g
    m, v = memory["m"] / (1 - b1**t), memory["v"] / (1 - b2**t)
    r = m / (np.sqrt(v) + eps) + wd * p
    a, b = np.linalg.norm(p), np.linalg.norm(r)
    return p - lr * (a / b if a > 0 and b > 0 else 1.0) * r


def lion_step(p, g, memory, t, lr, wd=0.1, b1=0.9, b2=0.99):
    """The program of the Lion paper."""
    m = memory.get("m", np.zeros_like(p))
    update = np.sign(b1 * m + (1 - b1) * g)
    memory["m"] = b2 * m + (1 - b2) * g
    return p - lr * (update + wd * p)


def hf_step(p, g, memory, t, lr, wd=0.01, b1=0.9, b2=0.999, eps=1e-6):
    """AdamW of the transformers library: eps before the correction, decay of the new weights."""
    memory["m"] = b1 * memory.get("m", 0.0) + (1 - b1) * g
    memory["v"] = b2 * memory.get("v", 0.0) + (1 - b2) * g * g
    size = lr * np.sqrt(1 - b2**t) / (1 - b1**t)
    p = p - size * memory["m"] / (np.sqrt(memory["v"]) + eps)
    return p - lr * wd * p


# What torch does not have.
FORMULAS: dict[str, tuple[optim.Optimizer, Callable[..., np.ndarray]]] = {
    "lamb": (optim.LAMB(), lamb_step),
    "lion": (optim.Lion(weight_decay=0.1), lion_step),
    "adamw-hf": (optim.AdamW(form="hf", eps=1e-6), hf_step),
}
SETTINGS = {name: ours for name, (ours, _) in {**CASES, **CONSTANT_RATE, **FORMULAS}.items()}


@pytest.mark.parametrize("name", FORMULAS)
def test_follows_formula(name: str) -> None:
    ours, theirs = FORMULAS[name]
    assert_same(run(ours, lambda t: 0.01), _numpy_run(theirs, 0.01))


def test_every_optimizer_has_a_case() -> None:
    tested = {type(ours) for ours in SETTINGS.values()}
    assert [name for name, kind in optim.OPTIMIZERS.items() if kind not in tested] == []


def test_lion_without_sign_is_the_same() -> None:
    lrs = lambda t: 0.01  # noqa: E731
    assert_same(run(optim.Lion(), lrs, "webgpu"), run(optim.Lion(), lrs), rtol=0.0)


def test_groups() -> None:
    ours = optim.AdamW(
        weight_decay=0.1,
        groups=[
            optim.ParamGroup("*.bias", weight_decay=0.0),
            optim.ParamGroup("conv.*", lr_factor=0.1),
        ],
    )
    lrs = lambda t: 0.01 / t  # noqa: E731

    def groups(name: str) -> dict[str, float]:
        if name.endswith(".bias"):
            return {"weight_decay": 0.0}
        return {"lr": 0.001} if name.startswith("conv.") else {}

    theirs = torch_run(lambda p, lr: TORCH.AdamW(p, lr=lr, weight_decay=0.1), lrs, groups)
    assert_same(run(ours, lrs), theirs)


def test_bad_settings_are_refused() -> None:
    for bad in (
        lambda: optim.SGD(lr=-1.0),
        lambda: optim.SGD(nesterov=True),
        lambda: optim.Adam(betas=(1.0, 0.9)),
        lambda: optim.AdamW(form="other"),
        lambda: optim.Muon(adjust_lr_fn="other"),
        lambda: optim.resolve("sdg"),
    ):
        with pytest.raises(PrepareError):
            bad()
