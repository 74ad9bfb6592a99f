"""The oldest and the newest releases that ``pyproject.toml`` allows: ``make lower-bounds``.

``python tests/lower_bounds.py FOLDER [oldest|newest]`` installs them into environments of their
own and runs :data:`FAST` and :data:`EXTRA` there. It needs only the standard library. The CPU build
of torch is enough; ``PIP_EXTRA_INDEX_URL`` names an index that has it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ("hypothesis", "jsonschema", "pytest", "pytest-randomly", "pytest-xdist", "safetensors")
EXTRAS = ("cpu", "torch")
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
EXTRA = ("tests/torch/test_values_across_releases.py",)
"""Values compared with torch: batch normalization, dropout, LSTM, attention."""


def required(extras: Sequence[str] = ()) -> list[str]:
    """Return the requirements of the package, and those of extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    wanted = list(project["dependencies"])
    for extra in extras:
        wanted += project["optional-dependencies"][extra]
    return wanted


def oldest(extra: str | None = None) -> list[str]:
    """Return ``name==version`` for every requirement, and those of an extra."""
    return [_oldest(text) for text in required([] if extra is None else [extra])]


def _oldest(requirement: str) -> str:
    match = re.fullmatch(r"([\w-]+)[>=]=([\d.]+)(,<[\d.]+)?", requirement)
    if match is None:
        raise ValueError(f"no lower bound: {requirement}")
    version = match[2] if match[2].count(".") > 1 else match[2] + ".0"
    return f"{match[1]}=={version}"


def run(folder: Path, which: str) -> int:
    """Make an environment if it is not there, and run the tests in it."""
    python = folder.resolve() / which / "bin" / "python"
    wanted = required(EXTRAS)
    if which == "oldest":
        wanted = [_oldest(text) for text in wanted]
    if not python.exists():
        venv.create(python.parents[1], with_pip=True)
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    upgrade = ["--upgrade", "--upgrade-strategy", "eager"] if which == "newest" else []
    subprocess.run([*install, *upgrade, *wanted, *TOOLS], check=True)
    names = {re.split(r"[<>=]", text)[0] for text in wanted}
    query = "import sys; from importlib.metadata import version as v\n"
    query += "print(*(f'{n}=={v(n)}' for n in sys.argv[1:]))"
    print(f"{which}:", flush=True)
    subprocess.run([python, "-c", query, *sorted(names)], check=True)
    command = [python, "-m", "pytest", "-q", "-n", "2", *FAST, *EXTRA]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": "src"}).returncode


def main(folder: Path, *which: str) -> int:
    """Run the tests with the oldest and the newest releases; return the number of failures."""
    return sum(run(folder, name) != 0 for name in which or ("oldest", "newest"))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
