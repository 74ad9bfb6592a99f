"""Processes of a federation on this machine: SuperNodes, Node clients, browser tabs, a door."""

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
    """Return a port that nobody has at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment(home: Path) -> dict[str, str]:
    """Return the variables for Flower's programs; ``home`` is where they keep things."""
    beside = str(Path(sys.executable).parent)
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "PATH": f"{beside}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(p for p in paths if p),
    }


def write_connection(
    home: Path, address: str, authority: Path | None = None, name: str = "lab"
) -> None:
    """Tell ``flwr run`` of a SuperLink by a name; ``authority`` signed its certificate."""
    home.mkdir(parents=True, exist_ok=True)
    safety = "insecure = true" if authority is None else f'root-certificates = "{authority}"'
    own = f'[superlink.{name}]\naddress = "{host_of(address)}"\n{safety}\n'
    text = f'[superlink]\ndefault = "{name}"\n\n{own}'
    (home / "config.toml").write_text(text, encoding="utf-8")


def host_of(address: str) -> str:
    """Return host and port of an address."""
    return address.partition("://")[2]


@contextlib.contextmanager
def process(
    command: Sequence[str | Path], log: Path, variables: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program until the end of the block; it is asked to leave first."""
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
            os.killpg(started.pid, signal.SIGKILL)  # its own children, too
        started.wait()


def supernode(
    address: str, home: Path, log: Path, *options: str, **config: str | int
) -> contextlib.AbstractContextManager:
    """Run a SuperNode with Python's ClientApp."""
    settings = " ".join(f"{k.replace('_', '-')}={json.dumps(v)}" for k, v in config.items())
    command = [flower_program("flower-supernode"), "--superlink", host_of(address)]
    command += [*options, *(["--insecure"] if address.startswith("http://") else [])]
    command += ["--port", str(free_port()), "--node-config", settings]
    return process(command, log, environment(home))


def node_client(
    address: str, artifacts: Path, data: Path, log: Path, *options: str, **variables: str
) -> contextlib.AbstractContextManager:
    """Run a client in Node, with further variables of its environment."""
    command = ["node", PAGES / "node.mjs", address, artifacts, data, *options]
    return process(command, log, {**os.environ, **variables})


def tab(page: str, log: Path) -> contextlib.AbstractContextManager:
    """Open a page in a headless browser."""
    return process(["node", PAGES / "tab.mjs", page], log)


@contextlib.contextmanager
def door(address: str, folders: Mapping[str, Path], log: Path, *options: str) -> Iterator[str]:
    """Run ``onnxtrain federate serve`` before a SuperLink that runs already; give its address."""
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
    """Wait until a program listens."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if started.poll() is not None:
            raise RuntimeError(f"it ended with code {started.returncode}")
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise RuntimeError(f"nobody listens on port {port}")


def page_folders(artifacts: Path, data: Path) -> dict[str, Path]:
    """Return what the page needs, by the path that it has there."""
    return {
        "/artifacts": artifacts,
        "/data": data,
        "/onnxtrain": WEB / "packages" / "onnxtrain" / "dist",
        "/ort": WEB / "node_modules" / "onnxruntime-web" / "dist",
        "/": PAGES,
    }


def flwr_run(project: Path, home: Path, log: Path, timeout: float, **config: object) -> None:
    """Run ``flwr run`` to its end.

    Raises:
        RuntimeError: the run failed, or did not end in time.
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
        raise RuntimeError(f"flwr run ended with {code}:\n{text[-4000:]}")


def write_columns(path: Path, columns: Mapping[str, np.ndarray]) -> None:
    """Write data as JavaScript's clients read it."""
    listed = {n: {"dims": a.shape, "data": a.ravel().tolist()} for n, a in columns.items()}
    path.write_text(json.dumps(listed), encoding="utf-8")
