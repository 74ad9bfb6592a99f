"""onnxruntime-training-examples: the web demo of on-device training, and getting-started."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from tests.upstream import getting_started, stubs
from tests.upstream.process import run_script
from tests.upstream.results import Result
from tests.upstream.web_app import train_in_page, write_digits

NAME = "onnxruntime-training-examples"


def run(checkout: Path) -> list[Result]:
    """Run the getting-started sample, the notebook of the web demo, then its page."""
    results = getting_started.run(NAME, checkout)
    demo = checkout / "on_device_training" / "web"
    with tempfile.TemporaryDirectory() as folder:
        program, files = Path(folder) / "mnist.ipynb.py", Path(folder) / "files"
        notebook = json.loads((demo / "offline-step" / "mnist.ipynb").read_text())
        cells = [c["source"] for c in notebook["cells"] if c["cell_type"] == "code"]
        program.write_text("\n\n".join("".join(lines) for lines in cells))
        write_digits(files / "data")
        how = "web demo: artifacts, on `install()`"
        made = run_script(NAME, program, how=how, setup=f"{__name__}:prepare", folder=files)
        how = "web demo: page in Chromium, with the alias"
        app = demo / "web-bundler" / "src" / "App.tsx"
        return [*results, made, train_in_page(NAME, app, files, how=how, accuracy=90)]


def prepare() -> None:
    """Install our API in place of onnxruntime-training, and stand in for netron."""
    import onnxtrain.compat.ort

    onnxtrain.compat.ort.install()
    stubs.install("netron")
