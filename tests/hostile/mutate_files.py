"""Mutate checkpoints and manifests but keep their digests valid; replace files of a directory."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.hostile.traps import Traps

CHECKPOINT, DIRECTORY = 19, 18  # seed % 20 of these cases
VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 3, 1.5, -0.5, 1e300, 2**31, 2**63, 10**40, "", "x", "abc", "NaN"),
    *("..", "../outside/secret.bin", "a\0b", "toString", [], {}, [1], [[]], [2**62, 2], {"x": 1}),
    *(float("nan"), float("inf"), [1] * 65, [0, 2**63 - 1]),
)
_ZEROS = "0" * 64
_Place = tuple[Any, Any]  # a JSON object or list, and a key or index


def damaged_checkpoint(seed: int, data: bytes) -> bytes:
    """Return a checkpoint with some entries changed and a valid digest."""
    rng = random.Random(seed)
    size = int.from_bytes(data[:8], "little")
    header, rest = json.loads(data[8 : 8 + size]), data[8 + size :]
    meta = json.loads(header["__metadata__"]["onnxtrain"])
    for _ in range(rng.choice((1, 1, 2))):
        change(rng, meta if rng.random() < 0.6 else header)
    if rng.random() < 0.1:
        rest = rest[: rng.randrange(len(rest))]
    if isinstance(meta, dict):
        meta["sha256"] = _ZEROS
    if isinstance(header.get("__metadata__"), dict):
        header["__metadata__"]["onnxtrain"] = json.dumps(meta)
    head = json.dumps(header).encode()
    digest = hashlib.sha256(head + rest).hexdigest()
    head = head.replace(_ZEROS.encode(), digest.encode(), 1)
    return len(head).to_bytes(8, "little") + head + rest


def damage_directory(seed: int, folder: Path, traps: Traps) -> bool:
    """Change the manifest of a directory, or replace one of its files.

    Returns:
        Whether a file of the directory may now be a link.
    """
    rng = random.Random(seed)
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text("utf-8"))
    victim = rng.choice(sorted(p for p in folder.iterdir() if p.name != "manifest.json"))
    match rng.randrange(8):
        case 0:
            replace_file(rng, rng.choice([victim, path]), traps, hard=True)
            return True
        case 1:
            damage_bytes(rng, victim)
            _sign(manifest, victim)
        case _:
            for _ in range(rng.choice((1, 1, 2))):
                change(rng, manifest)
    path.write_text(json.dumps(manifest), "utf-8")
    return False


def replace_file(rng: random.Random, path: Path, traps: Traps, *, hard: bool = False) -> None:
    """Replace a file by a link, a pipe, a folder or an empty file.

    Only ``hard`` makes hard links, which are files with two names and look like any other.
    """
    path.unlink(missing_ok=True)
    secret = traps.outside / "secret.bin"
    match rng.randrange(6):
        case 0:
            path.symlink_to(secret)
        case 1 if hard:
            os.link(secret, path)
        case 2:
            os.mkfifo(path)
        case 3:
            path.symlink_to("/dev/zero")
        case 4:
            path.mkdir()
        case _:
            path.write_bytes(b"")


def damage_bytes(rng: random.Random, path: Path) -> None:
    """Flip some bits of a file, and cut it off perhaps."""
    data = bytearray(path.read_bytes()) or bytearray(1)
    for _ in range(rng.choice((1, 3))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data[: rng.choice((len(data), rng.randrange(len(data))))])


def _sign(manifest: Any, file: Path) -> None:
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    for model in manifest["models"]:
        if model["file"] == file.name:
            model["sha256"] = digest
    if file.name in manifest["files"]:
        manifest["files"][file.name] = digest


def _places(value: Any) -> Iterator[_Place]:
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, part in list(pairs):
        yield value, key
        if isinstance(part, dict | list):
            yield from _places(part)


def change(rng: random.Random, tree: Any) -> None:
    """Remove, copy, rename or replace a part of a JSON tree."""
    places = list(_places(tree))
    if not places:
        return
    parent, key = rng.choice(places)
    match rng.randrange(4):
        case 0:
            del parent[key]
        case 1:
            other, theirs = rng.choice(places)
            parent[key] = json.loads(json.dumps(other[theirs]))
        case 2 if isinstance(parent, dict):
            parent[rng.choice(("x", "__proto__", str(key) + "2"))] = parent.pop(key)
        case _:
            parent[key] = copy.deepcopy(rng.choice(VALUES))  # a later change must not alter it


__all__ = [
    "CHECKPOINT",
    "DIRECTORY",
    "VALUES",
    "change",
    "damage_bytes",
    "damage_directory",
    "damaged_checkpoint",
    "replace_file",
]
