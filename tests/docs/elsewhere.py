"""Pages whose blocks other tests run, and the code that these tests take from the page.

The code comes from the functions and patterns of those tests, so that a block that no test takes is
noticed.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from tests.adapters import test_docs as adapters
from tests.artifacts import test_docs as artifacts
from tests.cpp.page import shown
from tests.docs.blocks import ROOT, Block, blocks, text_of
from tests.finetuning import test_docs as finetuning

FEDERATION = "tests/flower/inside/check_page.py"
_ASKED = re.compile(r'\bblock\("(\w+)", "([^"]+)"\)')


def any_language() -> list[str]:
    """Return what the tests of C++ and of artifacts run, and the command that is run here."""
    page = "docs/any-language.md"
    programs = [*shown(text_of(page)).values(), *artifacts.programs("any-language.md")]
    source = (ROOT / "tests/cpp/test_page.py").read_text(encoding="utf-8")
    kinds = [("sh", r"g\+\+ "), ("cmake", "")]
    assert all(f'r"```{kind}\\n(' in source for kind, _ in kinds)
    for kind, start in kinds:
        programs += [b.code for b in blocks(page) if b.kind == kind and re.match(start, b.code)]
    return [*programs, artifacts_command().code]


def artifacts_command() -> Block:
    """Return the command that makes what every program of the page trains."""
    (block,) = [b for b in blocks("docs/any-language.md") if b.code.startswith("onnxtrain build ")]
    return block


def federated() -> list[str]:
    """Return the blocks that the test asks for by kind and word."""
    asked = _ASKED.findall((ROOT / FEDERATION).read_text(encoding="utf-8"))
    page = [b for b in blocks("docs/federated.md") if not b.why]
    return [b.code for kind, word in asked for b in page if b.kind == kind and word in b.code]


def fine_tuning() -> list[str]:
    """Return the programs of the sections that the tests run, and their commands."""
    taken = [p for section in adapters.SECTIONS for p in adapters.programs(section)]
    taken += [p for section in finetuning.SECTIONS for p in finetuning.blocks(section)]
    return [*taken, adapters.served_with().code, *(b.code for b in finetuning.commands())]


ELSEWHERE: dict[str, Callable[[], list[str]]] = {
    "docs/any-language.md": any_language,
    "docs/federated.md": federated,
    "docs/fine-tuning.md": fine_tuning,
}
"""Who takes the blocks of a page, in languages and with peers of their own."""


def left(page: str) -> list[Block]:
    """Return the blocks of a page that no test runs and that do not say why."""
    taken = ELSEWHERE[page]()
    return [b for b in blocks(page) if not b.why and b.code not in taken]
