"""Runs cases in worker processes: `python -m tests.node_cases [--op NAME] [--jobs N] [--write]`."""

import argparse
import multiprocessing
import os
from collections.abc import Iterable, Sequence
from itertools import groupby

from tests.node_cases import report
from tests.node_cases.cases import Case, load_cases
from tests.node_cases.check import ERROR, FAILED, PASSED, REFUSED, SKIPPED, Verdict, check_group
from tests.node_cases.exceptions import compare, load_exceptions, save_exceptions


def groups(cases: Iterable[Case]) -> list[list[Case]]:
    """Cases with the bodies that belong to them, in name order."""
    ordered = sorted(cases, key=lambda case: (case.base, case.name))
    return [list(group) for _, group in groupby(ordered, key=lambda case: case.base)]


def verdicts(cases: Sequence[Case], jobs: int = 1) -> list[Verdict]:
    """The verdict on every case, in name order, whatever the number of processes."""
    work = groups(cases)
    if jobs <= 1:
        checked = [check_group(group) for group in work]
    else:
        context = multiprocessing.get_context("spawn")
        with context.Pool(jobs, initializer=_quiet) as pool:
            checked = pool.map(check_group, work, chunksize=4)
    return sorted((v for group in checked for v in group), key=lambda v: v.name)


def _quiet() -> None:
    import warnings

    warnings.simplefilter("ignore")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what the arguments choose; 0 if nothing contradicts the exception list."""
    parser = argparse.ArgumentParser(prog="python -m tests.node_cases", description=__doc__)
    parser.add_argument("--op", help="only the cases of this operator")
    parser.add_argument("--case", help="only cases whose name contains this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--all", action="store_true", help="print skipped cases as well")
    parser.add_argument("--write", action="store_true", help="write docs/ops.md")
    parser.add_argument(
        "--write-exceptions", action="store_true", help="rewrite the exception list"
    )
    chosen = parser.parse_args(arguments)
    _quiet()
    cases = load_cases()
    some = bool(chosen.op or chosen.case)
    if chosen.op:
        cases = [case for case in cases if case.op == chosen.op]
    if chosen.case:
        cases = [case for case in cases if chosen.case in case.name]
    checked = verdicts(cases, chosen.jobs)
    shown = (FAILED, ERROR, REFUSED) + ((SKIPPED, PASSED) if chosen.all else ())
    for verdict in checked:
        if verdict.outcome in shown:
            print(f"{verdict.outcome:8}{verdict.name} [{verdict.op}] {verdict.reason}")
    print(report.counts(checked))
    if chosen.write_exceptions and not some:
        save_exceptions(checked)
    if chosen.write and not some:
        print(f"wrote {report.write(checked)}")
    problems = compare(checked, load_exceptions())
    print(f"{len(problems)} contradict the exception list")
    return 1 if problems else 0
