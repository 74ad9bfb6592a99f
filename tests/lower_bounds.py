"""The oldest releases that ``pyproject.toml`` allows: ``python tests/lower_bounds.py FOLDER``.

``make lower-bounds`` installs them into an environment of their own and runs :data:`FAST` there.
It needs only the standard library.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ("hypothesis", "jsonschema", "pytest", "pytest-randomly", "pytest-xdist", "safetensors")
FAST = (
    *("tests/artifacts/test_checkpoint.py", "tests/artifacts/test_directory.py"),
    *("tests/artifacts/test_vector_models.py", "tests/autodiff/test_scan.py"),
    *("tests/graph/test_load.py", "tests/graph/test_save.py", "tests/graph/test_modes.py"),
    *("tests/graph/test_invalid_nodes.py", "tests/lowering/test_legalize.py"),
    *("tests/lowering/test_budget.py", "tests/runtime/test_feeds.py"),
    *("tests/training/test_labels.py", "tests/training/test_resume_settings.py"),
    *("tests/training/test_checkpoint_metadata.py", "tests/training/test_shown.py"),
)
"""Loading, gradients, a step, files and lowering; none of them needs torch."""


def oldest(extra: str | None = None) -> list[str]:
    """Return ``name==version`` for every requirement, and those of an extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    wanted = list(project["dependencies"])
    if extra is not None:
        wanted += project["optional-dependencies"][extra]
    return [_oldest(text) for text in wanted]


def _oldest(requirement: str) -> str:
    match = re.fullmatch(r"([\w-]+)[>=]=([\d.]+)(,<[\d.]+)?", requirement)
    if match is None:
        raise ValueError(f"no lower bound: {requirement}")
    version = match[2] if match[2].count(".") > 1 else match[2] + ".0"
    return f"{match[1]}=={version}"


def main(folder: Path) -> int:
    """Make the environment if it is not there, and run the tests in it."""
    python = folder.resolve() / "bin" / "python"
    pins = oldest("cpu")
    print(" ".join(pins), flush=True)
    if not python.exists():
        venv.create(folder, with_pip=True)
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, *pins, *TOOLS], check=True)
    command = [python, "-m", "pytest", "-q", "-n", "2", *FAST]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": "src"}).returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
