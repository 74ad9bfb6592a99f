"""Required and forbidden files of wheel, source archive and npm tarball."""

from __future__ import annotations

import re
import tarfile
import zipfile
from email.parser import HeaderParser
from pathlib import Path

NEEDED = {
    "wheel": [
        *("onnxtrain/__init__.py", "onnxtrain/py.typed", "onnxtrain/manifest.schema.json"),
        *("onnxtrain/profiles/ort-web-webgpu.json", "/licenses/LICENSE"),
    ],
    "sdist": [
        "/pyproject.toml",
        "/README.md",
        "/LICENSE",
        "/CHANGELOG.md",
        "/src/onnxtrain/py.typed",
    ],
    "npm": [
        "package/dist/index.js",
        "package/dist/index.d.ts",
        "package/LICENSE",
        "package/README.md",
    ],
}
UNWANTED = re.compile(r"(^|/)(\.venv|\.cache|node_modules|__pycache__|\.git|runs)/|\.pyc$|\.onnx$")
LARGEST = {"wheel": 4 << 20, "sdist": 12 << 20, "npm": 1 << 20}


def names(path: Path) -> list[str]:
    """Return the files of an archive."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as archive:
            return archive.namelist()
    with tarfile.open(path) as archive:
        return archive.getnames()


def problems(kind: str, path: Path) -> list[str]:
    """Return what is wrong with an archive."""
    files = names(path)
    missing = [n for n in NEEDED[kind] if not any(f.endswith(n) for f in files)]
    lines = [f"{path.name}: {n} is missing" for n in missing]
    unwanted = [f for f in files if UNWANTED.search(f) and "/tests/" not in f"/{f}"]
    lines += [f"{path.name}: {f} should not be there" for f in unwanted[:5]]
    if path.stat().st_size > LARGEST[kind]:
        lines.append(f"{path.name}: {path.stat().st_size:,} bytes")
    return lines


def metadata_problems(wheel: Path, version: str) -> list[str]:
    """Return what is wrong with the metadata of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        text = archive.read(name).decode()
    data = HeaderParser().parsestr(text)
    wanted = {"Name": "onnxtrain", "Version": version, "License-Expression": "Apache-2.0"}
    lines = [f"{n} is {data[n]}, not {v}" for n, v in wanted.items() if data[n] != v]
    if data["Description-Content-Type"] != "text/markdown":
        lines.append(f"the description is {data['Description-Content-Type']}")
    relative = re.findall(r"\]\((?!https?://|#)([^)]+)\)", text)
    lines += [f"the description links to {r}, which an index does not have" for r in relative[:3]]
    return lines
