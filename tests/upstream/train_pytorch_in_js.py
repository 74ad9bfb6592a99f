"""train-pytorch-in-js: both export programs, and the page on stock onnxruntime-web."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from tests.upstream import stubs
from tests.upstream.process import run_script
from tests.upstream.results import Result
from tests.upstream.web_app import train_in_page, write_digits

NAME = "train-pytorch-in-js"
LAUNCHER = "import runpy; runpy.run_module({!r}, run_name='__main__')"
OPTIMIZER = """
from mnist.model import MnistNet
from onnxtrain.torch import export_optimizer_graph

model = MnistNet(is_export_mode=True)
export_optimizer_graph(model.named_parameters(), "adam", "mnist_optimizer_graph.onnx")
"""


def run(checkout: Path) -> list[Result]:
    """Export both examples, replace the optimizer graph, and train in the page."""
    results = []
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder) / "files"
        write_digits(files / "data" / "MNIST" / "raw")
        options = {
            "setup": f"{__name__}:prepare",
            "folder": files,
            "environment": {"PYTHONPATH": str(checkout / "export")},
        }
        for module in ("example", "mnist.example"):
            program = Path(folder) / "launcher.py"
            program.write_text(LAUNCHER.format(module))
            done = run_script(NAME, program, how="export, on `install()`", **options)
            results.append(replace(done, program=f"{module.replace('.', '/')}.py"))
        program = Path(folder) / "export_optimizer_graph.py"
        program.write_text(OPTIMIZER)
        results.append(
            run_script(NAME, program, how="the optimizer graph of the migration page", **options)
        )
        app = checkout / "training" / "src" / "App.tsx"
        how = "page in Chromium, on stock onnxruntime-web"
        results.append(
            train_in_page(NAME, app, files, how=how, script="ort.wasm.min.js", accuracy=60)
        )
    return results


def prepare() -> None:
    """Install our API in place of onnxruntime-training, and stand in for torchvision."""
    import onnxtrain.compat.ort

    onnxtrain.compat.ort.install()
    stubs.install("torchvision")
