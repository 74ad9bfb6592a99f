"""Directional derivatives of a case by central differences, or the reason why it has none.

For each float input separately: <u, (f(x + h v) - f(x - h v)) / 2h>. v is drawn from the case's
name; u as well, but with the signs of the differences, so that no terms cancel and a small error
of the gradient shows. It counts as stable when halving the step changes nothing and both one-sided
differences agree (a kink is symmetric, so central differences alone would not see it). A point on
a kink is left by a small fixed random move.
"""

import hashlib
from dataclasses import dataclass, replace

import numpy as np

from tests.node_cases.cases import Case
from tests.node_cases.engines import ENGINES, Feeds, Function, agrees, session
from tests.node_cases.precision import narrowed

_LARGE = 50_000  # elements: pooling this on the reference evaluator takes ten seconds


@dataclass(frozen=True)
class Derivative:
    """One directional derivative, the cotangents it is for, and the size of its terms."""

    value: float
    size: float
    tolerance: float
    cotangents: dict[str, np.ndarray]


@dataclass(frozen=True)
class Differences:
    """Stable derivatives of a case at one point, by input; what was left out; how it was done."""

    engine: str
    moved: int  # 0: at the case's own data; else which move was made
    feeds: Feeds
    cotangents: dict[str, np.ndarray]
    directions: dict[str, np.ndarray]
    derivatives: dict[str, Derivative]
    left_out: dict[str, str]
    forward: list[np.ndarray]


class UnstableError(Exception):
    """No stable difference; `reason` starts with its category and a colon."""


@np.errstate(all="ignore")  # infinities are some cases' point
def differences(case: Case, *, of_runtime: bool = False) -> Differences:
    """Stable differences by the best engine that has one for some input.

    Args:
        case: the case to take differences of.
        of_runtime: take those of what onnxruntime computes, whatever the case expects.

    Raises:
        UnstableError: with the reason of the most trustworthy engine that got furthest.
    """
    if case.unusable:
        raise UnstableError(case.unusable)
    reasons: list[str] = []
    best: Differences | None = None
    for name, make, step, tolerance in ENGINES:
        if of_runtime and name.startswith("reference"):
            continue
        if name.startswith("reference") and case.elements > _LARGE:
            reasons.append(f"{name}: does not run: takes too long")
            continue
        try:
            run = make(case)
            base = run(case.inputs)
        except Exception as error:  # each engine fails in its own way
            reasons.append(f"{name}: does not run: {first_line(error)}")
            continue
        if not of_runtime and not agrees(case, base):
            again = run(case.inputs)
            same = all(
                np.array_equal(a, b, equal_nan=True) for a, b in zip(base, again, strict=True)
            )
            reasons.append(f"{name}: " + ("not the expected outputs" if same else "random"))
            continue
        if not of_runtime and name.startswith("reference") and _differs_nearby(case, run):
            reasons.append(f"{name}: not the expected outputs near the case's data")
            continue
        measured = _at_points(case, run, name, step, tolerance)
        if measured.derivatives and (best is None or len(measured.left_out) < len(best.left_out)):
            best = measured
        if best is not None and not best.left_out:
            break
        reasons += [f"{name}: {why}" for why in measured.left_out.values()]
    if best is None:
        raise UnstableError(_category(reasons))
    return best


def _differs_nearby(case: Case, run: Function) -> bool:
    """Whether an engine and onnxruntime, both right at the case's data, part beside it.

    A few reference implementations are right only for the data they were tested with.
    """
    feeds = dict(case.inputs)
    for name in case.wrt:
        wide = feeds[name].astype(np.float64)
        near = wide + 0.1 * draw(case, f"near/{name}", wide.shape)
        feeds[name] = np.where(np.isfinite(wide), near, wide).astype(feeds[name].dtype)
    try:
        stock = session(case.model, list(case.outputs))
        if not agrees(case, stock(case.inputs)):
            return False
        pairs = list(zip(run(feeds), stock(feeds), strict=True))
    except Exception:  # nothing to compare with; a step may also leave the domain
        return False
    expected = dict(zip(case.outputs, (np.asarray(b) for _, b in pairs), strict=True))
    return not agrees(replace(case, expected=expected), [a for a, _ in pairs], slack=5.0)


