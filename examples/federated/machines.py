"""Processes of a local federation: SuperNodes, Node clients, browser tabs, a proxy."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from onnxtrain.federation.serve import flower_program

ROOT = Path(__file__).resolve().parents[2]
WEB = ROOT / "web"
PAGES = WEB / "federated"


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment(home: Path) -> dict[str, str]:
    """Return the environment variables for Flower's programs, with ``home`` as FLWR_HOME."""
    binaries = str(Path(sys.executable).parent)
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(p for p in paths if p),
    }


def write_connection(
    home: Path, address: str, authority: Path | None = None, name: str = "lab"
) -> None:
    """Write the connection ``name`` for ``flwr run``; ``authority`` is its CA certificate."""
    home.mkdir(parents=True, exist_ok=True)
    security = "insecure = true" if authority is None else f'root-certificates = "{authority}"'
    own = f'[superlink.{name}]\naddress = "{host_of(address)}"\n{security}\n'
    text = f'[superlink]\ndefault = "{name}"\n\n{own}'
    (home / "config.toml").write_text(text, encoding="utf-8")


def host_of(address: str) -> str:
    """Return host and port of an address."""
    return address.partition("://")[2]


@contextlib.contextmanager
def process(
    command: Sequence[str | Path], log: Path, variables: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program during the block; it gets SIGTERM first, then SIGKILL."""
    with log.open("ab") as output:
        started = subprocess.Popen(
            list(command), stdout=output, stderr=output, env=variables, start_new_session=True
        )
    try:
        yield started
    finally:
        if started.poll() is None:
            started.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            started.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)  # including its children
        started.wait()


def supernode(
    address: str, home: Path, log: Path, *options: str, **config: str | int
) -> contextlib.AbstractContextManager:
    """Run a SuperNode with the Python ClientApp."""
    settings = " ".join(f"{k.replace('_', '-')}={json.dumps(v)}" for k, v in config.items())
    command = [flower_program("flower-supernode"), "--superlink", host_of(address)]
    command += [*options, *(["--insecure"] if address.startswith("http://") else [])]
    command += ["--port", str(free_port()), "--node-config", settings]
    return process(command, log, environment(home))


def node_client(
    address: str, artifacts: Path, data: Path, log: Path, *options: str, **variables: str
) -> contextlib.AbstractContextManager:
    """Run a client in Node with additional environment variables."""
    command = ["node", PAGES / "node.mjs", address, artifacts, data, *options]
    return process(command, log, {**os.environ, **variables})


def tab(page: str, log: Path) -> contextlib.AbstractContextManager:
    """Open a page in a headless browser."""
    return process(["node", PAGES / "tab.mjs", page], log)


@contextlib.contextmanager
def proxy(address: str, folders: Mapping[str, Path], log: Path, *options: str) -> Iterator[str]:
    """Run ``onnxtrain federate serve`` in front of a running SuperLink; yield its URL."""
    port = free_port()
    command = [sys.executable, "-m", "onnxtrain", "federate", "serve", "--port", str(port)]
    command += ["--superlink-address", address, *options]
    for path, folder in folders.items():
        command += ["--folder", f"{path}={folder}"]
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
    with process(command, log, {**os.environ, **paths}) as started:
        wait_for_port(port, started)
        yield f"{'https' if '--certificate' in options else 'http'}://127.0.0.1:{port}"


def wait_for_port(port: int, started: subprocess.Popen[bytes], seconds: float = 120) -> None:
    """Wait until a program listens on a port."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if started.poll() is not None:
            raise RuntimeError(f"the program exited with code {started.returncode}")
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise RuntimeError(f"timeout: nothing listens on port {port}")


def page_folders(artifacts: Path, data: Path) -> dict[str, Path]:
    """Return the directories that the page needs, by URL path."""
    return {
        "/artifacts": artifacts,
        "/data": data,
        "/onnxtrain": WEB / "packages" / "onnxtrain" / "dist",
        "/ort": WEB / "node_modules" / "onnxruntime-web" / "dist",
        "/": PAGES,
    }


def flwr_run(project: Path, home: Path, log: Path, timeout: float, **config: object) -> None:
    """Run ``flwr run`` until it finishes.

    Raises:
        RuntimeError: the run failed or timed out.
    """
    command = [flower_program("flwr"), "run", str(project), "lab", "--stream"]
    if config:
        pairs = (f"{k.replace('_', '-')}={json.dumps(v)}" for k, v in config.items())
        command += ["--run-config", " ".join(pairs)]
    with process(command, log, environment(home)) as started:
        try:
            code = started.wait(timeout)
        except subprocess.TimeoutExpired:
            code = -1
    text = log.read_text(encoding="utf-8", errors="replace")
    if code or "Strategy execution finished" not in text:
        raise RuntimeError(f"flwr run exited with {code}:\n{text[-4000:]}")


def write_columns(path: Path, columns: Mapping[str, np.ndarray]) -> None:
    """Write data as JSON for the JavaScript clients."""
    listed = {n: {"dims": a.shape, "data": a.ravel().tolist()} for n, a in columns.items()}
    path.write_text(json.dumps(listed), encoding="utf-8")
