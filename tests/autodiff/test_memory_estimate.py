"""The estimate of training memory."""

from __future__ import annotations

import onnxtrain
from tests.artifacts.models import classifier

NUMBERS = 6 * 8 + 8 + 8 * 3 + 3


def test_an_estimate_by_hand() -> None:
    memory = onnxtrain.explain(classifier(), dims={"batch": 10}).memory
    assert memory.parameters == memory.gradients == NUMBERS * 4
    assert memory.adam_state == 2 * NUMBERS * 4
    assert memory.activations == 10 * (8 + 8 + 3) * 4
    assert (memory.sizes, memory.unknown) == ({"batch": 10}, 0)
    assert memory.total == 4 * NUMBERS * 4 + memory.activations
    text = str(memory)
    assert text.startswith("about 2.09 kB to train with Adam at batch = 10: parameters 332 B")
    assert "memory: about 2.09 kB" in str(onnxtrain.explain(classifier(), dims={"batch": 10}))


def test_sizes_count_as_one_unless_given() -> None:
    memory = onnxtrain.explain(classifier(), "fc2.*").memory
    assert memory.sizes == {"batch": 1}
    assert memory.parameters == (8 * 3 + 3) * 4
    assert memory.activations == (8 + 8 + 3) * 4
