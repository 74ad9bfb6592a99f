"""A SuperLink and its door for pages, started and stopped together.

The door through which pages reach a SuperLink.

A SuperLink answers no preflight requests, and its port also takes calls that start and stop runs.
So pages talk to this: it passes on what SuperNodes call and nothing else, and serves the page.
"""

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
from typing import Any

from onnxtrain.errors import BusyError, MissingExtraError, OnnxTrainError

# pyright: reportMissingImports=false


FLEET = "/v1/fleet/"
CALLS = (
    *("register-node", "activate-node", "deactivate-node", "unregister-node"),
    *("send-node-heartbeat", "pull-messages", "push-messages", "get-run", "get-fab"),
    *("pull-object", "push-object", "confirm-message-received"),
)
"""What SuperNodes call."""
HEADERS = ("content-type", "flwr-public-key", "flwr-timestamp", "flwr-signature")
MAX_REQUEST_BYTES = 64 * 1024 * 1024  # bytes of a request; an array travels in pieces of 5 MiB


def proxy_app(
    superlink: str,
    *,
    folders: Mapping[str, Path] | None = None,
    origins: Sequence[str] = (),
) -> Any:
    """Return the ASGI application.

    Args:
        superlink: its address, ``http://127.0.0.1:8000``.
        folders: what is served besides: a folder by the path that it has here (``"/"``).
        origins: of pages that are served by others.

    Raises:
        MissingExtraError: Flower, and with it the libraries for this, is not installed.
    """
    try:
        import httpx
        from starlette.applications import Starlette
        from starlette.middleware import Middleware
        from starlette.middleware.cors import CORSMiddleware
        from starlette.responses import Response
        from starlette.routing import Mount, Route
        from starlette.staticfiles import StaticFiles
    except ImportError as error:
        raise missing_flower_message(error) from error

    client = httpx.AsyncClient(base_url=superlink, timeout=130)

    async def fleet(request: Any) -> Any:
        if request.path_params["call"] not in CALLS:
            return Response("no such call", 404)
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > MAX_REQUEST_BYTES:
                return Response(f"more than {MAX_REQUEST_BYTES:,} bytes", 413)
        headers = {k: request.headers[k] for k in HEADERS if k in request.headers}
        try:
            answer = await client.post(request.url.path, content=bytes(body), headers=headers)
        except httpx.TransportError as error:
            return Response(f"the SuperLink does not answer: {error}", 502)
        kind = answer.headers.get("content-type", "application/octet-stream")
        return Response(answer.content, answer.status_code, {"content-type": kind})

    routes = [Route(FLEET + "{call}", fleet, methods=["POST"])]
    for path, folder in sorted((folders or {}).items(), key=lambda item: -len(item[0])):
        routes.append(Mount(path, StaticFiles(directory=folder, html=True)))
    across = Middleware(
        CORSMiddleware,
        allow_origins=list(origins),
        allow_methods=["GET", "POST"],
        allow_headers=list(HEADERS),
        expose_headers=["date"],  # by which clients set their clocks
        max_age=7200,
    )
    return Starlette(routes=routes, middleware=[across])


def missing_flower_message(error: ImportError) -> MissingExtraError:
    """Return what to tell somebody without Flower."""
    return MissingExtraError(
        f"Flower is not installed: {error}\nhint: pip install 'onnxtrain[flower]'"
    )


# pyright: reportMissingImports=false


_STARTUP_TIMEOUT = 120.0  # seconds for a SuperLink to answer


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
    end = time.monotonic() + _STARTUP_TIMEOUT
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
        raise missing_flower_message(error) from error
    uvicorn.run(
        app,
        host=host,
        port=port,
        log_level="warning",
        ssl_certfile=None if certificate is None else str(certificate),
        ssl_keyfile=None if key is None else str(key),
    )
