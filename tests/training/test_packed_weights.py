"""Files with packed weights are trained without a second copy of them, to the same numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import onnxtrain
from onnxtrain.text import without_cache
from onnxtrain.training.packed_weights import has_packed_weights
from tests.adapters.decoders import batch, write


def test_a_directory_gives_the_losses_of_what_was_built(tmp_path: Path) -> None:
    decoder = write(tmp_path / "model", int4=True)
    adapted = onnxtrain.lora(without_cache(decoder.path), targets="all-linear")
    built = onnxtrain.build(adapted, loss="causal_lm", optimizer="adamw", check=False)
    built.save(tmp_path / "out")
    spec = built.manifest.model("gradients")
    assert spec is not None
    assert has_packed_weights(str(tmp_path / "out" / spec.file))
    assert not has_packed_weights(built.source_of(spec))
    feeds = {n: a for n, a in batch().items() if not n.startswith("past")}
    feeds["labels"] = np.where(feeds["attention_mask"] == 1, feeds["input_ids"], -100)
    one, other = onnxtrain.Trainer(built), onnxtrain.Trainer(tmp_path / "out")
    for _ in range(3):
        assert one.step(**feeds).loss == pytest.approx(other.step(**feeds).loss, rel=1e-5)
