"""Engines of the fine-tuning benchmark: answers in turn, and a named error if one dies."""

from __future__ import annotations

import sys

import pytest
from benchmarks.finetuning.engines import EngineError, finished, measured

ANSWERS = """
import sys
print("a library says hello")
for i, _ in enumerate(sys.stdin):
    print('{"seconds": %d}' % i, flush=True)
"""
DIES = """
import sys
input()
print('{"seconds": 1}', flush=True)
sys.exit("no such kernel")
"""


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_engines_answer_in_turn() -> None:
    samples = measured({"one": python(ANSWERS), "other": python(ANSWERS)}, 1, 3)
    assert samples == {n: [{"seconds": i} for i in range(3)] for n in ("one", "other")}


def test_an_engine_that_dies_is_named_with_its_last_words() -> None:
    with pytest.raises(EngineError, match=r"(?s)the peer died with exit code 1.*no such kernel"):
        measured({"ours": python(ANSWERS), "the peer": python(DIES)}, 1, 3)


def test_so_is_one_that_never_starts() -> None:
    with pytest.raises(EngineError, match=r"(?s)ours died with exit code 1.*ModuleNotFoundError"):
        measured({"ours": python("import not_there_at_all")}, 1, 1)


def test_a_build_that_fails_is_named() -> None:
    with pytest.raises(EngineError, match=r"(?s)build died with exit code 1.*out of luck"):
        finished("build", python("raise SystemExit('out of luck')"))
