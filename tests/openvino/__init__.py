"""Training on OpenVINO's execution provider, in an environment of its own.

The wheel ``onnxruntime-openvino`` contains onnxruntime, so it cannot be installed beside it.
:func:`python_path` unpacks it into a folder, which comes before ours on the path of a process.
``inside.py`` runs in such a process.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".cache" / "openvino"
WHEEL = "onnxruntime-openvino==1.24.1"


def python_path() -> str:
    """Return the path of modules for a process with OpenVINO; the wheel is installed if needed."""
    site, ready = FOLDER / "site", FOLDER / ".ready"
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several workers may ask at once
        if not ready.exists() or ready.read_text(encoding="utf-8") != WHEEL:
            shutil.rmtree(site, ignore_errors=True)
            install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
            subprocess.run([*install, "--target", site, WHEEL], check=True)
            ready.write_text(WHEEL, encoding="utf-8")
    return os.pathsep.join(map(str, (site, ROOT / "src", ROOT)))
