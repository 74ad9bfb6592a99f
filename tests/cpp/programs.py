"""Builds the programs under ``cpp/`` once per machine and kind, and runs them."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cpp import ort_root

SOURCE = ort_root.ROOT / "cpp"
_CACHE = ort_root.ROOT / ".cache" / "cpp"
_OPTIONS = {
    "plain": ["-DCMAKE_CXX_FLAGS=-O1"],
    "sanitized": ["-DONNXTRAIN_SANITIZE=ON", "-DONNXTRAIN_C_API=OFF"],
    "release": ["-DCMAKE_BUILD_TYPE=Release"],
}


def why_not(*tools: str) -> str | None:
    """Return what is missing to build and run the programs, if anything is."""
    missing = [tool for tool in ("g++", "cmake", *tools) if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} is not installed"
    if ort_root.headers() is None:
        return "no onnxruntime headers (ORT_INCLUDE)"
    return None


def need(*tools: str) -> None:
    """Skip the test where something is missing, by name."""
    reason = why_not(*tools)
    if reason is not None:
        pytest.skip(reason)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Let one process build; others wait and find everything done."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def built(kind: str = "plain", target: str = "all") -> Path:
    """Return the folder with the built programs of a kind."""
    need()
    return _built(kind, target)


@functools.cache
def _built(kind: str, target: str) -> Path:
    include = ort_root.headers()
    assert include is not None
    folder = _CACHE / f"{kind}-{hashlib.sha256(str(SOURCE).encode()).hexdigest()[:8]}"
    with _alone(folder):
        root = ort_root.make(folder / "ort", ort_root.wheel_library(), include)
        settings = [f"-DORT_ROOT={root}", "-DONNXTRAIN_TESTS=ON", "-DCMAKE_BUILD_TYPE=None"]
        settings += _java() if kind == "plain" else []
        _call(["cmake", "-S", str(SOURCE), "-B", str(folder), *settings, *_OPTIONS[kind]])
        _call(["cmake", "--build", str(folder), "-j2", "--target", target])
    return folder


@functools.cache
def web_package() -> Path:
    """Return the built npm package; nobody builds it while somebody else reads it."""
    folder = ort_root.ROOT / "web/packages/onnxtrain"
    if not (ort_root.ROOT / "web/node_modules/onnxruntime-node").is_dir():
        pytest.skip("web/node_modules is not installed (npm ci)")
    with _alone(_CACHE / "web"):
        entry = folder / "dist/index.js"
        newest = max(path.stat().st_mtime for path in folder.glob("src/*.ts"))
        if not entry.exists() or entry.stat().st_mtime < newest:
            _call(
                ["npm", "--prefix", str(ort_root.ROOT / "web"), "run", "build", "-w", "onnxtrain"]
            )
    return folder


def _java() -> list[str]:
    compiler = shutil.which("javac")
    if compiler is None:
        return ["-DONNXTRAIN_JNI=OFF"]
    return ["-DONNXTRAIN_JNI=ON", f"-DJAVA_HOME={Path(compiler).resolve().parents[1]}"]


def _call(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]


def run(
    program: Path | str,
    *arguments: object,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
    fails: bool = False,
) -> str:
    """Return what a program prints; with ``fails``, its error, for it must have one."""
    done = subprocess.run(
        [str(program), *(str(a) for a in arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
        cwd=cwd,
        env={**os.environ, **(env or {})},
    )
    assert (done.returncode == 1) if fails else (done.returncode == 0), (
        f"{done.returncode}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    )
    return done.stderr if fails else done.stdout


def driver(kind: str = "plain") -> Path:
    """Return the program that answers the tests' questions."""
    return built(kind, "all" if kind == "plain" else "driver") / "tests" / "driver"
