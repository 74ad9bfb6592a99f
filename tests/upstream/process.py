"""Run a program or a test file of another project in a process of its own."""

from __future__ import annotations

import importlib
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.upstream.results import Outcome, Result

ROOT = Path(__file__).parents[2]
LONGEST = 200
"""Letters of a reason."""


def run_script(
    project: str,
    path: Path,
    *,
    how: str,
    setup: str | None = None,
    arguments: Sequence[str] = (),
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    timeout: float = 600,
) -> Result:
    """Run a Python program; it passes if it ends without an exception.

    Args:
        project: name of the project.
        path: the program.
        how: see :class:`Result`.
        setup: ``module:function`` to call in the process before the program runs.
        arguments: of the program.
        folder: the working directory; an empty folder by default.
        environment: variables to set.
        timeout: in seconds.
    """
    command = ["script", setup or "", str(path), *arguments]
    with tempfile.TemporaryDirectory() as empty:
        done = _run(command, folder or Path(empty), environment, timeout)
    if done is None:
        return Result(project, path.name, "fail", f"still runs after {timeout:.0f} s", how)
    if done.returncode:
        return Result(project, path.name, "fail", _last_error(done.stderr), how)
    return Result(project, path.name, "pass", how=how)


def run_tests(
    project: str,
    paths: Sequence[Path],
    *,
    how: str,
    setup: str | None = None,
    options: Sequence[str] = (),
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    timeout: float = 1800,
) -> list[Result]:
    """Run test files under pytest; a file that cannot be imported is one failure.

    Args:
        project: name of the project.
        paths: the files; each runs in its own process.
        how: see :class:`Result`.
        setup: ``module:function`` to call in the process before pytest runs.
        options: of pytest.
        folder: the working directory; an empty folder by default.
        environment: variables to set.
        timeout: in seconds, of one file.
    """
    results: list[Result] = []
    for path in paths:
        with tempfile.TemporaryDirectory() as empty:
            outcomes = Path(empty) / "outcomes.json"
            command = ["tests", setup or "", str(path), str(outcomes), *options]
            done = _run(command, folder or Path(empty), environment, timeout)
            rows = json.loads(outcomes.read_text()) if outcomes.exists() else []
        results += [Result(project, *row, how=how) for row in rows]
        if done is None or not rows:
            why = f"still runs after {timeout:.0f} s" if done is None else _last_error(done.stderr)
            results.append(Result(project, path.name, "fail", why, how))
    return results


def _run(
    command: Sequence[str], folder: Path, environment: Mapping[str, str] | None, timeout: float
) -> subprocess.CompletedProcess[str] | None:
    given = dict(environment or {})
    paths = [str(ROOT / "src"), str(ROOT), given.pop("PYTHONPATH", "")]
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*filter(None, paths), os.environ.get("PYTHONPATH", "")]),
        "MPLBACKEND": "Agg",
        "PYTHONHASHSEED": "0",
        **given,
    }
    try:
        return subprocess.run(
            [sys.executable, "-m", "tests.upstream.process", *command],
            cwd=folder,
            env=variables,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        return None


def _last_error(text: str) -> str:
    """Return the line of a traceback that has the error, without folders."""
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [
        n for n, line in enumerate(lines) if re.match(r"[\w.]*(Error|Exception|Exit)\b", line)
    ]
    line = lines[errors[-1]] if errors else (lines or ["no output"])[-1]
    return shorten(line)


def shorten(text: str) -> str:
    """Return the first line of an error, without folders and addresses of one run."""
    line = (text.strip().splitlines() or [""])[0].removeprefix("Skipped: ")
    line = re.sub(r" at 0x[0-9a-fA-F]+", "", line)
    return re.sub(r"/(?:[\w.+@-]+/)+", "", line)[:LONGEST]


class _Outcomes:
    """Pytest plugin: the outcome of each test, and files that cannot be imported."""

    def __init__(self) -> None:
        self.rows: dict[str, tuple[str, Outcome, str]] = {}

    def pytest_collectreport(self, report) -> None:
        if report.failed:
            text = str(report.longrepr)
            self.rows[report.nodeid] = (Path(report.nodeid).name, "fail", _last_collected(text))

    def pytest_runtest_logreport(self, report) -> None:
        name = report.nodeid.rsplit("/", 1)[-1]
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            reason = shorten(crash.message if crash else str(report.longrepr))
            self.rows[name] = (name, "fail", reason)
        elif report.skipped:
            self.rows[name] = (name, "skip", shorten(str(report.longrepr[2])))
        elif report.when == "call":
            self.rows.setdefault(name, (name, "pass", ""))


def _last_collected(text: str) -> str:
    errors = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
    return shorten(errors[-1] if errors else text)


def main(kind: str, setup: str, path: str, *arguments: str) -> int:
    """Prepare this process, then run the program or the tests."""
    if setup:
        module, _, function = setup.partition(":")
        getattr(importlib.import_module(module), function)()
    if kind == "script":
        sys.argv = [path, *arguments]
        sys.path.insert(0, str(Path(path).parent))
        runpy.run_path(path, run_name="__main__")
        return 0
    import pytest

    outcomes, *options = arguments
    plugin = _Outcomes()
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    fixed = ["-q", "-p", "no:cacheprovider", "-W", "ignore"]
    fixed += ["-c", os.devnull, f"--rootdir={Path(path).parent}"]
    pytest.main([*fixed, *options, path], plugins=[plugin])
    Path(outcomes).write_text(json.dumps(list(plugin.rows.values())))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
