"""The wire format of Flower is documented nowhere: it must be what JavaScript was written for."""

from __future__ import annotations

import json
import tomllib
from importlib.metadata import version

import pytest
from packaging.requirements import Requirement

from tests.flower.environment import ROOT
from tests.flower.inside.golden import PATH, golden

STORED = json.loads(PATH.read_text("utf-8"))
TOLD = (
    "Flower's wire format is not what web/packages/onnxtrain/src/flower speaks: adapt that, "
    "rewrite tests/flower/golden.json by python -m tests.flower.inside.golden, and narrow the "
    "extra [flower]"
)


@pytest.mark.parametrize("part", STORED)
def test_bytes_are_those_that_javascript_makes(part: str) -> None:
    made = golden()
    assert made.keys() == STORED.keys(), TOLD
    assert made[part] == STORED[part], f"{part} changed with flwr {version('flwr')}. {TOLD}"


def test_the_installed_release_is_one_that_we_allow() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    (text,) = project["optional-dependencies"]["flower"]
    assert Requirement(text).specifier.contains(version("flwr"))
