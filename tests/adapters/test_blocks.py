"""Adapters whose inputs share rows by block merge into the zero points of 4-bit weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from safetensors.numpy import load_file

import onnxtrain
from onnxtrain.errors import PrepareError
from onnxtrain.losses import CrossEntropy, LossTerm
from tests.adapters.decoders import BLOCK, batch, write
from tests.adapters.test_files import close, exact, run


def nbits(model: ir.Model) -> dict[str, ir.Node]:
    return {n.name or "": n for n in model.graph if n.op_type == "MatMulNBits"}


def array(x: ir.Value | None) -> np.ndarray:
    assert x is not None
    assert x.const_value is not None
    return x.const_value.numpy()


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_merging_rounds_nothing(family: str, tmp_path: Path) -> None:
    base = exact(write(tmp_path, int4=True, family=family).path)
    adapted = onnxtrain.lora(base, rank=4, targets="all-linear", blocks=True, family=family)
    trainer = onnxtrain.Trainer(
        onnxtrain.build(
            adapted,
            loss=LossTerm(CrossEntropy(axis=-1), output="logits"),
            optimizer="adamw:lr=0.05",
        )
    )
    feeds = batch()
    labels = np.roll(feeds["input_ids"], -1, 1)
    losses = [float(trainer.step(**feeds, labels=labels).loss) for _ in range(5)]
    assert losses[-1] < 0.9 * losses[0]
    assert all(a.block == BLOCK for a in adapted.adapters)

    result = adapted.merge(trainer)
    assert set(result.shifted) == {a.module for a in adapted.adapters}
    assert not result.branches
    assert "merged into zero points" in str(result)
    before, after = nbits(adapted.plain), nbits(result.model)
    moved = 0
    for name, node in after.items():
        for i in (1, 2):  # codes and scales
            np.testing.assert_array_equal(array(node.inputs[i]), array(before[name].inputs[i]))
        moved += len(node.inputs) > 3
    assert moved >= 8
    values = {n: np.asarray(a) for n, a in trainer.parameters.items()}
    trained = run(adapted.with_parameters(values).model, feeds)
    close(run(result.model, feeds), trained)
    assert np.abs(trained - run(base, feeds)).max() > 0.1

    if family == "llama":
        adapted.export_peft(tmp_path / "peft", trainer)
        tensors = load_file(tmp_path / "peft" / "adapter_model.safetensors")
        rows = tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"]
        blocks = rows.reshape(4, -1, BLOCK)
        np.testing.assert_array_equal(blocks, np.broadcast_to(blocks[:, :, :1], blocks.shape))


def test_other_layers_get_ordinary_adapters(tmp_path: Path) -> None:
    path = write(tmp_path).path
    plain, shared = (onnxtrain.lora(path, rank=4, blocks=b) for b in (False, True))
    assert {a.block for a in shared.adapters} == {0}
    for name, a in plain.parameters.items():
        np.testing.assert_array_equal(a, shared.parameters[name])
    with pytest.raises(PrepareError, match=r"blocks and dora exclude each other\nhint: "):
        onnxtrain.lora(path, rank=4, blocks=True, dora=True)
