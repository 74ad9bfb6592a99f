"""The page of the GPU: verdicts and rows, from figures made up here."""

from __future__ import annotations

from benchmarks.cuda.report import figures, verdict

ROW = {
    "net": "mlp", "optimizer": "sgd", "precision": "float32", "ours_ms": 0.4, "torch_ms": 1.0,
    "torch_async_ms": 0.9, "spread": [0.3, 0.5], "worst_loss": 0.0, "captured": True,
    "nodes": {"CUDAExecutionProvider": 44}, "left": [],
}  # fmt: skip


def test_verdicts() -> None:
    assert verdict(ROW) == "0.5 met"
    assert verdict({**ROW, "ours_ms": 0.6}) == "0.5 missed by 20%"
    assert verdict({**ROW, "net": "gpt2"}) == "report"


def test_a_row_tells_what_left_the_device() -> None:
    facts = {"date": "a day", "command": "python -m it"}
    page = figures({"facts": facts, "rows": [{**ROW, "left": ["MaxUnpool 'a'"]}]}, "0.1 kernel")
    assert "python -m it" in page
    assert "| 0.40 (0.30-0.50) | 0.5 met | yes | CUDA 44 | 1 |" in page
    assert "0.1 kernel" in page
