"""The machine and software of a run."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import onnxruntime


def facts() -> dict[str, Any]:
    """Return date, processor, memory, load and versions."""
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGESIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "load_before": [round(x, 2) for x in os.getloadavg()],
        "commit": _commit(),
        "versions": {
            **{n: version(n) for n in ("onnxtrain", "onnx", "onnx-ir")},
            # The imported one: onnxruntime and onnxruntime-gpu may be installed side by side.
            "onnxruntime": onnxruntime.__version__,
        },
    }


def _cpu() -> str:
    fields: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    flags = fields.get("flags", "").split()
    width = next((f for f in ("avx512f", "avx2", "avx") if f in flags), "no avx")
    name = fields.get("model name", platform.processor())
    family, model = fields.get("cpu family"), fields.get("model")
    return f"{name} (family {family} model {model}, {width})" if family else name


def _commit() -> str:
    """Return the commit, with a mark if code that is timed has changed since."""
    commit = _git("rev-parse", "--short", "HEAD")
    code = ["src", "benchmarks", ":!benchmarks/results"]
    changed = _git("status", "--porcelain", "--", *code)
    return f"{commit or 'unknown'}{'-dirty' if changed else ''}"


def _git(*words: str) -> str:
    root = Path(__file__).parents[1]
    done = subprocess.run(["git", *words], capture_output=True, text=True, cwd=root, check=False)
    return done.stdout.strip()


def version(name: str) -> str:
    """Return the version of an installed package."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
