"""The GPU page: verdicts and rows, from synthetic figures."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from benchmarks.cuda.real_report import real_figures
from benchmarks.cuda.report import PAGE, RESULTS, figures, files_table, rendered, store, verdict

ROW = {
    "net": "mlp",
    "optimizer": "sgd",
    "precision": "float32",
    "ours_ms": 0.4,
    "torch_ms": 1.0,
    "torch_async_ms": 0.9,
    "spread": [0.3, 0.5],
    "worst_loss": 0.0,
    "captured": True,
    "nodes": {"CUDAExecutionProvider": 44},
    "left": [],
}


def test_verdicts() -> None:
    assert verdict(ROW) == "0.5 met"
    assert verdict({**ROW, "ours_ms": 0.6}) == "0.5 missed by 20%"
    assert verdict({**ROW, "net": "gpt2"}) == "report"


def test_a_row_tells_what_left_the_device() -> None:
    facts = {"date": "a day", "command": "python -m it"}
    row = {**ROW, "left": ["MaxUnpool 'a'"]}
    page = figures({"facts": facts, "rows": [row], "kernels": "0.1 kernel"})
    assert "python -m it" in page
    assert "| 0.40 (0.30-0.50) | 0.5 met | yes | CUDA 44 | 1 |" in page
    assert "0.1 kernel" in page


def test_real_nets_show_what_is_missed_and_its_kernels() -> None:
    row = {
        "net": "gpt2",
        "precision": "float32",
        "ours_ms": 40.0,
        "eager_ms": 50.0,
        "compile_ms": 32.0,
        "ours_gib": 7.0,
        "eager_gib": 8.0,
        "ours_gpu_ms": 39.0,
        "ours_kernels": ["1.5 a product"],
        "eager_worst_loss": 1e-3,
        "casts": 3,
    }
    failed = {"net": "vit", "precision": "float32", "error": "no such node"}
    facts = {"date": "a day", "command": "python -m it"}
    page = real_figures({"facts": facts, "rows": [failed, row]})
    assert "| 0.80 | **1.25** | 39.0 /  /  | 1e-03 | 3 |" in page
    assert "| ViT-B/16, 32 | float32 | no such node |" in page
    assert "Of 3 limits these are missed:" in page
    assert "time / compile 1.25 of 1.15" in page
    assert "1.5 a product" in page
    assert page.index("GPT-2") < page.index("ViT")
    met = real_figures({"facts": facts, "rows": [{**row, "compile_ms": 39.0}]})
    assert "All 3 limits are met." in met
    assert "1.5 a product" not in met


def test_files_are_counted() -> None:
    good = {"file": "b", "loss": 1e-6, "captured": True, "left": []}
    rows = [good, {**good, "file": "a", "loss": 0.1, "left": ["Det"]}, {"file": "c", "error": "E"}]
    page = files_table(rows)
    assert page.startswith("3 files: 1 wrong, 1 refused, 1 with nodes on the CPU.")
    assert page.index("| a |") < page.index("| b | 1e-06 | yes | none |") < page.index("| c | E |")


def test_the_page_shows_the_stored_runs() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert rendered(text) == text, "python -m benchmarks.cuda.report"


def test_a_new_run_takes_the_place_of_the_stored_one(tmp_path: Path) -> None:
    results = Path(shutil.copytree(RESULTS, tmp_path / "results"))
    run = {"facts": {"date": "a day", "command": "python -m it"}, "rows": [ROW]}
    (tmp_path / "steps.json").write_text(json.dumps(run))
    (tmp_path / "kernels.txt").write_text("0.1 kernel")
    store([str(tmp_path / "steps.json"), str(tmp_path / "kernels.txt")], results)
    part = [{"file": "b", "loss": 1e-6, "captured": True, "left": []}]
    (tmp_path / "files.json").write_text(json.dumps(part))
    store(["--files", *[str(tmp_path / "files.json")] * 2], results)
    text = rendered(PAGE.read_text(encoding="utf-8"), results)
    assert "0.40 (0.30-0.50)" in text
    assert "0.1 kernel" in text
    assert "2 files: 0 wrong" in text
