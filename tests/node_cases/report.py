"""The table of docs/ops.md."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

import onnx
import onnxruntime

from tests.node_cases.check import ERROR, FAILED, PASSED, REFUSED, SKIPPED, Verdict

PATH = Path(__file__).parents[2] / "docs" / "ops.md"
_INTRODUCTION = """# Gradients of ONNX's own node tests

{summary}

Every backend node case of onnx with a float input and a float output is differentiated by
`onnxtrain.vjp` with respect to all its float inputs, run on stock onnxruntime, and compared with
central finite differences along a random direction, input by input. The differences are taken in
float64 (onnx's reference evaluator, else onnxruntime) or, where neither has the operator, in
float32. A difference counts as stable when halving the step changes nothing and both one-sided
differences agree; a case whose data lie on a kink or a tie is tested at a point nearby. The
function bodies of operators (`_expanded`) must also have the gradients of the operator itself,
element by element.

*passed*: the gradient equals the difference. *failed*: it differs. *refused*: onnxtrain reports
that it cannot differentiate this. *error*: anything else. *skipped*: no difference is stable,
or stock onnxruntime runs neither the case nor its gradient. Stamps above opset 26 are read as 26.

This page is made by `python -m tests.node_cases --write`, here with {versions}.
"""


def versions() -> str:
    """What the numbers of the page depend on, besides onnxtrain."""
    return f"onnx {onnx.__version__} and onnxruntime {onnxruntime.__version__}"


def counts(verdicts: Sequence[Verdict]) -> str:
    """One sentence with the totals."""
    total = Counter(v.outcome for v in verdicts)
    stable = sum(v.stable for v in verdicts)
    share = 100.0 * total[PASSED] / stable if stable else 0.0
    return (
        f"{len(verdicts)} cases of {len({v.op for v in verdicts})} operators: "
        f"{stable} have a stable difference, of which {total[PASSED]} passed ({share:.1f} %), "
        f"{total[FAILED]} failed, {total[REFUSED]} refused, {total[ERROR]} error; "
        f"{total[SKIPPED]} skipped."
    )


def write(verdicts: Sequence[Verdict]) -> Path:
    """Writes docs/ops.md and gives its path."""
    PATH.parent.mkdir(exist_ok=True)
    PATH.write_text(text(verdicts), encoding="utf-8")
    return PATH


def text(verdicts: Sequence[Verdict]) -> str:
    """The page: the totals, a line per operator, and every case that did not pass."""
    lines = [_INTRODUCTION.format(summary=counts(verdicts), versions=versions())]
    lines += ["| operator | cases | stable | passed | failed | refused | error | skipped |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
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


def _row(op: str, verdicts: list[Verdict]) -> str:
    total = Counter(v.outcome for v in verdicts)
    why = Counter(v.reason.split(":")[0] for v in verdicts if v.outcome == SKIPPED)
    skipped = ", ".join(f"{n} {reason}" for reason, n in sorted(why.items()))
    cells = [op, len(verdicts), sum(v.stable for v in verdicts)]
    cells += [total[PASSED], total[FAILED] or "", total[REFUSED] or "", total[ERROR] or "", skipped]
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
