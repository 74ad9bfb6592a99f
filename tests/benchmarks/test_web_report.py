"""The page of the browser benchmark."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from benchmarks.web import gpu_report, report

WEB = Path(report.__file__).parent
ROW: dict[str, Any] = {
    "name": "onnxtrain",
    "ms": 2.0,
    "ratio": 1.0,
    "low": 1.0,
    "high": 1.0,
    "bestRatio": 1.0,
    "rounds": 5,
    "dispatches": 50.0,
}
RESULTS: dict[str, Any] = {
    "started": "2026-01-02T03:04:05Z",
    "browser": "1.2",
    "cores": 2,
    "cpu": "a CPU",
    "load": 0.1,
    "loadAfter": 0.2,
}


def group(model: str, optimizer: str, device: str, *others: dict[str, Any]) -> dict[str, Any]:
    return {"model": model, "optimizer": optimizer, "device": device, "rows": [ROW, *others]}


def whole() -> list[dict[str, Any]]:
    return [group(model, *pair) for model in report.MODELS for pair in report.GROUPS]


def test_a_whole_run_lacks_nothing() -> None:
    assert report.coverage({"groups": whole()}) == "This run had 5 rounds per group."


def test_what_a_run_lacks_is_said() -> None:
    text = report.coverage({"groups": whole()[:-1]})
    assert "It does not have: transformer, 2 layers, width 32, 28 tokens, AdamW, WebGPU" in text
    assert "MLP" not in text


def test_a_system_that_fails_is_shown_with_its_error() -> None:
    failing = {"name": "other", "failed": "no kernel | here"}
    text = report.page({**RESULTS, "groups": [group("cnn", "sgd", "wasm", failing)]})
    assert "| other | - | - | - | - | does not train: no kernel / here |" in text


def test_a_real_gpu_gets_a_section_when_there_are_results(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    assert "No results of a real GPU are stored yet" in gpu_report.section(path)
    groups = [group("mlp", "adamw", "webgpu", {"name": "other", "failed": "no device"})]
    facts = {"node": "v1", "dawn": "2", "adapter": "a GPU", "software": False, "groups": groups}
    path.write_text(json.dumps({**RESULTS, **facts}))
    text = gpu_report.section(path)
    assert "| MLP | onnxtrain | 2.00 | 1.00 | 1.00 | 50 |" in text
    assert "| MLP | other | - | - | - | does not train: no device |" in text
    assert "in software" not in text
    path.write_text(json.dumps({**RESULTS, **facts, "software": True}))
    assert "This is a GPU in software" in gpu_report.section(path)


def test_a_real_gpu_says_what_other_spellings_take_and_which_side_is_wrong(tmp_path: Path) -> None:
    times = {"ms": 3.0, "ratio": 1.5, "bestRatio": 1.25, "dispatches": 47}
    other = {"name": "onnxtrain, multiplied", **times}
    wrong = {"name": "TensorFlow.js webgpu", "failed": "wrong: a loss is off by 1.0"}
    tuned = {"shape": "2 layers", "tokens": 16, "ms": 8.0, "tokensPerSecond": 2000.0}
    tuned |= {"dispatches": 99.0, "off": 2e-6}
    facts = {"node": "v1", "dawn": "2", "adapter": "a GPU", "software": False, "busy": True}
    groups = [group("cnn", "adamw", "webgpu", other, wrong)]
    path = tmp_path / "results.json"
    path.write_text(json.dumps({**RESULTS, **facts, "groups": groups, "adapters": tuned}))
    text = gpu_report.section(path)
    assert "its quickest rounds take 1.25 to 1.25\ntimes ours" in text
    assert "TensorFlow.js is the one that is wrong in the CNN" in text
    assert "8 ms per step, 2000 tokens/s, 99 dispatches" in text
    assert "Other work was on the machine's processor" in text


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node")
def test_a_slow_system_is_compared_in_the_rounds_that_it_has() -> None:
    """Ours was slow in the round that the other did not run: that must not help us."""
    program = f"""
      import {{ summarize }} from {json.dumps((WEB / "results.mjs").as_uri())};
      const times = (...all) => all.map(([round, ms]) => ({{ round, ms, cpu: ms }}));
      const rows = [{{ name: "ours", times: times([0, 2], [1, 4], [2, 900]) }},
                    {{ name: "slow", times: times([0, 20], [1, 80]) }},
                    {{ name: "none", failed: "x", times: [] }}];
      summarize({{ rows }});
      console.log(JSON.stringify(rows));
    """
    done = subprocess.run(
        ["node", "--input-type=module", "-e", program], capture_output=True, text=True, check=True
    )
    ours, slow, none = json.loads(done.stdout)
    assert (ours["ratio"], ours["ms"], ours["rounds"]) == (1, 4, 3)
    assert (slow["ratio"], slow["low"], slow["bestRatio"], slow["rounds"]) == (15, 10, 10, 2)
    assert "ratio" not in none
