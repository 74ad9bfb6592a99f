"""The page of runtimes that ``onnxtrain lower`` and ``check`` know."""

from __future__ import annotations

import json
from pathlib import Path

from onnxtrain import profiles

FOLDER = Path(profiles.__file__).parent


def page() -> str:
    """Return a table of all profiles."""
    rows = ["| profile | opset | operators | where it comes from |", "|---|---|---|---|"]
    for path in sorted(FOLDER.glob("*.json")):
        profile = json.loads(path.read_text(encoding="utf-8"))
        low, high = profile["opset"]["ai.onnx"]
        source = str(profile.get("probed") or profile.get("source", "")).replace("|", "\\|")
        count = len(profile.get("ops", {}))
        rows.append(f"| `{path.stem}` | {low} to {high} | {count or 'all'} | {source} |")
    return (
        "# Profiles of runtimes\n\n"
        "What `onnxtrain lower --profile` writes for, and `onnxtrain check --profile` judges by. "
        "[Lowering](../lowering.md) shows how to use them, and how to probe a runtime.\n\n"
        + "\n".join(rows)
        + "\n"
    )
