"""Releases that the tests and benchmarks were last run with: ``constraints.txt`` holds them.

>>> pinned("onnxruntime", "onnx")  # doctest: +ELLIPSIS
['onnxruntime==...', 'onnx==...']
"""

from __future__ import annotations

from pathlib import Path

_CONSTRAINTS = Path(__file__).parent.parent / "constraints.txt"


def pinned(*packages: str) -> list[str]:
    """Return pip requirements for packages, at the versions of ``constraints.txt``."""
    lines = _CONSTRAINTS.read_text(encoding="utf-8").splitlines()
    versions = {line.partition("==")[0]: line for line in lines if "==" in line}
    return [versions[package] for package in packages]
