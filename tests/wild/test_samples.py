"""CI checks one graph of each producer as ``make wild`` checks all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.wild.judge import judge
from tests.wild.produce import MAKERS
from tests.wild.samples import SAMPLES, filled


@pytest.mark.parametrize("label", SAMPLES)
@pytest.mark.filterwarnings("ignore")
def test_graphs_of_other_tools_train_right(label: str, tmp_path: Path) -> None:
    row = judge(filled(label, tmp_path), label)
    assert row.verdict == "trains right", row
    assert row.checked > 0
    assert row.gradient is not None


def test_every_producer_has_a_sample() -> None:
    made_in_ci = {"ort"}  # by test_wild.py
    assert {s.split("/")[0] for s in SAMPLES} | made_in_ci == set(MAKERS)
