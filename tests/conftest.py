"""How pytest distributes these tests over workers, and how it reports flaky ones."""

from __future__ import annotations

import os
import re
from collections.abc import Generator
from typing import Any

import pytest

os.environ["ONNXTRAIN_CACHE"] = "0"  # tests replace what a cached build depends on

# These files take longest. They start first, so that no worker is left alone with one at the end.
# `make test` prints the slowest tests; update the list from there.
LONGEST_FILES = (
    "tests/flower/test_flower.py",
    "tests/docs/test_pages.py",
    "tests/adapters/test_peft.py",
    "tests/lowering/test_style_transfer.py",
    "tests/cpp/test_languages.py",
    "tests/cpp/test_arm64.py",
    "tests/zoo/test_zoo.py",
    "tests/zoo/test_second_order.py",
    "tests/finetuning/test_demo.py",
    "tests/wild/test_wild.py",
    "tests/lowering/test_onnxjs.py",
    "tests/lowering/test_zoo.py",
    "tests/torch/test_zoo.py",
    "tests/optimize/test_linear_layers.py",
    "tests/autodiff/test_recompute.py",
    "tests/finetuning/test_finetune.py",
)
OP_CASE = re.compile(r"tests/test_op_cases\.py::\w+\[(.+)\]")


def work_unit(nodeid: str) -> str:
    """Return the name of the tests that share a worker: a file, or all checks of one op case.

    Exported nets, built artifacts and gradient models are cached per process. A file that two
    workers share would build them twice.
    """
    case = OP_CASE.fullmatch(nodeid)
    return f"op case {case[1]}" if case else nodeid.partition("::")[0]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move the longest files to the front; the rest keeps its (random) order."""
    first = {path: i for i, path in enumerate(LONGEST_FILES)}
    items.sort(key=lambda item: first.get(work_unit(item.nodeid), len(first)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Return a scheduler like that of ``--dist loadfile``, for units of work in our order."""
    from xdist.scheduler import LoadScopeScheduling

    class WorkUnitScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return work_unit(nodeid)

        # In xdist 3.8 a test that ended its worker runs again, finished units are distributed
        # again, and a replaced worker that gets a single test waits forever for the next one.
        def remove_node(self, node: Any) -> str | None:
            units = self.assigned_work.pop(node)
            left = [nodeid for unit in units.values() for nodeid, done in unit.items() if not done]
            for nodeid in left[1:]:
                self.workqueue.setdefault(work_unit(nodeid), {})[nodeid] = False
            for other in self.nodes:
                self._reschedule(other)
            return left[0] if left else None

        def _reschedule(self, node: Any) -> None:
            if node.shutting_down or node not in self.registered_collections:
                return
            while self.workqueue and self._pending_of(self.assigned_work[node]) <= 2:
                self._assign_work_unit(node)
            if not self.workqueue:
                node.shutdown()

    config.option.loadscopereorder = False
    return WorkUnitScheduling(config, log)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: Any) -> Generator[None]:
    """List the tests that failed and then passed, each with its first failure."""
    yield
    stats = terminalreporter.stats
    failed = {report.nodeid for key in ("failed", "error") for report in stats.get(key, [])}
    flaky = [report for report in stats.get("rerun", []) if report.nodeid not in failed]
    if flaky:
        terminalreporter.section("flaky: failed, then passed")
    for report in flaky:
        terminalreporter.line(f"FLAKY {report.nodeid}", yellow=True)
        terminalreporter.line(report.longreprtext)
