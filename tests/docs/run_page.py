"""Run the blocks of a page in this folder: ``python -m tests.docs.run_page docs/quickstart.md``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.docs.blocks import Block, blocks


def run(block: Block, scope: dict[str, Any], folder: Path) -> None:
    """Run a block; those of one page share names and files."""
    if block.kind == "python":
        code = "\n" * block.line + block.code
        exec(compile(code, block.page, "exec"), scope)
    elif block.kind == "json":
        json.loads(block.code)
    elif block.kind == "sh":
        command = ["bash", "-euo", "pipefail", "-c", block.code]
        subprocess.run(command, cwd=folder, env=environment(folder), check=True, timeout=600)
    else:
        raise SystemExit(f"nothing runs {block.kind}; say why before the block")


def environment(folder: Path) -> dict[str, str]:
    """``onnxtrain`` and ``python`` are those of the tests."""
    tools = folder / ".tools"
    if not tools.exists():
        tools.mkdir()
        (tools / "onnxtrain").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m onnxtrain "$@"\n')
        (tools / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        for path in tools.iterdir():
            path.chmod(0o755)
    return {**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}


def main(page: str) -> None:
    """Run what the page does not say otherwise about."""
    scope: dict[str, Any] = {"__name__": "page"}
    for block in blocks(page):
        if not block.why:
            print(f"{page}, line {block.line}: {block.kind}", flush=True)
            run(block, scope, Path.cwd())


if __name__ == "__main__":
    main(sys.argv[1])
