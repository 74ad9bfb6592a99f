"""A SuperLink and its door for pages, started and stopped together."""
# pyright: reportMissingImports=false

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from onnxtrain.errors import BusyError, MissingExtraError, OnnxTrainError
from onnxtrain.federation.proxy import missing, proxy_app

_PATIENCE = 120.0  # seconds for a SuperLink to answer


def flower_program(name: str) -> str:
    """Return the path of one of Flower's programs, beside this Python first.

    Raises:
        MissingExtraError: it is not there.
    """
    beside = Path(sys.executable).parent
    program = shutil.which(name, path=str(beside)) or shutil.which(name)
    if program is None:
        raise MissingExtraError(
            f"there is no program {name!r}\nhint: pip install 'onnxtrain[flower]'"
        )
    return program


@contextlib.contextmanager
def superlink(
    port: int = 8000,
    *,
    database: Path | None = None,
    simulation: bool = False,
    log: Path | None = None,
) -> Iterator[str]:
    """Run a SuperLink on this machine's loopback; give its address once it answers.

    Args:
        port: where Python clients and ``flwr run`` reach it.
        database: where it remembers nodes and runs; else in memory.
        simulation: it runs all clients itself.
        log: where its output goes; else to ours.

    Raises:
        BusyError: something else has the port.
        OnnxTrainError: it ends, or does not answer in time.
    """
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", port)) == 0:
            raise BusyError(f"port {port} is taken\nhint: --superlink-port names another one")
    command = [flower_program("flower-superlink"), "--insecure", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--disable-runtime-dependency-installation"]
    command += ["--database", str(database)] if database else []
    command += ["--simulation"] if simulation else []
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(log.open("ab")) if log else None
        # It starts programs of its own, by name.
        paths = os.pathsep.join([str(Path(command[0]).parent), os.environ.get("PATH", "")])
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env={**os.environ, "PATH": paths}
        )
        try:
            address = f"http://127.0.0.1:{port}"
            _wait_for(f"{address}/health", process)
            yield address
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end:
        if process.poll() is not None:
            raise OnnxTrainError(f"the SuperLink ended with code {process.returncode}")
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return  # any other status than 200 is an error that is an OSError too
        time.sleep(0.2)
    raise OnnxTrainError(f"the SuperLink does not answer at {url}")


def serve(
    address: str,
    *,
    host: str,
    port: int,
    folders: Mapping[str, Path],
    origins: Sequence[str] = (),
    certificate: Path | None = None,
    key: Path | None = None,
) -> None:
    """Serve pages and pass their calls on to a SuperLink, until interrupted.

    Args:
        address: of the SuperLink.
        host: which interface; pages elsewhere than on this machine need a certificate.
        port: of the page.
        folders: what is served, by path.
        origins: of pages that others serve.
        certificate: a .pem file; without one keys work on localhost only.
        key: of the certificate.
    """
    app = proxy_app(address, folders=folders, origins=origins)
    try:
        import uvicorn
    except ImportError as error:
        raise missing(error) from error
    uvicorn.run(
        app,
        host=host,
        port=port,
        log_level="warning",
        ssl_certfile=None if certificate is None else str(certificate),
        ssl_keyfile=None if key is None else str(key),
    )