def _category(reasons: list[str]) -> str:
    """One reason out of many: what the engine that got furthest found."""
    bare = [reason.split(": ", 1)[1] for reason in reasons]
    for head in (
        "random",
        "kink",
        "step",
        "integer",
        "not finite",
        "shape",
        "precision",
        "not the expected",
    ):
        for reason in bare:
            if reason.startswith(head):
                return reason if ":" in reason else f"{head}: {reason}"
    return f"not runnable: {bare[-1] if bare else 'no engine'}"


def _at_points(case: Case, run: Function, name: str, step: float, tol: float) -> Differences:
    here = _at(case, run, name, step, tol, dict(case.inputs), moved=0)
    movable = [n for n, why in here.left_out.items() if why.startswith(("kink", "not finite"))]
    if not movable:
        return here
    best = here
    for move in (1, 2):
        feeds = dict(case.inputs)
        for n in case.wrt:
            if n in movable or n in here.derivatives:
                feeds[n] = _moved(case, n, upwards=move == 2)
        there = _at(case, run, name, step, tol, feeds, moved=move)
        same_domain = all(
            a.shape == b.shape and np.array_equal(np.isfinite(a), np.isfinite(b))
            for a, b in zip(here.forward, there.forward, strict=False)
        )
        if same_domain and len(there.derivatives) > len(best.derivatives):
            best = there
    return best


def _at(
    case: Case, run: Function, name: str, step: float, tol: float, feeds: Feeds, *, moved: int
) -> Differences:
    derivatives: dict[str, Derivative] = {}
    left_out: dict[str, str] = {}
    directions: dict[str, np.ndarray] = {}
    cotangents: dict[str, np.ndarray] = {}
    forward: list[np.ndarray] = []
    narrow = set() if name.endswith("float32") else _narrow_inputs(case)
    try:
        forward = [np.asarray(a, dtype=np.float64) for a in run(_wide(case, feeds, name))]
    except Exception as error:
        left_out = {n: f"not runnable: {first_line(error)}" for n in case.wrt}
    else:
        for n, value in zip(case.outputs, forward, strict=True):
            u = np.asarray(draw(case, f"u/{n}", value.shape)).astype(case.expected[n].dtype)
            cotangents[n] = np.where(np.isfinite(value), u.astype(np.float64), 0.0)
        for n in case.wrt:
            v = draw(case, f"v/{n}", feeds[n].shape)
            directions[n] = np.where(np.isfinite(feeds[n].astype(np.float64)), v, 0.0)
            if n in narrow:
                left_out[n] = f"precision: {name} goes through float32"
                continue
            if not feeds[n].size or n in case.discrete:
                left_out[n] = case.discrete.get(n, "zero-size: no element")
                continue
            try:
                derivatives[n] = _derivative(
                    lambda h, n=n: _terms(case, run, name, feeds, n, directions[n], h, forward),
                    cotangents,
                    step,
                    tol,
                )
            except UnstableError as error:
                left_out[n] = str(error)
    return Differences(name, moved, feeds, cotangents, directions, derivatives, left_out, forward)


def _narrow_inputs(case: Case) -> set[str]:
    """Float inputs whose small steps do not survive, even with all else in double."""
    model = case.proto()
    if any(n.domain == "ai.onnx.preview.training" for n in model.graph.node):
        return set(case.wrt)  # onnx's evaluator rounds to float32 there
    narrow = narrowed(model)
    outside = {v.name for v in model.graph.input} | {t.name for t in model.graph.initializer}
    return narrow if narrow <= outside else set(case.wrt)


