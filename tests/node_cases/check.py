"""The verdict on one case: our gradient, run on stock onnxruntime, against a finite difference."""

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import onnx
import onnx_ir as ir

import onnxtrain
from onnxtrain.errors import OnnxTrainError, UndifferentiableError
from tests.node_cases.cases import NEWEST_OPSET, Case
from tests.node_cases.differences import Differences, UnstableError, differences, first_line
from tests.node_cases.engines import agrees, double_engines, session

PASSED, FAILED, REFUSED, ERROR, SKIPPED = "passed", "failed", "refused", "error", "skipped"
# Of the terms' size: what a gradient of this precision may be off by.
_PRECISION = {"float64": 1e-5, "float32": 1e-3, "float16": 2e-2, "bfloat16": 1e-1}
_SECONDS = 60


@dataclass(frozen=True)
class Verdict:
    """What came of one case, why if it is not 'passed', and remarks if it is."""

    name: str
    op: str
    outcome: str
    reason: str = ""
    stable: bool = False
    engine: str = ""
    moved: int = 0
    left_out: dict[str, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    gradients: dict[str, np.ndarray] = field(default_factory=dict)
    measured: dict[str, bool] = field(default_factory=dict)
    """For each input of the operator with a stable difference: whether it is not zero."""


class _TooLongError(BaseException):
    """Not an Exception: nothing but the time keeper may catch it."""


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


@np.errstate(all="ignore")
def check(case: Case) -> Verdict:
    """Return the verdict on one case."""
    try:
        truth = differences(case)
    except UnstableError as error:
        return Verdict(case.name, case.op, SKIPPED, str(error))
    return replace(_judge(case, truth), measured=_measured(case, truth))


def _measured(case: Case, truth: Differences) -> dict[str, bool]:
    """Whether the outputs move with each formal input of the case's only node."""
    nodes = case.proto().graph.node
    if len(nodes) != 1 or case.is_twin:
        return {}
    version = next(o.version for o in case.proto().opset_import if o.domain == nodes[0].domain)
    formals = onnx.defs.get_schema(nodes[0].op_type, version, nodes[0].domain).inputs
    last = len(formals) - 1
    names = {x: formals[min(i, last)].name for i, x in enumerate(nodes[0].input) if x}
    moved: dict[str, bool] = {}
    for x, derivative in truth.derivatives.items():
        nonzero = abs(derivative.value) > derivative.tolerance * derivative.size + 1e-9
        moved[names[x]] = moved.get(names[x], False) or nonzero
    return moved


def _judge(case: Case, truth: Differences) -> Verdict:
    runs, why = _forward(case)
    deviates = runs is not None and not agrees(case, runs)
    verdict = _attempt(case, case.proto(), truth, in_double=not deviates)
    if verdict.outcome == REFUSED and len(truth.derivatives) > 1:
        verdict = _without_refused_inputs(case, truth, verdict)
    if verdict.reason.startswith("refused") and (integers := _integer_inputs(case)):
        # Real models have axes, pads and the like as constants; node cases pass them in.
        bound = _attempt(case, _bind(case, integers), truth)
        if bound.outcome in (PASSED, FAILED):
            verdict = replace(bound, remarks=(f"with {', '.join(integers)} constant",))
    if verdict.outcome == FAILED and deviates:
        try:
            actual = _attempt(case, case.proto(), differences(case, of_runtime=True))
        except UnstableError:
            actual = verdict
        if actual.outcome == PASSED:
            remark = "the gradient of what onnxruntime computes, which is not what onnx expects"
            verdict = replace(actual, remarks=(remark,))
    if (
        verdict.outcome in (REFUSED, ERROR)
        and runs is None
        and verdict.reason.startswith(_EXPECTED)
    ):
        return replace(verdict, outcome=SKIPPED, reason=why, stable=False)
    return verdict


_EXPECTED = ("refused", "run")


def _without_refused_inputs(case: Case, truth: Differences, refused: Verdict) -> Verdict:
    """The verdict on the inputs that can be had; 'passed' only if the standard denies the rest."""
    kept = {}
    for name, derivative in truth.derivatives.items():
        try:
            onnxtrain.vjp(case.proto(), wrt=[name], outputs=list(case.outputs))
        except OnnxTrainError:
            continue
        kept[name] = derivative
    if not kept:
        return refused
    verdict = _attempt(case, case.proto(), replace(truth, derivatives=kept))
    denied = sorted(truth.derivatives.keys() - kept.keys())
    if verdict.outcome != PASSED:
        return verdict
    if not case.standard_says_no.issuperset(denied):
        passed = f"{', '.join(kept)} passed, but {', '.join(denied)}"
        return replace(refused, reason=f"{passed} {refused.reason}")
    remark = f"{', '.join(denied)} refused, and not differentiable by the standard"
    return replace(verdict, remarks=(remark,))


def _forward(case: Case) -> tuple[list[np.ndarray] | None, str]:
    """What stock onnxruntime computes for the case, or why it does not run it."""
    try:
        return session(case.model, list(case.outputs))(case.inputs), ""
    except Exception as error:
        blocked = [note for note in case.notes if note.endswith(f"opset {NEWEST_OPSET}")]
        reason = blocked[0] if blocked else _plain(error)
        return None, f"not runnable in stock onnxruntime: {reason}"


def _attempt(
    case: Case, model: onnx.ModelProto, truth: Differences, *, in_double: bool = True
) -> Verdict:
    """The verdict on the gradient model of `model`; `in_double`: float64 may stand in for it."""
    asked = tuple(truth.derivatives)
    about = Verdict(case.name, case.op, PASSED, "", True, truth.engine, truth.moved, truth.left_out)
    try:
        vjp = onnxtrain.vjp(model, wrt=list(asked), outputs=list(case.outputs))
    except UndifferentiableError as error:
        return replace(about, outcome=REFUSED, reason=f"refused: {_lines(error)}")
    except OnnxTrainError as error:
        return replace(about, outcome=ERROR, reason=f"refused: {first_line(error)}")
    except Exception as error:
        return replace(about, outcome=ERROR, reason=f"vjp: {first_line(error)}")
    try:
        run = session(vjp.SerializeToString(), optimize=True)
        results = run(_feeds(case, truth, vjp, truth.cotangents))
        wrong = _wrong_gradients(case, truth, vjp, run, _precision(case))
    except Exception as error:
        return replace(about, outcome=ERROR, reason=f"run: {first_line(error)}")
    count = len(results) - len(asked)
    about = replace(about, gradients=dict(zip(asked, results[count:], strict=True)))
    if wrong and in_double and _right_in_double(case, truth, vjp):
        about = replace(about, remarks=("in float64; the case's own precision is too low",))
        wrong = ""
    if not wrong and not truth.moved:
        wrong = _wrong_forward(case, truth, results[:count])
    return replace(about, outcome=FAILED, reason=wrong) if wrong else about


def _plain(error: Exception) -> str:
    """What onnxruntime says, without its codes and the places in its source."""
    text = re.sub(r"\[ONNXRuntimeError\] : \d+ : \w+ : ", "", str(error).strip())
    text = re.sub(r"/onnxruntime_src/\S+ .*?(?=was false|must|$)", "", text.splitlines()[0])
    return text.replace(" with name ''", "")[:160]


def _lines(error: Exception) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines()]
    return " | ".join(lines[:2])[:240]


