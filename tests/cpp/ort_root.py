"""Makes a folder with onnxruntime's headers and the library of the wheel, as CMake wants it.

``python -m tests.cpp.ort_root FOLDER`` makes one for the installed wheel.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import onnxruntime

ROOT = Path(__file__).resolve().parents[2]
HEADER = "onnxruntime_cxx_api.h"
_VENDOR = Path("shared/vendor/onnxruntime/include")


def headers() -> Path | None:
    """Return the folder with onnxruntime's headers, if there is one on this machine."""
    places = [
        Path(os.environ.get("ORT_INCLUDE") or "/nonexistent"),
        ROOT.parent / _VENDOR,
        _main_tree().parent / _VENDOR,
        Path("/usr/include/onnxruntime"),
        Path("/usr/local/include/onnxruntime"),
    ]
    return next((p for p in places if (p / HEADER).is_file()), None)


def _main_tree() -> Path:
    """Return the tree that a linked work tree belongs to."""
    asked = subprocess.run(
        ["git", "rev-parse", "--path-format=absolute", "--git-common-dir"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return Path(asked.stdout.strip() or ROOT / ".git").parent


def wheel_library() -> Path:
    """Return the C library inside the installed wheel."""
    folder = Path(onnxruntime.__file__).parent / "capi"
    return next(folder.glob("libonnxruntime.so.*"))


def make(folder: Path, library: Path, include: Path) -> Path:
    """Return a folder with ``include`` and ``lib``, made of links."""
    (folder / "lib").mkdir(parents=True, exist_ok=True)
    links = {folder / "include": include, folder / "lib/libonnxruntime.so.1": library}
    links[folder / "lib/libonnxruntime.so"] = library
    for link, goal in links.items():
        if not link.is_symlink() or Path(os.readlink(link)) != goal:
            link.unlink(missing_ok=True)
            link.symlink_to(goal)
    return folder


if __name__ == "__main__":
    known = headers()
    if known is None:
        sys.exit("no onnxruntime headers: set ORT_INCLUDE")
    print(make(Path(sys.argv[1]), wheel_library(), known))
