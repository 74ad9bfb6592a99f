"""Run commands in a fresh environment that inherits nothing from this one."""

from __future__ import annotations

import os
import shutil
import subprocess
import venv
from collections.abc import Sequence
from pathlib import Path


def run(command: Sequence[str | Path], where: Path, **environment: str) -> str:
    """Return what a command printed; show it and stop if the command fails."""
    done = subprocess.run(
        [str(c) for c in command],
        cwd=where,
        env={**_plain_environment(), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        said = f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        raise SystemExit(f"{' '.join(map(str, command))}\n{said}")
    return done.stdout


def _plain_environment() -> dict[str, str]:
    kept = {n: v for n, v in os.environ.items() if not n.startswith(("PYTHON", "VIRTUAL_ENV"))}
    return {**kept, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def environment(folder: Path, *requirements: str | Path) -> Path:
    """Return the Python of a fresh environment that has some packages."""
    if folder.exists():
        shutil.rmtree(folder)
    venv.create(folder, with_pip=True)
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    if requirements:
        run([python, "-m", "pip", "install", "--quiet", *requirements], folder)
    return python


def empty(folder: Path) -> Path:
    """Return a folder with nothing in it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
