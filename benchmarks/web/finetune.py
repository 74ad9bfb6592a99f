"""Fine-tuning in Chromium: artifacts, reference losses from Python, the run, and its docs section.

    python -m benchmarks.web.finetune [--steps 8] [--only decoder encoder]

Needs ``npm ci --ignore-scripts`` and ``npm run build --workspace onnxtrain`` in ``web/``. A
SmolLM2-135M shape with random int4 weights and adapters of rank 8 trains on 1x128 tokens in a
worker, with one and with two threads of wasm. An encoder of MiniLM's shape (6 layers, width 384)
learns three classes from eight examples of each.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

import onnxtrain
from benchmarks.finetuning import decoder_file
from benchmarks.finetuning.shapes import SHAPES
from benchmarks.web.encoder_net import CLASSES, examples, minilm
from benchmarks.web.finetune_report import write_section
from onnxtrain.text import without_cache

ROOT = Path(__file__).parents[2]
WORK = ROOT / ".cache" / "bench-web" / "finetune"
BASE = ROOT / ".cache" / "bench" / "finetune" / "smollm2-135m" / "model.onnx"
RESULTS = ROOT / "benchmarks" / "web" / "finetune.json"
TOKENS, RANK = 128, 8


def decoder(steps: int) -> None:
    """Write artifacts, batches, and the losses that Python finds."""
    folder = WORK / "decoder"
    shape = SHAPES["smollm2-135m"]
    if not BASE.exists():
        decoder_file.write(shape, BASE)
    adapted = onnxtrain.lora(BASE, rank=RANK, targets="all-linear")
    onnxtrain.build(
        without_cache(adapted), loss="causal_lm", optimizer="adamw", clip=1.0, target="wasm"
    ).save(folder)
    rows = np.random.default_rng(0).integers(0, shape.vocabulary, (steps, 1, TOKENS))
    trainer = onnxtrain.Trainer(folder, threads=1)
    mask = np.ones((1, TOKENS), np.int64)
    losses = [
        float(trainer.step(input_ids=ids, attention_mask=mask, labels=ids).loss) for ids in rows
    ]
    (WORK / "decoder.json").write_text(json.dumps({"rows": rows.tolist(), "losses": losses}))


def encoder() -> None:
    """Write artifacts of the classifier, and its examples."""
    folder = WORK / "encoder"
    adapted = onnxtrain.lora(minilm(), rank=4, targets=["query", "value"])
    onnxtrain.build(
        adapted,
        loss="cross_entropy",
        optimizer="adamw",
        metrics=["accuracy"],
        target="wasm",
        train=[*adapted.names, "classifier.*"],
    ).save(folder)
    data: dict[str, Any] = {"classes": CLASSES}
    for name, count, seed in (("train", 8, 1), ("test", 16, 2)):
        ids, labels = examples(count, seed)
        data[name] = {"input_ids": ids.tolist(), "labels": labels.tolist()}
    (WORK / "encoder.json").write_text(json.dumps(data))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--only", nargs="+", default=["decoder", "encoder"])
    args = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    if "decoder" in args.only:
        decoder(args.steps)
    if "encoder" in args.only:
        encoder()
    script = str(Path(__file__).with_name("finetune.mjs"))
    subprocess.run(["node", script, str(WORK), str(RESULTS), *args.only], check=True)
    write_section(RESULTS, ROOT / "docs" / "benchmarks-web.md")


if __name__ == "__main__":
    main()
