"""Requirements of a release: one version, a changelog, files for GitHub, working links."""

from __future__ import annotations

import ast
import doctest
import json
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml
from tools import absolute_links, oldest_runtime, package_contents, pins, site_links, version

import onnxtrain

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def test_every_copy_of_the_version_agrees() -> None:
    assert version.differing() == []
    assert version.read(version.SOURCE) == onnxtrain.__version__
    package = json.loads((ROOT / "web/packages/onnxtrain/package.json").read_text())
    assert package["version"] == onnxtrain.__version__


def test_setting_a_version_sets_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path, _ in (version.SOURCE, *version.COPIES):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes((ROOT / path).read_bytes())
    monkeypatch.setattr(version, "ROOT", tmp_path)
    version.write("7.8.9")
    assert version.differing() == []
    assert version.read(version.SOURCE) == "7.8.9"
    json.loads((tmp_path / "web/package-lock.json").read_text())
    with pytest.raises(SystemExit, match="not a version"):
        version.write("next")


def test_the_changelog_has_this_version() -> None:
    assert f"\n## {onnxtrain.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_supported_versions_are_those_that_packages_ask_for() -> None:
    """``make lower-bounds`` and the workflows try them."""
    page = (ROOT / "docs/install.md").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    for bound in (*extras["cpu"], *project["dependencies"][1:2]):
        name, least = bound.split(">=")
        assert f"| {name} | {least} and newer |" in page
    pythons = [c.rsplit(" ", 1)[1] for c in project["classifiers"] if ":: 3." in c]
    assert f"| Python | {pythons[0]} to {pythons[-1]} |" in page
    matrix = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())["jobs"]["python"]
    assert matrix["strategy"]["matrix"]["python"] == pythons
    package = json.loads((ROOT / "web/packages/onnxtrain/package.json").read_text())
    assert package["engines"]["node"] == ">=20"
    assert "| Node | 20 and newer |" in page
    assert set(package["peerDependencies"].values()) == {"*"}  # runtime.ts checks the oldest
    runtime = (ROOT / "web/packages/onnxtrain/src/runtime.ts").read_text()
    assert "OLDEST_RUNTIME = [1, 20]" in runtime
    assert "| onnxruntime-web, onnxruntime-node | 1.20 and newer |" in page
    listed = page.split("| extra |")[1].split("\n\n")[0]
    users = set(extras) - {"dev", "docs"}
    assert [e for e in sorted(users) if f"`{e}`" not in listed] == []


@pytest.mark.parametrize("module", [absolute_links, oldest_runtime, pins])
def test_examples_of_tools(module: object) -> None:
    failed, tried = doctest.testmod(module)  # type: ignore[arg-type]
    assert tried
    assert failed == 0


def test_no_link_of_the_readme_stays_relative() -> None:
    text = absolute_links.absolute((ROOT / "README.md").read_text(), "https://a.org/o/p/blob/v1")
    assert re.findall(r"\]\((?!https://)", text) == []


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda p: p.stem)
def test_workflows_run_targets_that_there_are(path: Path) -> None:
    """Their form is checked against GitHub's schema by ``make release-check``."""
    jobs = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
    commands = [s["run"] for job in jobs.values() for s in job["steps"] if "run" in s]
    targets = {t for c in commands for t in re.findall(r"\bmake ([a-z-]+)", c)}
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert [t for t in targets if not re.search(rf"^{t}:", makefile, re.MULTILINE)] == []
    modules = {m for c in commands for m in re.findall(r"-m (tools\.\w+)", c)}
    assert [m for m in modules if not (ROOT / f"{m.replace('.', '/')}.py").exists()] == []
    assert all("timeout-minutes" in job for job in jobs.values())


def test_nothing_is_published_with_a_password() -> None:
    text = (ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8")
    assert "secrets." not in text
    assert text.count("id-token: write") == 2


def test_missing_files_of_packages_are_noticed(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "README.md").write_text("no dist")
    tarball = tmp_path / "onnxtrain-1.tgz"
    with tarfile.open(tarball, "w:gz") as archive:
        archive.add(tmp_path / "package", "package")
    lines = package_contents.problems("npm", tarball)
    assert f"{tarball.name}: package/dist/index.js is missing" in lines


def test_wrong_metadata_is_noticed(tmp_path: Path) -> None:
    wheel = tmp_path / "onnxtrain-1-py3-none-any.whl"
    lines = ["Name: onnxtrain", "Version: 0.9", "Description-Content-Type: text/markdown"]
    text = "\n".join([*lines, "", "[here](docs/a.md)"])
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("onnxtrain-1.dist-info/METADATA", text)
    assert package_contents.metadata_problems(wheel, "1.0") == [
        "Version is 0.9, not 1.0",
        "License-Expression is None, not Apache-2.0",
        "the description links to docs/a.md, which an index does not have",
    ]


def test_links_of_a_site(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<a href="b.html#x">1</a><a href="c.html">2</a><p id="y">')
    (tmp_path / "b.html").write_text('<a href="a.html#y">3</a><img src="none.png">')
    assert site_links.broken(tmp_path) == [
        "a.html: b.html#x: no such place",
        "a.html: c.html",
        "b.html: none.png",
    ]


def test_a_word_that_the_search_does_not_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = {"docnames": ["a", "b"], "terms": {"lora": 1}, "titleterms": {"csv": [0, 1]}}
    (tmp_path / "searchindex.js").write_text(f"Search.setIndex({json.dumps(index)})")
    monkeypatch.setattr(site_links, "WORDS", {"lora": "a", "csv": "a", "none": "b"})
    assert site_links.unsearchable(tmp_path) == [
        "the search for 'lora' does not lead to a",
        "the search for 'none' does not lead to b",
    ]


def test_the_picture_of_the_data_flow_has_every_stage() -> None:
    code = "from sitegen import data_flow as d; print(d.stages()); print(d.data_flow())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT / "docs", capture_output=True, text=True, check=True
    )
    listed, _, svg = done.stdout.partition("\n")
    stages = ast.literal_eval(listed)
    assert len(stages) > 8
    words = {e.text for e in ElementTree.fromstring(svg).iter() if e.tag.endswith("text")}
    assert [name for stage in stages for name in stage if name not in words] == []
