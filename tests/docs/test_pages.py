"""Every block of code on every page runs as written, one after another, in an empty folder."""

from __future__ import annotations

import doctest
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import onnxtrain
from tests.docs import run_page
from tests.docs.blocks import PAGES, ROOT, blocks, needs, text_of
from tests.docs.elsewhere import ELSEWHERE, artifacts_command, left
from tests.registries import restore_afterwards

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
    unrun = [b for page in PAGES for b in blocks(page) if b.why]
    counts = {kind: sum(b.kind == kind for b in unrun) for kind in sorted({b.kind for b in unrun})}
    assert counts == NOT_RUN
    assert all(len(b.why) > 10 for b in unrun)


NOT_RUN = {"csharp": 1, "html": 1, "js": 5, "python": 11, "sh": 23, "swift": 1, "ts": 3}


@pytest.mark.parametrize("page", ELSEWHERE)
def test_every_block_of_other_pages_is_what_a_test_runs(page: str) -> None:
    assert [f"{b.page}, line {b.line}: {b.kind}" for b in left(page)] == []


def test_a_block_that_no_test_takes_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = ELSEWHERE["docs/fine-tuning.md"]()
    monkeypatch.setitem(ELSEWHERE, "docs/fine-tuning.md", lambda: taken[1:])
    assert [b.code for b in left("docs/fine-tuning.md")] == [taken[0]]


def test_the_command_that_every_language_starts_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    onnxtrain.examples.digits_model(tmp_path / "model.onnx")
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    run_page.run(artifacts_command(), {}, tmp_path)
    assert (tmp_path / "artifacts" / "manifest.json").is_file()


def test_a_block_is_found_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fenced = "<!-- not run: it costs money -->\n```sh\npay\n```\n\n"
    page = fenced + "- b\n\n  ```python\n  x = 1\n  ```\n\n```\nout\n```\n"
    (tmp_path / "a.md").write_text(page)
    monkeypatch.setattr("tests.docs.blocks.ROOT", tmp_path)
    first, second = blocks("a.md")
    assert (first.kind, first.code, first.why) == ("sh", "pay\n", "it costs money")
    assert (second.kind, second.code, second.why) == ("python", "x = 1\n", "")
