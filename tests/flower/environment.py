"""The environment that tests with Flower run in.

Flower's releases want older typer, rich, packaging and protobuf than the tools of this project. So
it has a virtual environment under ``.cache``, which sees ours behind its own packages:

    python -m tests.flower.environment      # makes it, and prints its Python
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".cache" / "flower"
REQUIREMENTS = Path(__file__).with_name("requirements.txt")
ALONE = ["opacus==1.6.0"]
"""Without what it needs: torch and the rest are in our environment."""


SIMULATION = "ray==2.55.1"
"""What simulations need besides, as the release of Flower wants it."""


def python(extras: str = "", release: str = "") -> Path:
    """Return the Python of the environment, which is made if it is not as it should be.

    ``FLOWER_PYTHON`` names another one that has Flower.

    Args:
        extras: one more package, in an environment of its own.
        release: of Flower, if another than that of the requirements.
    """
    given = os.environ.get("FLOWER_PYTHON")
    if given:
        return Path(given)
    wanted = REQUIREMENTS.read_text(encoding="utf-8").split()
    if release:
        wanted = [f"flwr=={release}", *(w for w in wanted if not w.startswith("flwr=="))]
    wanted += [extras] if extras else []
    beside = sysconfig.get_paths()["purelib"]
    folder = FOLDER / "-".join(["venv", *filter(None, [extras.partition("=")[0], release])])
    ready, mark = folder / ".ready", "\n".join([*wanted, *ALONE, beside])
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several workers may ask at once
        if not ready.exists() or ready.read_text(encoding="utf-8") != mark:
            venv.create(folder, with_pip=True, clear=True)
            interpreter = folder / "bin" / "python"
            install = [interpreter, "-m", "pip", "install", "--quiet"]
            install.append("--disable-pip-version-check")
            subprocess.run([*install, *wanted], check=True)
            subprocess.run([*install, "--no-deps", *ALONE], check=True)
            own = subprocess.run(
                [interpreter, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"],
                check=True,
                capture_output=True,
                text=True,
            ).stdout.strip()
            Path(own, "ours.pth").write_text(beside + "\n", encoding="utf-8")
            ready.write_text(mark, encoding="utf-8")
    return folder / "bin" / "python"


def variables(interpreter: Path) -> dict[str, str]:
    """Return the variables that programs of the environment need."""
    return {
        **os.environ,
        "PATH": f"{interpreter.parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
        "OMP_NUM_THREADS": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
    }


if __name__ == "__main__":
    print(python(*sys.argv[1:]))
