"""Write the inputs of ``adapters.mjs``: a small int4 decoder with adapters, rows, CPU losses.

    python -m benchmarks.web.gpu.adapters WORK

The decoder has the width of SmolLM2-135M, four of its layers and a smaller vocabulary, so that it
can be copied to a machine without a network.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

import onnxtrain
from benchmarks.finetuning import decoder_file
from benchmarks.finetuning.shapes import Shape
from onnxtrain.text import without_cache

SHAPE = Shape(8192, 576, 1536, 4, 9, 3)
STEPS, TOKENS, RANK = 8, 128, 8


def write(out: Path) -> None:
    """Write the artifacts for WebGPU, the rows, and the losses of the CPU provider."""
    out.mkdir(parents=True, exist_ok=True)
    base = out / "base" / "model.onnx"
    decoder_file.write(SHAPE, base)
    adapted = without_cache(onnxtrain.lora(base, rank=RANK, targets="all-linear"))
    for target, folder in (("webgpu", out / "artifacts"), ("cpu", out / "cpu")):
        onnxtrain.build(adapted, loss="causal_lm", optimizer="adamw", clip=1.0, target=target).save(
            folder
        )
    rows = np.random.default_rng(0).integers(0, SHAPE.vocabulary, (STEPS, 1, TOKENS))
    mask = np.ones((1, TOKENS), np.int64)
    trainer = onnxtrain.Trainer(out / "cpu", threads=1)
    losses = [float(trainer.step(input_ids=i, attention_mask=mask, labels=i).loss) for i in rows]
    shape = f"{SHAPE.layers} layers, width {SHAPE.hidden}, vocabulary {SHAPE.vocabulary:,}"
    given = {"shape": shape, "rows": rows.tolist(), "losses": losses}
    (out / "adapters.json").write_text(json.dumps(given))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
