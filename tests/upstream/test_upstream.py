"""The harness for programs of other projects; none of these tests needs a checkout."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from tests.upstream.getting_started import write_corpus
from tests.upstream.onnxruntime import caused
from tests.upstream.process import run_script, run_tests
from tests.upstream.projects import BEGIN, END, PAGE, PROJECTS, page, write_page
from tests.upstream.results import Result, Run, explain, merged, not_passed, stored, summary
from tests.upstream.stubs import torchtext

TESTS = """
import unittest
from netron.anything import start

class Test(unittest.TestCase):
    def test_good(self):
        assert callable(start)

    def test_bad(self):
        raise ValueError("rate is 0")

    @unittest.skip("no GPU")
    def test_skipped(self):
        pass
"""
PREPARE = """
from tests.upstream import stubs

def with_stubs():
    stubs.install("netron")
"""


def test_outcomes_of_tests(tmp_path: Path) -> None:
    good, broken = tmp_path / "test_some.py", tmp_path / "test_broken.py"
    good.write_text(TESTS)
    broken.write_text("import a_package_that_is_gone")
    (tmp_path / "prepare.py").write_text(PREPARE)
    results = run_tests(
        "p",
        [good, broken],
        how="tests",
        setup="prepare:with_stubs",
        environment={"PYTHONPATH": str(tmp_path)},
    )
    assert [(r.program, r.outcome, r.reason) for r in results] == [
        ("test_some.py::Test::test_bad", "fail", "ValueError: rate is 0"),
        ("test_some.py::Test::test_good", "pass", ""),
        ("test_some.py::Test::test_skipped", "skip", "no GPU"),
        (
            "test_broken.py",
            "fail",
            "ModuleNotFoundError: No module named 'a_package_that_is_gone'",
        ),
    ]


def test_outcomes_of_scripts(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.py", tmp_path / "bad.py"
    good.write_text("import sys; assert sys.argv[1:] == ['--epochs', '1']")
    bad.write_text(f"open('{tmp_path}/missing.txt')")
    result = run_script("p", good, how="programs", arguments=["--epochs", "1"])
    assert (result.outcome, result.reason) == ("pass", "")
    result = run_script("p", bad, how="programs")
    missing = "FileNotFoundError: [Errno 2] No such file or directory: 'missing.txt'"
    assert (result.outcome, result.reason) == ("fail", missing)


def test_a_cause_outside_is_marked_only_where_something_did_not_pass() -> None:
    results = [Result("p", "a::x", "fail", "error"), Result("p", "a::y", "pass")]
    first, second = explain(results, {"a::*": "onnx dropped a name"})
    assert (first.reason, first.outside) == ("onnx dropped a name", True)
    assert second == results[1]


def test_stored_results_come_back(tmp_path: Path) -> None:
    results = (Result("p", "a", "fail", "no | here", "tests", True), Result("p", "b", "pass"))
    run = Run("p", "0123456789ab", results)
    run.store(tmp_path)
    (again,) = stored(tmp_path)
    assert set(again.results) == set(results)
    assert again.commit == run.commit


def test_parameter_sets_of_a_test_are_counted(tmp_path: Path) -> None:
    sets = [
        Result("p", f"a::x[{n}]", "pass" if n else "fail", "" if n else "kink") for n in (0, 1, 2)
    ]
    sets.append(Result("p", "a::x[3]", "fail", "kink"))
    run = Run("p", "0123456789ab", tuple(merged(sets)))
    assert [(r.program, r.outcome, r.count) for r in run.results] == [
        ("a::x", "fail", 2),
        ("a::x", "pass", 2),
    ]
    assert summary(run.results).endswith("| p |  | 2 | 2 | 0 |")
    assert "`a::x`, 2 parameter sets | fail | kink" in not_passed(run.results)
    run.store(tmp_path)
    assert stored(tmp_path)[0].results == run.results


def test_the_page_shows_the_stored_results(tmp_path: Path) -> None:
    text = PAGE.read_text()
    assert text.count(BEGIN) == text.count(END) == 1
    copied = tmp_path / PAGE.name
    copied.write_text(text)
    write_page(stored(), copied)
    assert copied.read_text() == text, "run: make upstream UPSTREAM=<folder>"


def test_each_project_can_run_and_has_results() -> None:
    assert {run.project for run in stored()} == {p.name for p in PROJECTS}
    for project in PROJECTS:
        module = importlib.import_module(f"tests.upstream.{project.name.replace('-', '_')}")
        assert callable(module.run)
        assert project.name in page(stored())


def test_the_corpus_of_getting_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Words of the training part are known; both last batches of 35 rows are shorter."""
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path)
    field = torchtext.Field(torchtext.get_tokenizer("basic_english"), "<sos>", "<eos>", lower=True)
    train, valid, _ = torchtext.datasets.WikiText2.splits(field)
    field.build_vocab(train)
    assert train.examples[0].text[:4] == ["=", train.examples[0].text[1], "=", "<eos>"]
    numbers = field.numericalize([train.examples[0].text])
    assert numbers.shape[1] == 1
    assert int(numbers.max()) == len(field.vocab.stoi) - 1
    sizes = [(len(part.examples[0].text) // n - 1) % 35 for part, n in ((train, 20), (valid, 10))]
    assert 0 not in sizes


def test_causes_of_failures_of_ortmodule() -> None:
    file = "orttraining_test_ortmodule_api.py"
    reasons = {
        f"{file}::test_a": "AttributeError: 'Net' object has no attribute '_torch_module'",
        f"{file}::test_aten_multinomial[x]": "ExportError",
        f"{file}::test_b": "AssertionError",
    }
    results = [caused(Result("onnxruntime", p, "fail", r)) for p, r in reasons.items()]
    assert [r.outside for r in results] == [True, True, False]
    assert results[0].reason == "reads private internals of ORTModule"
