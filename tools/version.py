"""The version: ``python -m tools.version`` compares its copies, ``... 0.3.0`` sets all of them.

It is written once, in ``src/onnxtrain/__init__.py``; files of other systems, which cannot ask
Python, have copies.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ("src/onnxtrain/__init__.py", r'^(__version__ = ")([^"]+)(")')
COPIES = (
    ("web/packages/onnxtrain/package.json", r'^(  "version": ")([^"]+)(")'),
    ("web/package-lock.json", r'(    "packages/onnxtrain": \{\n      "version": ")([^"]+)(")'),
    ("web/package-lock.json", r'(^        "onnxtrain": ")([^"]+)(")'),
    ("web/site/package.json", r'(^    "onnxtrain": ")([^"]+)(")'),
    ("examples/web/react/package.json", r'(^    "onnxtrain": ")([^"]+)(")'),
    ("cpp/CMakeLists.txt", r"^(project\(onnxtrain VERSION )([\d.]+)( )"),
    ("CITATION.cff", r"^(version: )(\S+)($)"),
)


def read(place: tuple[str, str]) -> str:
    """Return the version that stands in a file."""
    path, pattern = place
    match = re.search(pattern, (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)
    if match is None:
        raise SystemExit(f"{path}: no version")
    return match[2]


def differing() -> list[str]:
    """Return the copies that differ from the source."""
    version = read(SOURCE)
    return [f"{p[0]} has {read(p)}, not {version}" for p in COPIES if read(p) != version]


def write(version: str) -> None:
    """Set the version everywhere."""
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise SystemExit(f"not a version: {version}")
    for path, pattern in (SOURCE, *COPIES):
        file = ROOT / path
        text = file.read_text(encoding="utf-8")
        changed = re.sub(pattern, rf"\g<1>{version}\g<3>", text, count=1, flags=re.MULTILINE)
        file.write_text(changed, encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        write(sys.argv[1])
    problems = differing()
    print("\n".join(problems) or read(SOURCE))
    sys.exit(bool(problems))
