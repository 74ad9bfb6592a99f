"""The programs of docs/fine-tuning.md about adapters and their files run, in order."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from tests.adapters.decoders import batch, write
from tests.docs.blocks import Block
from tests.docs.blocks import blocks as blocks_of

PAGE = Path(__file__).parents[2] / "docs" / "fine-tuning.md"
SECTIONS = ("Adapters", "Files out")


def programs(section: str) -> list[str]:
    text = PAGE.read_text(encoding="utf-8")
    part = text.split(f"## {section}\n")[1].split("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", part, re.DOTALL)


def served_with() -> Block:
    """Return the block that serves an adapter by onnxruntime."""
    (block,) = [b for b in blocks_of("docs/fine-tuning.md") if b.kind == "py"]
    return block


def test_adapter_page_runs_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    write(tmp_path, int4=True)
    monkeypatch.chdir(tmp_path)
    feeds = batch()
    space: dict = {"batches": [{**feeds, "labels": feeds["input_ids"]}] * 2}
    for program in (p for section in SECTIONS for p in programs(section)):
        exec(compile(program, "fine-tuning.md", "exec"), space)
    out = capsys.readouterr().out
    assert "LoRA rank 8 on model.onnx: 8 adapters" in out
    assert "8 kept as branches" in out
    assert {p.name for p in tmp_path.iterdir()} >= {
        *("adapter", "model.lora.onnx", "style.onnx_adapter", "merged.onnx")
    }
    quiet = ort.SessionOptions()
    quiet.log_severity_level = 3
    served = ort.InferenceSession("model.lora.onnx", quiet)
    merged = ort.InferenceSession("merged.onnx", quiet)
    shown: dict = {"onnxruntime": ort, "session": served, "feeds": feeds}
    exec(compile(served_with().code, "fine-tuning.md", "exec"), shown)
    np.testing.assert_allclose(
        served.run(["logits"], feeds, run_options=shown["options"])[0],
        merged.run(["logits"], feeds)[0],
        atol=1e-4,
    )
