"""Tensors in memory of a device, simulated on the CPU."""

from __future__ import annotations

import numpy as np
import pytest

from onnxtrain.runtime import ort_values as memory
from onnxtrain.runtime.ort_values import Values, copy_value


def arrays(start: float, *names: str) -> dict[str, np.ndarray]:
    """Return tensors of different sizes; none is a multiple of the alignment."""
    return {n: np.full(5 + 7 * i, start + i, np.float32) for i, n in enumerate(names)}


@pytest.mark.parametrize(
    ("order", "copies"),
    [("xabcy", 1), ("axbcy", 2), ("cba", 3)],
    ids=["neighbours", "one between", "other order"],
)
def test_neighbors_are_one_copy(order: str, copies: int) -> None:
    new = arrays(1.0, "a", "b", "c")
    old = {n: np.zeros_like(new[n]) if n in new else np.ones(3, np.float32) for n in order}
    values, fresh = Values(old, "cpu", on_host=False), Values(new, "cpu", on_host=False)
    for round_ in range(2):
        for name in new:
            fresh.write(name, new[name] + round_)
        for target, source in values.copies_from(fresh, list("abc")):
            copy_value(target, source)
        for name in order:
            wanted = new[name] + round_ if name in new else np.ones(3)
            np.testing.assert_array_equal(values.view(name), wanted, err_msg=name)
    assert len(values.copies_from(fresh, list("abc"))) == copies


@pytest.mark.parametrize("counted", [2**31 - 1, 3], ids=["by a kernel", "longer than one counts"])
def test_large_memory_is_counted_in_words(counted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels count elements in 32 bits: 9 GiB are too many bytes, but not too many words."""
    monkeypatch.setattr(memory, "_MAX_ELEMENTS", counted)
    given = arrays(1.0, "a", "b", "c")
    values = Values(dict(given), "cpu", on_host=False)
    assert values._memory.shape() == [sum(-(-a.nbytes // 64) * 8 for a in given.values())]
    for name, array in given.items():
        np.testing.assert_array_equal(values.view(name), array)
