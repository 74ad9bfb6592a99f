"""The runner of a pack for runtimes of Python."""

from __future__ import annotations

import subprocess
import sys
from importlib import resources
from pathlib import Path

from onnxtrain.errors import MissingExtraError, ProbeError
from onnxtrain.lowering.probe.bundle import read_bundle

RUNTIMES = ("onnxruntime", "tract", "opencv")
_MISSING = 3  # exit code of the runner


def run_pack(
    folder: Path, runtime: str, output: Path, *, provider: str = "", python: str = sys.executable
) -> str:
    """Run every node of a pack, write what became of each, and return the counts in words.

    Args:
        folder: of the pack.
        runtime: one of ``RUNTIMES``.
        output: the results, a JSON file.
        provider: of onnxruntime; a node that it leaves to the CPU counts as refused.
        python: the interpreter that has the runtime.

    Raises:
        MissingExtraError: if the runtime is not installed.
        ProbeError: if there is no such pack or runtime, or the runtime does not start.
    """
    if runtime not in RUNTIMES:
        raise ProbeError(
            f"no such runtime: {runtime!r}\nhint: one of {', '.join(RUNTIMES)}; for those of "
            "JavaScript: node probe.mjs, or probe.html, in the pack"
        )
    if provider and runtime != "onnxruntime":
        raise ProbeError(f"{runtime} has no providers\nhint: leave out --provider {provider}")
    read_bundle(folder)
    script = resources.files("onnxtrain.lowering.probe") / "files" / "probe.py"
    with resources.as_file(script) as path:
        command = [python, path, runtime, "--pack", folder, "-o", output, f"--provider={provider}"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            raise ProbeError(f"{python}: cannot be run: {error}") from error
    said = done.stdout.strip()
    if done.returncode == _MISSING:
        raise MissingExtraError(said)
    if done.returncode:
        last = (said or done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise ProbeError(f"{runtime} cannot be probed: {last}")
    return said
