"""A cache of builds on disk: the second build of a request reads its models from a file.

``~/.cache/onnxtrain/builds`` has a file per build, named by a hash of all that the result depends
on: the model, the arguments, the targets and the versions of the libraries. The environment
variable ``ONNXTRAIN_CACHE`` names another folder; ``ONNXTRAIN_CACHE=0`` turns the cache off.

Builds that a hash cannot describe are not cached: functions as losses, rules and losses that the
user registered, models in memory with attributes that no file has, weights in other files.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import importlib.metadata
import logging
import os
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from onnxtrain.artifacts.directory import Artifacts
from onnxtrain.autodiff.rule_registry import USER_RULES
from onnxtrain.checkpoint import from_file, to_bytes
from onnxtrain.errors import CheckpointError
from onnxtrain.losses import LOSSES
from onnxtrain.losses.metrics import METRICS
from onnxtrain.manifest import Manifest
from onnxtrain.optim.optimizer import OPTIMIZERS
from onnxtrain.targets import BUNDLES, TARGETS

LOGGER = logging.getLogger("onnxtrain.build")
MAX_FILE_BYTES = 256 << 20
"""Larger models and builds are not cached."""
MAX_TOTAL_BYTES = 2 << 30
"""Beyond this size, the files that were not used for the longest time are removed."""
_EXTERNAL = b"location"  # of a tensor in another file
_MODEL, _STATE, _VALUE = "model/", "state/", "value/"
_SUFFIX = ".safetensors"
_LIBRARIES = ("numpy", "onnx", "onnx-ir", "onnxruntime", "onnxruntime-gpu")


def folder() -> Path | None:
    """Return the folder of the cache, ``None`` if it is turned off."""
    name = os.environ.get("ONNXTRAIN_CACHE", "")
    if name == "0":
        return None
    if name:
        return Path(name)
    with suppress(RuntimeError):  # no home
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "onnxtrain/builds")
    return None


def path_of(model: Any, arguments: Mapping[str, Any]) -> Path | None:
    """Return the file for a build; ``None`` if it cannot be cached."""
    where = folder()
    registered = {c for table in (LOSSES, METRICS, OPTIMIZERS) for c in table.values()}
    if where is None or USER_RULES or not all(_is_own(c) for c in registered):
        return None
    try:
        data = _model_bytes(model)
        rest = {k: v for k, v in arguments.items() if k != "model"}
        names = BUNDLES.get(rest["target"], (rest["target"],))
        targets = [TARGETS[n] for n in names]
        request = "\n".join([_describe(rest), _describe(targets), *_versions()])
    except (_NotCacheableError, OSError, KeyError):
        return None
    digest = hashlib.sha256(request.encode())
    digest.update(hashlib.sha256(data).digest())
    return where / f"{digest.hexdigest()}{_SUFFIX}"


def read(path: Path | None) -> Artifacts | None:
    """Return a cached build, ``None`` if there is none or its file is damaged."""
    if path is None:
        return None
    try:
        with path.open("rb") as file:
            tensors, meta = from_file(file)
        manifest = Manifest.from_json(meta["manifest"])
        zeros = {n: np.zeros(shape, dtype) for n, (dtype, shape) in meta["zeros"].items()}
        os.utime(path)
    except (OSError, KeyError, CheckpointError):
        return None

    def named(prefix: str) -> dict[str, np.ndarray]:
        return {n.removeprefix(prefix): a for n, a in tensors.items() if n.startswith(prefix)}

    LOGGER.info("read the build from %s", path)
    protos, values, state = named(_MODEL), named(_VALUE), named(_STATE) | zeros
    return Artifacts(
        manifest,
        {n: onnx.ModelProto.FromString(protos[n].tobytes()) for n in meta["models"]},
        {w.name: values[w.name] for w in (*manifest.parameters, *manifest.buffers)},
        {s.name: state[s.name] for s in manifest.state},
    )


def write(path: Path | None, artifacts: Artifacts) -> None:
    """Store a build, unless it is large or the folder cannot be written."""
    if path is None or artifacts.shared is not None:
        return
    zeros = {n: a for n, a in artifacts.state.items() if not a.any()}
    tensors = {f"{_VALUE}{n}": a for n, a in artifacts.values.items()}
    tensors |= {f"{_STATE}{n}": a for n, a in artifacts.state.items() if n not in zeros}
    tensors |= {
        f"{_MODEL}{n}": np.frombuffer(m.SerializeToString(), np.uint8)
        for n, m in artifacts.models.items()
    }
    if sum(a.nbytes for a in tensors.values()) > MAX_FILE_BYTES:
        return
    meta = {
        "manifest": artifacts.manifest.to_json(hashes=False),
        "models": list(artifacts.models),
        "zeros": {n: (a.dtype.name, a.shape) for n, a in zeros.items()},
    }
    content = to_bytes(tensors, meta)
    partial = path.with_suffix(f".{os.getpid()}")
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial.write_bytes(content)
        partial.replace(path)
        _remove_oldest(path.parent)


def _remove_oldest(where: Path) -> None:
    files = sorted(((p.stat().st_mtime, p) for p in where.glob(f"*{_SUFFIX}")), reverse=True)
    total = 0
    for _, path in files:
        total += path.stat().st_size
        if total > MAX_TOTAL_BYTES:
            path.unlink(missing_ok=True)


class _NotCacheableError(Exception):
    """A hash cannot describe a value."""


def _model_bytes(model: Any) -> bytes:
    if isinstance(model, onnx.ModelProto):
        data = model.SerializeToString(deterministic=True)
    elif isinstance(model, (str, os.PathLike)):
        path = Path(model)
        if not path.is_file() or path.stat().st_size > MAX_FILE_BYTES:
            raise _NotCacheableError
        data = path.read_bytes()
    elif isinstance(model, bytes):
        data = model
    else:
        raise _NotCacheableError
    if len(data) > MAX_FILE_BYTES or _EXTERNAL in data:
        raise _NotCacheableError
    return data


def _is_own(kind: type) -> bool:
    return kind.__module__.split(".")[0] == "onnxtrain"


def _describe(value: Any) -> str:
    """Return a text that is equal for equal values only.

    Raises:
        _NotCacheableError: for functions, models and objects of classes of the user.
    """
    if isinstance(value, str) and value.endswith(".onnx"):  # a loss in another file
        raise _NotCacheableError
    if value is None or isinstance(value, (bool, int, float, str, enum.Enum)):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{_describe(k)}:{_describe(v)}" for k, v in value.items()) + "}"
    if isinstance(value, AbstractSet):
        return "set(" + ",".join(sorted(map(_describe, value))) + ")"
    if isinstance(value, Sequence):
        return "[" + ",".join(map(_describe, value)) + "]"
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and _is_own(type(value)):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return f"{type(value).__qualname__}{_describe(fields)}"
    raise _NotCacheableError


@functools.cache
def _versions() -> tuple[str, ...]:
    """Return the versions of the libraries, and a hash of the source of this one."""
    found = []
    for name in _LIBRARIES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name} {importlib.metadata.version(name)}")
    source = hashlib.sha256()
    package = Path(__file__).parents[1]
    for path in sorted(p for p in package.rglob("*") if p.suffix in (".py", ".json")):
        source.update(path.read_bytes())
    return *found, source.hexdigest()
