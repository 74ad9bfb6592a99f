"""The table of docs/ops.md."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

import onnx
import onnxruntime

from onnxtrain.autodiff.audit import EVIDENCE, audit, to_markdown
from onnxtrain.autodiff.explain import operators
from tests.node_cases.cases import base_name
from tests.node_cases.check import ERROR, FAILED, PASSED, REFUSED, SKIPPED, Verdict

PATH = Path(__file__).parents[2] / "docs" / "ops.md"
README = Path(__file__).parents[2] / "README.md"
_OUTCOMES = (PASSED, FAILED, REFUSED, ERROR, SKIPPED)
AUDIT = Path(__file__).parents[2] / "docs" / "differentiability.md"
_DOMAINS = ("ai.onnx", "ai.onnx.preview", "ai.onnx.preview.training")
_INTRODUCTION = """# Gradients of ONNX's own node tests

{summary}

Every backend node case of onnx with a float input and a float output is differentiated by
`onnxtrain.vjp` with respect to all its float inputs, run on stock onnxruntime, and compared with
central finite differences along a random direction, input by input. The differences are taken in
float64 (onnx's reference evaluator, else onnxruntime) or, where neither has the operator, in
float32. A difference counts as stable when halving the step changes nothing and both one-sided
differences agree; a case whose data lie on a kink or a tie is tested at a point nearby. The
function bodies of operators (`_expanded`) must also have the gradients of the operator itself,
element by element. They are not cases of their own: the column *bodies* counts them.

*passed*: the gradient equals the difference. *failed*: it differs. *refused*: onnxtrain reports
that it cannot differentiate this. *error*: anything else. *skipped*: no difference is stable,
or stock onnxruntime runs neither the case nor its gradient. Cases of opset 27 and 28 are
differentiated as they are.

This page is made by `python -m tests.node_cases --write`, here with {versions}.
"""


def versions() -> str:
    """What the numbers of the page depend on, besides onnxtrain."""
    return f"onnx {onnx.__version__} and onnxruntime {onnxruntime.__version__}"


def is_body(verdict: Verdict) -> bool:
    """Whether the case is the function body of another one (`_expanded`)."""
    return base_name(verdict.name) != verdict.name


def counts(verdicts: Sequence[Verdict]) -> str:
    """One sentence with the totals; function bodies of other cases are counted apart."""
    own = [v for v in verdicts if not is_body(v)]
    bodies = [v for v in verdicts if is_body(v)]
    total = Counter(v.outcome for v in own)
    stable = sum(v.stable for v in own)
    share = 100.0 * total[PASSED] / stable if stable else 0.0
    return (
        f"{len(own)} cases of {len({v.op for v in own})} operators: "
        f"{stable} have a stable difference, of which {total[PASSED]} passed ({share:.1f} %), "
        f"{total[FAILED]} failed, {total[REFUSED]} refused, {total[ERROR]} error; "
        f"{total[SKIPPED]} skipped. Of {sum(v.stable for v in bodies)} function bodies of these "
        f"cases, {sum(v.outcome == PASSED for v in bodies)} passed."
    )


def write(verdicts: Sequence[Verdict]) -> Path:
    """Writes docs/ops.md and the counts of the README; gives the path of the page."""
    PATH.parent.mkdir(exist_ok=True)
    PATH.write_text(text(verdicts), encoding="utf-8")
    README.write_text(readme(README.read_text(encoding="utf-8"), PATH.read_text()))
    EVIDENCE.write_text(evidence(verdicts), encoding="utf-8")
    AUDIT.write_text(to_markdown(audit()), encoding="utf-8")
    return PATH


def evidence(verdicts: Sequence[Verdict]) -> str:
    """How many cases move with each input of an operator, and how many do not, as JSON."""
    found: dict[str, dict[str, list[int]]] = {}
    for v in verdicts:
        for name, nonzero in v.measured.items():
            found.setdefault(v.op, {}).setdefault(name, [0, 0])[0 if nonzero else 1] += 1
    lines = [f"  {json.dumps(op)}: {json.dumps(found[op], sort_keys=True)}" for op in sorted(found)]
    return "{\n" + ",\n".join(lines) + "\n}\n"


_START, _END = "<!-- counts, by `make ops` -->", "<!-- end of counts -->"


def readme(old: str, page: str) -> str:
    """The README with the counts of the page: its line of totals."""
    found = re.search(
        r"^(\d+) cases of (\d+) operators: (\d+) have a stable difference, of which (\d+) passed",
        page,
        re.MULTILINE,
    )
    assert found is not None, "no line of totals"
    cases, names, stable, passed = found.groups()
    reports = [o for d in _DOMAINS for o in operators(d)]
    gradients = sum(o.how in ("rule", "decomposed", "body") for o in reports)
    sentence = (
        f"All {len(reports)} operators of ONNX up to opset {onnx.defs.onnx_opset_version()} are "
        f"answered ([list](docs/ops.md)): {gradients} are differentiated,\nthe others have a "
        f"declared zero gradient or a stated reason why they have none. Of ONNX's own {cases} "
        f"float test cases of {names}\noperators, {stable} have a stable difference; gradients of "
        f"{passed} equal it."
    )
    return re.sub(
        f"{re.escape(_START)}.*?{re.escape(_END)}",
        lambda _: f"{_START}\n{sentence}\n{_END}",
        old,
        flags=re.DOTALL,
    )


def text(verdicts: Sequence[Verdict]) -> str:
    """The page: the totals, a line per operator, and every case that did not pass."""
    lines = [_INTRODUCTION.format(summary=counts(verdicts), versions=versions())]
    lines += [
        "| operator | cases | stable | passed | failed | refused | error | skipped | bodies |"
    ]
    lines += ["|---|---|---|---|---|---|---|---|---|"]
    by_op = sorted(verdicts, key=lambda v: (v.op, v.name))
    for op, group in groupby(by_op, key=lambda v: v.op):
        lines.append(_row(op, list(group)))
    for outcome, title in (
        (FAILED, "Failed"),
        (ERROR, "Errors"),
        (REFUSED, "Refused"),
        (SKIPPED, "Skipped"),
    ):
        some = [v for v in by_op if v.outcome == outcome]
        if some:
            lines += ["", f"## {title}", "", *_reasons(some)]
    remarked = [v for v in by_op if v.outcome == PASSED and v.remarks]
    if remarked:
        lines += ["", "## Passed, with a remark", ""]
        lines += _reasons(remarked, lambda v: "; ".join(v.remarks))
    left_out = [v for v in by_op if v.outcome == PASSED and v.left_out]
    if left_out:
        lines += ["", "## Passed, some inputs left out", ""]
        lines += ["These inputs have no derivative to compare with at the case's point.", ""]
        lines += _reasons(left_out, lambda v: "; ".join(_left_out(v)))
    return "\n".join(lines) + "\n"


def _left_out(verdict: Verdict) -> list[str]:
    return [f"{name}: {why.split(':')[0]}" for name, why in sorted(verdict.left_out.items())]


def _row(op: str, checked: list[Verdict]) -> str:
    bodies = [v for v in checked if is_body(v)]
    verdicts = [v for v in checked if not is_body(v)]
    total = Counter(v.outcome for v in verdicts)
    why = Counter(v.reason.split(":")[0] for v in verdicts if v.outcome == SKIPPED)
    skipped = ", ".join(f"{n} {reason}" for reason, n in sorted(why.items()))
    cells = [op, len(verdicts), sum(v.stable for v in verdicts)]
    cells += [total[PASSED], total[FAILED] or "", total[REFUSED] or "", total[ERROR] or "", skipped]
    cells.append(f"{sum(v.outcome == PASSED for v in bodies)} of {len(bodies)}" if bodies else "")
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def _reasons(verdicts: Iterable[Verdict], reason=lambda v: v.reason) -> list[str]:
    """One line per reason, with the cases it holds for."""
    by_reason: dict[tuple[str, str], list[str]] = {}
    for v in verdicts:
        by_reason.setdefault((v.op, reason(v)), []).append(v.name.removeprefix("test_"))
    return [
        f"- **{op}**, {_plain(why)}: {', '.join(sorted(names))}"
        for (op, why), names in sorted(by_reason.items())
    ]


def _plain(text: str) -> str:
    return text.replace("|", "/").replace("<", "&lt;").replace("*", "\\*")
