"""Lower a sample of the zoo; ``make lower-zoo`` lowers all of it."""

import pytest

from tests.zoo.models import ZOO

from .zoo import GOALS, Goal, attempt

_FAST = ["resnet", "style_transfer", "vit", "bert", "lstm", "unet", "mobilenet_v3"]


@pytest.mark.parametrize("goal", [GOALS[1], GOALS[3]], ids=str)
@pytest.mark.parametrize("name", _FAST)
def test_zoo_model_lowers(name: str, goal: Goal):
    result = attempt(ZOO[name], goal)
    assert result.status == "ok", result.note
    assert result.nodes > 0


@pytest.mark.full
@pytest.mark.parametrize("goal", GOALS, ids=str)
@pytest.mark.parametrize("name", [n for n in ZOO if n not in _FAST])
def test_zoo_model_is_never_wrong(name: str, goal: Goal):
    assert attempt(ZOO[name], goal).status in ("ok", "refused")
