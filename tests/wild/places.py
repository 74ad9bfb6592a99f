"""Locations of third-party files and of their results."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
WILD = Path(os.environ.get("ONNXTRAIN_WILD", ROOT / ".cache" / "wild"))
"""Environments, wheels, files and results; ``ONNXTRAIN_WILD`` puts them elsewhere."""
FILES, WHEELS = WILD / "files", WILD / "wheels"
RESULTS = WILD / "results.json"
MISSING = "not-made.txt"
"""In a producer's folder: a line for each file that it could not make, with the reason."""

__all__ = ["FILES", "MISSING", "RESULTS", "ROOT", "WHEELS", "WILD"]
