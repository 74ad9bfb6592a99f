"""The reference pages run, and name everything that is public."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest

from onnxtrain import losses, optim
from tests.registries import restore_afterwards

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {"losses.md": losses, "optimizers.md": optim}


@pytest.mark.parametrize("page", PAGES)
def test_examples_run(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    restore_afterwards(monkeypatch)
    failed, tried = doctest.testfile(str(DOCS / page), module_relative=False)
    assert tried > 5
    assert failed == 0


@pytest.mark.parametrize("page", PAGES)
def test_every_public_name_is_there(page: str) -> None:
    text = (DOCS / page).read_text()
    assert [name for name in PAGES[page].__all__ if name not in text] == []


def test_every_name_resolves_in_the_tables() -> None:
    text = (DOCS / "losses.md").read_text()
    for name, kind in losses.LOSSES.items():
        assert f"| `{name}` | `{kind.__name__}` |" in text
    text = (DOCS / "optimizers.md").read_text()
    for name, kind in optim.OPTIMIZERS.items():
        assert f"| `{name}` | `{kind.__name__}` |" in text
    for name, kind in optim.SCHEDULES.items():
        assert f"`{kind.__name__}(" in text
        assert f"| `{name}` |" in text or name in ("warmup", "chain")
