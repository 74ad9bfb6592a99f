"""Find the oldest supported onnxruntime: ``python -m tools.oldest_runtime FOLDER``.

Releases are tried by bisection, with the oldest versions of all other packages, with the fast tests
of ``tests/lower_bounds.py`` (``--tests`` for others). A release that pip cannot install counts as
one that does not work.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import venv
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.lower_bounds import FAST, ROOT, TOOLS, oldest

RELEASES = (
    *("1.17.3", "1.18.1", "1.19.2", "1.20.1", "1.21.1", "1.22.1", "1.23.2", "1.24.1"),
    *("1.25.0", "1.26.0", "1.27.0", "1.28.0", "1.29.0", "1.30.0", "1.31.1"),
)


def first_that_works(releases: Sequence[str], works: Callable[[str], bool]) -> str | None:
    """Return the oldest release that works, if all newer ones do; ``None`` if the last does not.

    >>> tried = []
    >>> first_that_works("abcdefgh", lambda r: tried.append(r) or r >= "d")
    'd'
    >>> len(tried) <= 4
    True
    """
    low, high = 0, len(releases)
    while low < high:
        middle = (low + high) // 2
        if works(releases[middle]):
            high = middle
        else:
            low = middle + 1
    return releases[low] if low < len(releases) else None


def _try(folder: Path, release: str, tests: Sequence[str]) -> bool:
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    pins = [p for p in oldest("cpu") if not p.startswith("onnxruntime==")]
    installed = subprocess.run([*pip, *pins, *TOOLS, f"onnxruntime=={release}"], check=False)
    if installed.returncode:
        print(f"onnxruntime {release}: cannot be installed", flush=True)
        return False
    command = [python, "-m", "pytest", "-x", "-q", "-n0", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": "src"}, check=False)
    print(f"onnxruntime {release}: {'works' if not done.returncode else 'fails'}", flush=True)
    return not done.returncode


def main() -> int:
    """Print the release; exit code 1 if none works."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tests", nargs="+", default=list(FAST))
    parser.add_argument("--releases", nargs="+", default=list(RELEASES))
    options = parser.parse_args()
    folder = options.folder.resolve()
    release = first_that_works(options.releases, lambda r: _try(folder, r, options.tests))
    print(f"the oldest that works: {release}")
    return int(release is None)


if __name__ == "__main__":
    sys.exit(main())
