"""A directory of artifacts is replaced such that a whole one is there at any moment.

The manifest names all other files, so renaming one manifest over another is the moment at which new
artifacts take the place of old ones. The names they should have are taken until then. Hence the new
files first get names of their own, with a manifest that says so. Once that one is in place, the
proper names are free, and are written the same way.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from onnxtrain.artifacts.large_files import Content
from onnxtrain.artifacts.signature import is_model_name
from onnxtrain.errors import CheckpointError
from onnxtrain.graph.io.atomic import Writer, content, sweep, write_files
from onnxtrain.graph.io.regular_file import read_regular
from onnxtrain.manifest import Manifest

MANIFEST = "manifest.json"
SPARE = ".saving-"
"""In front of the names that files have until their proper names are free."""

Assembled = Callable[[str], tuple[dict[str, Content], Manifest]]
"""From the prefix of file names to the files, the manifest last, and the manifest."""


def write_directory(folder: Path, prefix: str, assembled: Assembled) -> Manifest:
    """Write artifacts over those that may be there; return the manifest.

    Raises:
        SaveError: the file system refuses; the directory has the old or the new artifacts.
    """
    path = folder / f"{prefix}{MANIFEST}"
    old = _named_by(path)
    if old is None or any(not name.startswith(SPARE) for name in old):
        _write_spare(path, assembled(f"{SPARE}{prefix}")[0])
        unused = old or set()
    else:
        unused = _listing(folder) if old else set()  # a killed save came as far as this
    _remove(folder, (name for name in unused if _is_ours(name, prefix)))
    files, manifest = assembled(prefix)
    _write(path, files)
    spare = {f"{SPARE}{name}" for name in files}
    _remove(folder, spare.union(name for name in old or () if name.startswith(SPARE)))
    return manifest


def _write_spare(path: Path, files: dict[str, Content]) -> None:
    try:
        _write(path, files)
    except BaseException:
        # The manifest may have been renamed, and only what came after it went wrong.
        _remove(path.parent, files.keys() - (_named_by(path) or set()))
        raise


def _write(path: Path, files: dict[str, Content]) -> None:
    *data, (_, manifest) = files.items()
    sweep(path.parent, [path.name, *files])
    label = str(path.parent)
    write_files(label, {str(path.parent / n): _writer(raw) for n, raw in data}, guard=False)
    write_files(label, {str(path): _writer(manifest)})


def _writer(what: Content) -> Writer:
    return content(what) if isinstance(what, bytes) else what


def _named_by(path: Path) -> set[str] | None:
    """Return the files that a manifest names: none if there is none, ``None`` if nobody knows."""
    try:
        manifest = Manifest.from_json(read_regular(path))
    except FileNotFoundError:
        return set()
    except (OSError, CheckpointError):
        return None
    return {*(m.file for m in manifest.models), *manifest.files, manifest.checkpoint}


def _listing(folder: Path) -> set[str]:
    with suppress(OSError):
        return set(os.listdir(folder))
    return set()


def _is_ours(name: str, prefix: str) -> bool:
    """Return whether a name is one that `save` gives, so that it may be removed."""
    return name == f"{prefix}weights.bin" or is_model_name(name, prefix)


def _remove(folder: Path, names: Iterable[str]) -> None:
    for name in sorted(names):
        with suppress(OSError):
            os.unlink(folder / name)