def _integer_inputs(case: Case) -> list[str]:
    return [name for name in case.inputs if case.inputs[name].dtype.kind in "iu"]


def _bind(case: Case, names: list[str]) -> onnx.ModelProto:
    """The case's model with some inputs as constants."""
    model = case.proto()
    kept = [value for value in model.graph.input if value.name not in names]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    for name in names:
        tensor = ir.to_proto(ir.tensor(case.inputs[name], name=name))
        model.graph.initializer.append(tensor)
    return model


def _feeds(case: Case, truth: Differences, vjp, cotangents: dict) -> dict[str, np.ndarray]:
    """What the gradient model takes; by the contract cotangents follow the model's own inputs."""
    names = [value.name for value in vjp.graph.input]
    own = len(names) - len(case.outputs)
    feeds = {name: truth.feeds[name] for name in names[:own]}
    for name, output in zip(names[own:], case.outputs, strict=True):
        feeds[name] = np.asarray(cotangents[output]).astype(case.expected[output].dtype)
    return feeds


def _wrong_gradients(case: Case, truth: Differences, vjp, run, precision: float) -> str:
    """What is wrong with the gradient model, by the differences, or nothing."""
    own = len(vjp.graph.output) - len(truth.derivatives)
    for index, (name, derivative) in enumerate(truth.derivatives.items()):
        gradient = np.asarray(run(_feeds(case, truth, vjp, derivative.cotangents))[own + index])
        if gradient.shape != truth.feeds[name].shape:
            return f"gradient of {name} has shape {list(gradient.shape)}"
        if precision > 1e-5 and gradient.dtype != truth.feeds[name].dtype:
            return f"gradient of {name} is {gradient.dtype}"
        got = float(np.sum(gradient.astype(np.float64) * truth.directions[name]))
        allowed = (precision + derivative.tolerance) * derivative.size + 1e-3 * precision + 1e-9
        if not abs(got - derivative.value) <= allowed:
            return f"gradient of {name}: {got:.6g}, difference {derivative.value:.6g}"
    return ""


def _right_in_double(case: Case, truth: Differences, vjp) -> bool:
    """Whether the same gradient graph, with its floats widened, meets the double's tolerance."""
    for make in double_engines(vjp):
        try:
            if not _wrong_gradients(case, truth, vjp, make(), _PRECISION["float64"]):
                return True
        except Exception:  # no such kernel: the next engine may have it
            continue
    return False


def _wrong_forward(case: Case, truth: Differences, results: list[np.ndarray]) -> str:
    """Which of the gradient model's own outputs is not the case's; only where onnxruntime's is."""
    runs, _ = _forward(case)
    if runs is None or not agrees(case, runs, slack=2.0):
        return ""
    names = [value.name for value in case.proto().graph.output]
    ours = dict(zip(names, results, strict=True))
    if agrees(case, [ours[name] for name in case.outputs], slack=2.0):
        return ""
    return "the gradient model's own outputs are not the case's"


def _precision(case: Case) -> float:
    arrays = [case.inputs[n] for n in case.wrt] + [case.expected[n] for n in case.outputs]
    return max(_PRECISION[a.dtype.name] for a in arrays)


def compare_twin(own: Verdict, twin: Verdict) -> Verdict:
    """The twin's verdict, failed if its gradients are not those of the operator itself."""
    if own.outcome != PASSED or own.moved != twin.moved or twin.outcome != PASSED:
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
