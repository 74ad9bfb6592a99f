"""Real architectures come out of ``from_torch`` and take the step that torch takes."""

import pytest

from tests.zoo.models import ZOO

from .zoo import run

# Each covers one way in which exporters go wrong: training statistics, tied weights, dropout.
QUICK = {("resnet", "train"), ("gpt2", "eval"), ("gru", "eval")}
REFUSED: dict[str, str] = {}


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(n, m, id=f"{n}-{m}", marks=() if (n, m) in QUICK else pytest.mark.full)
        for n, entry in ZOO.items()
        for m in entry.modes
    ],
)
def test_one_step_equals_torch(name: str, mode: str) -> None:
    outcome = run(ZOO[name], mode)
    if name in REFUSED:
        assert outcome.status == "refused", outcome
        assert REFUSED[name] in outcome.note
    else:
        assert outcome.status in ("pass", "kink"), outcome
        assert outcome.status == "pass" or ZOO[name].kink
