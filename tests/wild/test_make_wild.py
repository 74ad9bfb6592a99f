"""``make wild`` with a failing producer, and the reasons for refusals on its page."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.wild import produce
from tests.wild.apart import apart
from tests.wild.judge import Row, judge
from tests.wild.report import LONGEST, reason


def test_what_fails_stops_no_other_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def fail(name: str, some: tuple[str, ...]) -> None:
        asked.append(f"{name}:{','.join(some)}")
        raise subprocess.CalledProcessError(1, name)

    monkeypatch.setattr(produce, "make", fail)
    monkeypatch.setattr(produce, "download", asked.append)
    monkeypatch.setattr(sys, "argv", ["produce", "genai:llama,phi", "magika", "other==1"])
    with pytest.raises(SystemExit, match="not made: genai;"):
        produce.main()
    (magika,) = [p for p in produce.PACKAGES.split() if p.startswith("magika==")]
    assert asked == ["genai:llama,phi", magika, "other==1"]


def test_all_that_is_made_or_downloaded_is_pinned() -> None:
    environments = {environment for environment, _ in produce.MAKERS.values()}
    packages = [p for e in environments for some in e.packages for p in some]
    assert [p for p in [*packages, *produce.PACKAGES.split()] if p.count("==") != 1] == []


def test_a_reason_is_the_first_line_and_what_it_is_about() -> None:
    assert reason("") == ""
    assert reason("not this\nhint: that") == "not this"
    refusal = "no gradient flows:\n  node 'a': QuantizeLinear(x: FLOAT[2]): it rounds\n  node 'b'\n"
    assert reason(refusal) == "no gradient flows: node 'a': QuantizeLinear: it rounds"
    runtime = 'Load failed: In Node, ("a", Erfc, "", -1) : ("x") -> ("y") , Error No Op registered'
    assert reason(runtime) == "No Op registered"
    assert len(reason("long " * 100)) == LONGEST


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "why"), [("dynamic", "rounds to"), ("qdq", "stored as integers")])
def test_the_hint_of_a_refusal_is_followed(tmp_path: Path, kind: str, why: str) -> None:
    producer = pytest.importorskip("tests.wild.producers.ort_models", reason="needs torch")
    path = producer.exported(tmp_path, "mlp")
    producer.quantised(path)
    row = judge(tmp_path / f"mlp-{kind}.onnx", kind)
    assert row.verdict == "refused; trains by its hint", row
    assert why in row.message
    assert row.parameters > 0
    assert row.gradient is None
    assert row.last is not None
    assert row.first is not None
    assert row.last < row.first


def _dies(path: Path, label: str) -> Row:
    os.kill(os.getpid(), signal.SIGFPE)
    return Row(label)


def _runs(path: Path, label: str) -> Row:
    while True:
        pass


def _answers(path: Path, label: str) -> Row:
    return Row(label, "refused", message=path.name)


def test_a_file_that_crashes_or_runs_on_is_a_row() -> None:
    path = Path("a.onnx")
    assert apart("a", path, _answers) == Row("a", "refused", message="a.onnx")
    assert apart("a", path, _dies) == Row("a", "crash", message=f"exit status {-signal.SIGFPE}")
    assert apart("a", path, _runs, limit=1) == Row("a", "time limit", seconds=1)