def _wide(case: Case, feeds: Feeds, engine: str) -> Feeds:
    """Float inputs in double where the engine takes doubles, so that a small step survives."""
    dtype = np.float32 if engine.endswith("float32") else np.float64
    return {n: a.astype(dtype) if n in case.wrt else a for n, a in feeds.items()}


def _terms(case, run, engine, feeds, name, v, h, forward) -> list[np.ndarray]:
    """f(x + h v) - f(x), output by output; positions that are not finite count as unchanged."""
    shifted = dict(_wide(case, feeds, engine))
    wide = np.asarray(shifted[name].astype(np.float64) + h * v)  # numpy makes 0-d sums scalars
    shifted[name] = wide.astype(shifted[name].dtype)
    try:
        results = run(shifted)
    except Exception as error:
        raise UnstableError(
            f"integer: moving {name} makes it invalid: {first_line(error)}"
        ) from None
    terms = []
    for base, result in zip(forward, results, strict=True):
        if base.shape != np.shape(result):
            raise UnstableError(f"shape: moving {name} changes the output's shape")
        finite = np.isfinite(base)
        if not np.all(np.isfinite(np.asarray(result, dtype=np.float64)) == finite):
            raise UnstableError(f"not finite: moving {name} leaves the domain")
        terms.append(np.where(finite, np.asarray(result, dtype=np.float64) - base, 0.0))
    return terms


def _derivative(terms, drawn: dict[str, np.ndarray], step: float, tol: float) -> Derivative:
    """The directional derivative out of f(x + h v) - f(x) at four steps.

    `size` is the sum of the absolute terms: rounding and truncation scale with it.
    """
    values, sizes, bends = [], [], []
    cotangents: list[np.ndarray] = []
    for h in (step, step / 2):
        up, down = terms(h), terms(-h)
        derivatives = [(a - b) / (2 * h) for a, b in zip(up, down, strict=True)]
        cotangents = cotangents or [
            np.where(s == 0, u, np.abs(u) * np.sign(s))
            for u, s in zip(drawn.values(), derivatives, strict=True)
        ]
        values.append(
            sum(float(np.sum(u * s)) for u, s in zip(cotangents, derivatives, strict=True))
        )
        sizes.append(
            sum(float(np.sum(np.abs(u * s))) for u, s in zip(cotangents, derivatives, strict=True))
        )
        bends.append(
            sum(
                float(np.sum(np.abs(u * (a + b)))) / h
                for u, a, b in zip(cotangents, up, down, strict=True)
            )
        )
    size = max(sizes)
    floor = tol * max(size, 1e-3)
    if abs(values[0] - values[1]) > floor:
        raise UnstableError("kink or rounding: halving the step changes the difference")
    # Smooth: the bend shrinks with the step. A kink or a jump keeps it.
    if bends[1] > floor * 10 and bends[1] > 0.7 * bends[0]:
        raise UnstableError("kink: one-sided differences disagree")
    return Derivative(values[1], size, tol, dict(zip(drawn, cotangents, strict=True)))


def _moved(case: Case, name: str, *, upwards: bool) -> np.ndarray:
    x = case.inputs[name]
    wide = x.astype(np.float64)
    noise = draw(case, f"move/{name}", x.shape)
    noise = np.abs(noise) if upwards else noise  # upwards stays in the domain of log, acosh ...
    spread = 0.03 * noise * np.maximum(1.0, np.abs(wide))
    moved = np.where(np.isfinite(wide), wide + spread, wide)
    return moved.astype(x.dtype)


def draw(case: Case, label: str, shape: tuple[int, ...]) -> np.ndarray:
    """Normal numbers that depend on the case's base name and the label only."""
    digest = hashlib.sha256(f"{case.base}/{label}".encode()).digest()
    generator = np.random.default_rng(int.from_bytes(digest[:8], "little"))
    return generator.standard_normal(shape)


def first_line(error: Exception) -> str:
    """The type of an error and the first line it says."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:160]}" if lines else type(error).__name__
