"""The verdict on one case: our gradient, run on stock onnxruntime, against a finite difference."""

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

import onnxtrain
from onnxtrain.errors import OnnxTrainError, UndifferentiableError
from tests.node_cases.cases import Case
from tests.node_cases.differences import Differences, UnstableError, differences, first_line
from tests.node_cases.engines import agrees, session

PASSED, FAILED, REFUSED, ERROR, SKIPPED = "passed", "failed", "refused", "error", "skipped"
# Of the terms' size: what a gradient of this precision may be off by.
_PRECISION = {"float64": 1e-5, "float32": 1e-3, "float16": 2e-2, "bfloat16": 1e-1}
_SECONDS = 60


@dataclass(frozen=True)
class Verdict:
    """What came of one case, and why if it is not 'passed'."""

    name: str
    op: str
    outcome: str
    reason: str = ""
    stable: bool = False
    engine: str = ""
    moved: bool = False
    left_out: dict[str, str] = field(default_factory=dict)
    gradients: dict[str, np.ndarray] = field(default_factory=dict)


class _TooLongError(Exception):
    pass


def check_group(cases: Sequence[Case]) -> list[Verdict]:
    """Verdicts on a case and its bodies, which must also have the same gradients."""
    verdicts = [_within_time(case) for case in cases]
    own = next((v for c, v in zip(cases, verdicts, strict=True) if not c.is_twin), None)
    if own is not None:
        verdicts = [v if v is own else compare_twin(own, v) for v in verdicts]
    return [replace(v, gradients={}) for v in verdicts]


def _within_time(case: Case) -> Verdict:
    def stop(*_):
        raise _TooLongError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(_SECONDS)
    try:
        return check(case)
    except _TooLongError:
        return Verdict(case.name, case.op, ERROR, f"took over {_SECONDS} s", stable=True)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def check(case: Case) -> Verdict:
    """The verdict on one case by itself."""
    try:
        truth = differences(case)
    except UnstableError as error:
        return Verdict(case.name, case.op, SKIPPED, str(error))
    asked = tuple(truth.derivatives)
    about = Verdict(case.name, case.op, PASSED, "", True, truth.engine, truth.moved, truth.left_out)
    runnable = _forward(case)
    try:
        model = onnxtrain.vjp(case.proto(), wrt=list(asked), outputs=list(case.outputs))
    except UndifferentiableError as error:
        if isinstance(runnable, str):
            return replace(about, outcome=SKIPPED, reason=runnable, stable=False)
        return replace(about, outcome=REFUSED, reason=_refusal(error))
    except _TooLongError:
        raise
    except OnnxTrainError as error:
        if isinstance(runnable, str):
            return replace(about, outcome=SKIPPED, reason=runnable, stable=False)
        return replace(about, outcome=ERROR, reason=f"vjp: {first_line(error)}")
    except Exception as error:
        return replace(about, outcome=ERROR, reason=f"vjp: {first_line(error)}")
    try:
        run = session(model.SerializeToString())
        results = run(_feeds(case, truth, model, truth.cotangents))
        count = len(results) - len(asked)
        aligned = {
            name: run(_feeds(case, truth, model, derivative.cotangents))[count + index]
            for index, (name, derivative) in enumerate(truth.derivatives.items())
        }
    except _TooLongError:
        raise
    except Exception as error:
        if isinstance(runnable, str):
            return replace(about, outcome=SKIPPED, reason=runnable, stable=False)
        return replace(about, outcome=ERROR, reason=f"run: {first_line(error)}")
    about = replace(about, gradients=dict(zip(asked, results[count:], strict=True)))
    wrong = _wrong_gradients(case, truth, aligned)
    if not wrong and runnable is True:
        wrong = _wrong_forward(case, truth, results[:count])
    return replace(about, outcome=FAILED, reason=wrong) if wrong else about


def _forward(case: Case) -> bool | str:
    """Whether stock onnxruntime gives the expected outputs, or why it does not run the case."""
    try:
        results = session(case.model, list(case.outputs))(case.inputs)
    except Exception as error:
        return f"not runnable in stock onnxruntime: {first_line(error)}"
    return agrees(case, results, slack=2.0)


def _refusal(error: Exception) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines()]
    return " | ".join(lines[:2])[:240]


def _feeds(case: Case, truth: Differences, model, cotangents: dict) -> dict[str, np.ndarray]:
    """What the gradient model takes; by the contract cotangents follow the model's own inputs."""
    names = [value.name for value in model.graph.input]
    own = len(names) - len(case.outputs)
    feeds = {name: truth.feeds[name] for name in names[:own]}
    for name, output in zip(names[own:], case.outputs, strict=True):
        feeds[name] = np.asarray(cotangents[output]).astype(case.expected[output].dtype)
    return feeds


def _wrong_gradients(case: Case, truth: Differences, gradients: dict) -> str:
    for name, derivative in truth.derivatives.items():
        gradient = np.asarray(gradients[name])
        if gradient.shape != truth.feeds[name].shape:
            return f"gradient of {name} has shape {list(gradient.shape)}"
        if gradient.dtype != truth.feeds[name].dtype:
            return f"gradient of {name} is {gradient.dtype}"
        got = float(np.sum(gradient.astype(np.float64) * truth.directions[name]))
        allowed = (_precision(case) + derivative.tolerance) * derivative.size
        allowed += 1e-3 * _precision(case) + 1e-9
        if not abs(got - derivative.value) <= allowed:
            return f"gradient of {name}: {got:.6g}, difference {derivative.value:.6g}"
    return ""


def _wrong_forward(case: Case, truth: Differences, results: list[np.ndarray]) -> str:
    names = [value.name for value in case.proto().graph.output]
    ours = dict(zip(names, results, strict=True))
    for name, wanted in zip(case.outputs, truth.forward, strict=True):
        got = np.asarray(ours[name]).astype(np.float64)
        finite = np.abs(wanted[np.isfinite(wanted)])
        rtol = 2 * _precision(case)
        atol = rtol * 1e-2 * max(1.0, float(finite.max()) if finite.size else 0.0)
        if got.shape != wanted.shape or not np.allclose(got, wanted, rtol, atol, equal_nan=True):
            return f"output {name} is not the model's"
    return ""


def _precision(case: Case) -> float:
    arrays = [case.inputs[n] for n in case.wrt] + [case.expected[n] for n in case.outputs]
    return max(_PRECISION[a.dtype.name] for a in arrays)


def compare_twin(own: Verdict, twin: Verdict) -> Verdict:
    """The twin's verdict, failed if its gradients are not those of the operator itself."""
    if not own.gradients or own.moved != twin.moved or twin.outcome != PASSED:
        return twin
    for name in own.gradients.keys() & twin.gradients.keys():
        a = own.gradients[name].astype(np.float64)
        b = twin.gradients[name].astype(np.float64)
        scale = float(np.max(np.abs(a), initial=0.0))
        allowed = _PRECISION[own.gradients[name].dtype.name] * max(scale, 1e-3)
        if a.shape != b.shape or not np.all(np.abs(a - b) <= allowed):
            reason = f"gradient of {name} is not that of {own.name}"
            return replace(twin, outcome=FAILED, reason=reason)
    return twin
