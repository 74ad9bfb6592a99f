"""The contract with Flower, against every release that the extra allows.

python -m tests.flower.versions             # each in an environment of its own
python -m tests.flower.versions 1.42.0      # one of them
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.flower.environment import ROOT, python, variables

RELEASES = ("1.40.0", "1.41.0", "1.42.0")
CHECKS = ("contract", "rounds", "replies", "federation", "attacks")
"""Bytes, schemas and calls; the apps; a run with three kinds of client, and one with bad ones."""


def outcome(release: str) -> str:
    """Return what became of the checks with a release."""
    try:
        interpreter = python(release=release)
    except subprocess.CalledProcessError:
        return "cannot be installed; pip says why above"
    command = [interpreter, "-m", "pytest", "-q", "-n0", "-p", "no:randomly", "-m", "not full"]
    command += ["-o", "python_files=check_*.py", "-o", "filterwarnings=default"]
    inside = Path(__file__).with_name("inside")
    command += [str(inside / f"check_{name}.py") for name in CHECKS]
    done = subprocess.run(
        command, cwd=ROOT, env=variables(interpreter), capture_output=True, text=True
    )
    if done.returncode:
        print(done.stdout[-8000:], done.stderr[-4000:], sep="\n", file=sys.stderr)
    return done.stdout.strip().splitlines()[-1]


if __name__ == "__main__":
    for version in sys.argv[1:] or RELEASES:
        print(f"flwr {version}: {outcome(version)}", flush=True)
