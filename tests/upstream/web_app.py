"""Train with the pages of web programs, in Chromium; ``web_app.mjs`` builds and opens them."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from tests.upstream.process import shorten
from tests.upstream.results import Result

DRIVER = Path(__file__).with_name("web_app.mjs")
MAGIC = {1: 2049, 3: 2051}


def write_digits(folder: Path) -> None:
    """Write scikit-learn's digits, enlarged to 28 x 28 pixels, as the four files of MNIST."""
    from sklearn.datasets import load_digits

    pixels, classes = load_digits(return_X_y=True)
    images = np.kron(np.reshape(pixels, (-1, 8, 8)), np.ones((1, 3, 3)))
    images = np.pad(np.clip(images * 16, 0, 255).astype(np.uint8), ((0, 0), (2, 2), (2, 2)))
    labels = np.asarray(classes).astype(np.uint8)
    folder.mkdir(parents=True)
    # The programs read 6,400 and 1,280 images by default: each image comes several times.
    for name, part in (("train", slice(1437)), ("t10k", slice(1437, None))):
        _write_idx(folder / f"{name}-images-idx3-ubyte", np.tile(images[part], (5, 1, 1)))
        _write_idx(folder / f"{name}-labels-idx1-ubyte", np.tile(labels[part], 5))


def _write_idx(path: Path, values: np.ndarray) -> None:
    sizes = np.array([MAGIC[values.ndim], *values.shape], ">i4")
    path.write_bytes(sizes.tobytes() + values.tobytes())


def train_in_page(
    project: str, app: Path, files: Path, *, how: str, script: str = "", accuracy: float
) -> Result:
    """Press Train and wait for the end; passes if the page reaches an accuracy on the test images.

    Args:
        project: name of the project.
        app: the file with the component.
        files: what the page loads: models and data.
        how: see :class:`Result`.
        script: file of onnxruntime-web that the page loads as a classic script.
        accuracy: in percent.
    """
    name = app.name
    with tempfile.TemporaryDirectory() as out:
        command = ["node", str(DRIVER), str(app), str(files), out, script]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        errors = [line for line in done.stderr.splitlines() if "Error" in line]
        return Result(project, name, "fail", shorten((errors or [done.stderr])[0]), how)
    page = json.loads(lines[-1])
    problems = [text for text in [page["error"], *page["errors"]] if text]
    if problems:
        return Result(project, name, "fail", shorten(problems[0]), how)
    print(f"{project}: {page['status']}", flush=True)
    reached = float(page["status"].partition("%")[0].rpartition(" ")[2].lstrip("("))
    outcome = "pass" if reached >= accuracy else "fail"
    return Result(project, name, outcome, "" if outcome == "pass" else page["status"], how)
