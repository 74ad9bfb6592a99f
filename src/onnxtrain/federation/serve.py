"""Run a SuperLink, and a web server that connects pages to it.

Pages cannot call a SuperLink directly: it does not answer CORS preflight requests, and its port
also accepts calls that start and stop runs. ``proxy_app`` serves the page and forwards only the
calls of SuperNodes. ``superlink`` starts and stops the SuperLink; ``serve`` runs the web server.
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
"""The calls of SuperNodes, which are forwarded; all others get status 404."""
HEADERS = ("content-type", "flwr-public-key", "flwr-timestamp", "flwr-signature")
MAX_REQUEST_BYTES = 64 * 1024 * 1024  # Flower sends arrays in chunks of 5 MiB


def proxy_app(
    superlink: str,
    *,
    folders: Mapping[str, Path] | None = None,
    origins: Sequence[str] = (),
) -> Any:
    """Return the ASGI application that serves pages and forwards calls of SuperNodes.

    Args:
        superlink: address of the SuperLink, such as ``http://127.0.0.1:8000``.
        folders: static files to serve: URL path (``"/"``) -> folder.
        origins: origins of pages on other servers that may call this one.

    Raises:
        MissingExtraError: if Flower is not installed; it brings the web libraries.
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
        raise missing_flower(error) from error

    client = httpx.AsyncClient(base_url=superlink, timeout=130)

    async def fleet(request: Any) -> Any:
        if request.path_params["call"] not in CALLS:
            return Response("unknown call", 404)
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > MAX_REQUEST_BYTES:
                return Response(f"request exceeds {MAX_REQUEST_BYTES:,} bytes", 413)
        headers = {k: request.headers[k] for k in HEADERS if k in request.headers}
        try:
            response = await client.post(request.url.path, content=bytes(body), headers=headers)
        except httpx.TransportError as error:
            return Response(f"the SuperLink does not respond: {error}", 502)
        kind = response.headers.get("content-type", "application/octet-stream")
        return Response(response.content, response.status_code, {"content-type": kind})

    routes = [Route(FLEET + "{call}", fleet, methods=["POST"])]
    for path, folder in sorted((folders or {}).items(), key=lambda item: -len(item[0])):
        routes.append(Mount(path, StaticFiles(directory=folder, html=True)))
    cors = Middleware(
        CORSMiddleware,
        allow_origins=list(origins),
        allow_methods=["GET", "POST"],
        allow_headers=list(HEADERS),
        expose_headers=["date"],  # clients correct their clocks with it
        max_age=7200,
    )
    return Starlette(routes=routes, middleware=[cors])


def missing_flower(error: ImportError) -> MissingExtraError:
    """Return the error for a missing installation of Flower."""
    return MissingExtraError(
        f"Flower is not installed: {error}\nhint: pip install 'onnxtrain[flower]'"
    )


_STARTUP_TIMEOUT = 120.0  # seconds until a SuperLink responds


def flower_program(name: str) -> str:
    """Return the path of a Flower program; the environment of this Python comes before PATH.

    Raises:
        MissingExtraError: if it is not installed.
    """
    bin_folder = Path(sys.executable).parent
    program = shutil.which(name, path=str(bin_folder)) or shutil.which(name)
    if program is None:
        raise MissingExtraError(
            f"program {name!r} not found\nhint: pip install 'onnxtrain[flower]'"
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
    """Run a SuperLink on the loopback interface; yield its address once it responds.

    Args:
        port: port for Python clients and ``flwr run``.
        database: file for nodes and runs; in memory by default.
        simulation: let the SuperLink run all clients itself.
        log: file for its output; by default this process's output.

    Raises:
        BusyError: if the port is in use.
        OnnxTrainError: if it exits, or does not respond in time.
    """
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", port)) == 0:
            raise BusyError(
                f"port {port} is in use\nhint: choose another one with --superlink-port"
            )
    command = [flower_program("flower-superlink"), "--insecure", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--disable-runtime-dependency-installation"]
    command += ["--database", str(database)] if database else []
    command += ["--simulation"] if simulation else []
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(log.open("ab")) if log else None
        # The SuperLink starts other Flower programs by name.
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
            raise OnnxTrainError(f"the SuperLink exited with code {process.returncode}")
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return  # urlopen raises HTTPError, an OSError, for other statuses than 200
        time.sleep(0.2)
    raise OnnxTrainError(f"the SuperLink does not respond at {url}")


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
    """Serve pages and forward their calls to a SuperLink, until interrupted.

    Args:
        address: address of the SuperLink.
        host: interface to listen on; clients on other machines need a certificate.
        port: port of the pages.
        folders: static files to serve: URL path -> folder.
        origins: origins of pages on other servers that may call this one.
        certificate: a .pem file; without it, browsers create keys on localhost only.
        key: private key of the certificate.
    """
    app = proxy_app(address, folders=folders, origins=origins)
    try:
        import uvicorn
    except ImportError as error:
        raise missing_flower(error) from error
    uvicorn.run(
        app,
        host=host,
        port=port,
        log_level="warning",
        ssl_certfile=None if certificate is None else str(certificate),
        ssl_keyfile=None if key is None else str(key),
    )
