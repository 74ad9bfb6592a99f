"""The page about PyTorch runs as written, in Python and in onnxruntime-web."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "from-pytorch.md").read_text()
WEB = ROOT / "web" / "node_modules" / "onnxruntime-web"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def test_python_and_javascript_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    scope: dict = {"__name__": "page"}
    for block in blocks("python"):
        exec(compile(block, "from-pytorch.md", "exec"), scope)
    assert scope["step"].loss > 0
    assert [y.name for y in scope["encoder"].graph.outputs] == ["logits"]
    assert (tmp_path / "encoder.onnx").exists()
    assert (tmp_path / "encoder_too.onnx").exists()
    node = shutil.which("node")
    if node is None or not WEB.exists():
        pytest.skip("node or web/node_modules is not installed: the page's JavaScript is not run")
    script = tmp_path / "page.mjs"
    script.write_text(blocks("js")[0])
    (tmp_path / "node_modules").symlink_to(ROOT / "web" / "node_modules")
    done = subprocess.run(
        [node, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=1200, check=False
    )
    assert done.returncode == 0, done.stderr
    losses = json.loads(done.stdout.strip().splitlines()[-1])
    assert losses["last"] < 0.8 * losses["first"]
