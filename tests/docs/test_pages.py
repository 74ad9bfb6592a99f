"""Every block of code on every page runs as written, one after another, in an empty folder."""

from __future__ import annotations

import doctest
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import PAGES, ROOT, blocks, needs, text_of
from tests.registries import restore_afterwards

ELSEWHERE = {
    "docs/any-language.md": "tests/cpp/test_page.py",
    "docs/federated.md": "tests/flower",
    "docs/fine-tuning.md": "tests/adapters",
    "docs/wild.md": "tests/wild",
}
"""Pages whose blocks other tests run, in languages and with peers of their own."""
HERE = [page for page in PAGES if page not in ELSEWHERE]


@pytest.mark.parametrize("page", HERE)
def test_blocks_run(page: str, tmp_path: Path) -> None:
    """In a process of its own: pages may register rules and replace modules."""
    missing = [name for name in needs(page) if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"the page needs {', '.join(missing)}, which is not installed")
    if not any(not b.why for b in blocks(page)):
        return
    folders = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-m", "tests.docs.run_page", page],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(folders), "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=1200,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


@pytest.mark.parametrize("page", [p for p in HERE if "\n>>> " in text_of(p)])
def test_examples_in_the_text_give_what_they_show(
    page: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    restore_afterwards(monkeypatch)
    failed, tried = doctest.testfile(str(ROOT / page), module_relative=False)
    assert tried
    assert failed == 0


def test_what_is_not_run_is_counted() -> None:
    """A new block that is not run has to be counted here, so that nobody does it unseen."""
    left = [b for page in HERE for b in blocks(page) if b.why]
    counts = {kind: sum(b.kind == kind for b in left) for kind in sorted({b.kind for b in left})}
    assert counts == NOT_RUN
    assert all(len(b.why) > 10 for b in left)


NOT_RUN = {"html": 1, "js": 4, "python": 4, "sh": 18, "ts": 3}


def test_pages_that_others_test_name_a_test_that_is_there() -> None:
    missing = {
        page: test
        for page, test in ELSEWHERE.items()
        if (ROOT / page).exists() and not (ROOT / test).exists()
    }
    assert missing == {}


def test_a_block_is_found_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fenced = "<!-- not run: it costs money -->\n```sh\npay\n```\n\n"
    page = fenced + "- b\n\n  ```python\n  x = 1\n  ```\n\n```\nout\n```\n"
    (tmp_path / "a.md").write_text(page)
    monkeypatch.setattr("tests.docs.blocks.ROOT", tmp_path)
    first, second = blocks("a.md")
    assert (first.kind, first.code, first.why) == ("sh", "pay\n", "it costs money")
    assert (second.kind, second.code, second.why) == ("python", "x = 1\n", "")
