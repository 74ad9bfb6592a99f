"""A base that knows something, fine-tuned in 4 bits: from speeches of presidents to Moby-Dick.

A small Llama is trained from scratch by torch, written in 4 bits by the builder of
onnxruntime-genai, and that file is fine-tuned by onnxtrain, without torch.
``make finetune-demo`` runs it; flags that are not known here go to base.py (``--width 192``).
``--quick`` is the same with a toy, in a minute.
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
from texts import chapters, speeches, write_passages  # noqa: E402 - beside this file

PACKAGES = (
    ("torch==2.13.0",),
    ("transformers", "tokenizers", "onnx", "onnx-ir", "onnxruntime", "onnxruntime-genai"),
)
PROMPTS = ("The whale", "Upon the sea", "It is the duty of Congress")
HELD = 10  # chapters at the end of the novel, for validation
QUICK = ("--width", "64", "--layers", "1", "--vocabulary", "512", "--batch", "4", "--length", "64")


def environment(folder: Path) -> Path:
    """Return the interpreter of an environment with torch and the builder, made once."""
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
    parser.add_argument("--python", type=Path, help="an interpreter that has torch and genai")
    parser.add_argument("--base-steps", type=int, default=800)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--passages", type=int, default=600)
    parser.add_argument("--held", type=int, default=40, help="passages to validate on")
    parser.add_argument("--quick", action="store_true", help="a toy, to see that all works")
    parser.add_argument("--threads", type=int, help="of onnxruntime; all cores by default")
    parser.add_argument("--resume", action="store_true")
    asked, of_base = parser.parse_known_args()
    if asked.quick:
        asked.base_steps, asked.passages, asked.held = 20, 24, 4
        of_base = [*QUICK, *of_base]
    asked.work.mkdir(parents=True, exist_ok=True)

    base = asked.work / "base" / "int4"
    if not (base / "model.onnx").exists():
        text = asked.work / "speeches.txt"
        text.write_text(speeches(asked.work / "npm"), encoding="utf-8")
        python = asked.python or environment(asked.work / "venv")
        command = [str(python), str(HERE / "base.py"), str(text), str(base.parent)]
        command += ["--steps", str(asked.base_steps), *of_base]
        subprocess.run(command, check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})

    novel = chapters(asked.work / "npm")
    train, held = asked.work / "novel.jsonl", asked.work / "held.jsonl"
    write_passages(novel[:-HELD], train)
    write_passages(novel[-HELD:], held)
    passages = train.read_text(encoding="utf-8").splitlines()[: asked.passages]
    train.write_text("\n".join(passages) + "\n", encoding="utf-8")
    kept = held.read_text(encoding="utf-8").splitlines()[: asked.held]
    held.write_text("\n".join(kept) + "\n", encoding="utf-8")

    result = onnxtrain.finetune(
        base,
        train,
        asked.out,
        validation=held,
        targets="all-linear",
        lora_rank=16,
        epochs=asked.epochs,
        batch_size=8,
        max_length=128,
        lr=2e-3,
        prompts=PROMPTS,
        sample_tokens=30,
        checkpoint_every=25,
        threads=asked.threads,
        resume=asked.resume,
    )
    before, after = result.before["perplexity"], result.after["perplexity"]
    print(json.dumps({"perplexity_before": round(before, 2), "perplexity_after": round(after, 2)}))
    assert after < before, "the novel should be less of a surprise after training"


if __name__ == "__main__":
    main()
