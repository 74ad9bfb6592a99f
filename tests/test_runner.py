"""`make test` retries timeouts and lost connections, lists these tests as flaky, and no others."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TESTS = {
    "test_machine.py": """
        import subprocess
        TRIES = []

        def test_late():
            TRIES.append(1)
            if len(TRIES) == 1:
                raise subprocess.TimeoutExpired("training", 7)

        def test_never():
            raise ConnectionResetError("peer is gone")
    """,
    "test_values.py": """
        TRIES = []

        def test_off():
            TRIES.append(1)
            try:
                raise TimeoutError("not what failed")
            except TimeoutError:
                assert len(TRIES) == 2, "TimeoutError: off by 1e-3"
    """,
    "test_crash.py": """
        import os

        def test_ends_its_worker():
            os._exit(3)

        def test_after():
            pass
    """,
}


def retry() -> list[str]:
    """Return the options for retries that the Makefile gives pytest."""
    (line,) = re.findall(r"^RETRY := (.*)$", (ROOT / "Makefile").read_text("utf-8"), re.M)
    return shlex.split(line)


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("runner")
    (folder / "conftest.py").write_bytes((ROOT / "tests" / "conftest.py").read_bytes())
    for name, text in TESTS.items():
        (folder / name).write_text(re.sub(r"^ {8}", "", text, flags=re.M), "utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", *retry()]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


def test_what_the_machine_failed_is_retried_and_listed(output: str) -> None:
    flaky = output.partition("flaky: failed, then passed")[2]
    assert "FLAKY test_machine.py::test_late" in flaky
    assert "TimeoutExpired: Command 'training' timed out after 7 seconds" in flaky
    assert flaky.count("FLAKY") == 1


def test_values_and_crashes_are_not_retried(output: str) -> None:
    failed = set(re.findall(r"^FAILED (\S+)", output, re.M))
    assert failed == {
        *("test_machine.py::test_never", "test_values.py::test_off"),
        "test_crash.py::test_ends_its_worker",
    }
    last = output.splitlines()[-1]
    assert re.match(r"3 failed, 2 passed, 2 rerun in ", last), last
