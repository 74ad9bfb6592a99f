"""Run a SuperLink, and a web server that connects pages to it.

Pages cannot call a SuperLink directly: it does not answer CORS preflight requests, and its port
also accepts calls that start and stop runs. ``proxy_app`` serves the page and forwards only the
calls of SuperNodes. ``superlink`` starts and stops the SuperLink; ``serve`` runs the web server.

The server faces strangers. It answers only to its own names (a page whose name was rebound to this
machine carries another one), limits connections, bodies and the time that both may take, and serves
plain files only.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from onnxtrain.artifacts import Artifacts
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
MAX_REQUEST_BYTES = 8 * 1024 * 1024  # Flower sends arrays in chunks of 5 MiB
MAX_HELD_BYTES = 256 * 1024 * 1024
"""Bytes of all requests that are being received or forwarded."""
BODY_SECONDS = 120.0  # for one request body
HEAD_SECONDS = 10.0  # for the head of a request
MAX_CONNECTIONS = 500
_SECURITY_HEADERS = {
    "content-security-policy": "base-uri 'none'; frame-ancestors 'none'; object-src 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def proxy_app(
    superlink: str,
    *,
    folders: Mapping[str, Path] | None = None,
    artifacts: Path | None = None,
    origins: Sequence[str] = (),
    hosts: Sequence[str] | None = (),
) -> Any:
    """Return the ASGI application that serves pages and forwards calls of SuperNodes.

    Args:
        superlink: address of the SuperLink, such as ``http://127.0.0.1:8000``.
        folders: static files to serve: URL path (``"/"``) -> folder. Hidden files and links are
            not served.
        artifacts: a directory of artifacts, whose files are served as ``/artifacts``, and nothing
            else in it.
        origins: origins of pages on other servers that may call this one.
        hosts: names that this server answers to, besides ``localhost`` and addresses; ``None``
            allows all, which is safe only where a certificate proves the name.

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
    bodies = RequestBodies()

    async def fleet(request: Any) -> Any:
        if request.path_params["call"] not in CALLS:
            return Response("unknown call", 404)
        headers = {k: request.headers[k] for k in HEADERS if k in request.headers}
        async with bodies.read(request) as body:
            try:
                response = await client.post(request.url.path, content=body, headers=headers)
            except httpx.TransportError as error:
                return Response(f"the SuperLink does not respond: {error}", 502)
        kind = response.headers.get("content-type", "application/octet-stream")
        return Response(response.content, response.status_code, {"content-type": kind})

    class PlainFiles(StaticFiles):
        """Files of a folder, except hidden ones and links."""

        names: set[str] | None = None
        """The files to serve; ``None`` serves all."""

        def lookup_path(self, path: str) -> tuple[str, os.stat_result | None]:
            parts = [part for part in Path(path).parts if part != os.curdir]
            place = Path(str(self.directory))
            for part in parts:
                place /= part
                if part.startswith(".") or place.is_symlink():
                    return "", None
            if self.names is not None and path not in self.names:
                return "", None
            return super().lookup_path(path)

    routes = [Route(FLEET + "{call}", fleet, methods=["POST"])]
    if artifacts is not None:
        files = PlainFiles(directory=artifacts)
        files.names = {"manifest.json", *Artifacts.load(artifacts).manifest.file_names()}
        routes.append(Mount("/artifacts", files))
    for path, folder in sorted((folders or {}).items(), key=lambda item: -len(item[0])):
        routes.append(Mount(path, PlainFiles(directory=folder, html=True)))
    cors = Middleware(
        CORSMiddleware,
        allow_origins=list(origins),
        allow_methods=["GET", "POST"],
        allow_headers=list(HEADERS),
        expose_headers=["date"],  # clients correct their clocks with it
        max_age=7200,
    )
    return Starlette(routes=routes, middleware=[Middleware(CheckHost, hosts=hosts), cors])


class CheckHost:
    """Answer only requests to names of this server, and add headers against misuse of its pages.

    Addresses need no check: a rebound page sends the name that its attacker owns.
    """

    def __init__(self, app: Any, hosts: Sequence[str] | None) -> None:
        self._app = app
        self._hosts = None if hosts is None else {"localhost", *map(str.lower, hosts)}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        from starlette.datastructures import MutableHeaders
        from starlette.responses import PlainTextResponse

        received = [value for name, value in scope["headers"] if name == b"host"]
        if len(received) != 1 or not self._is_own(received[0].decode("latin-1")):
            text = "unknown host\nhint: onnxtrain federate serve --allow-host NAME\n"
            await PlainTextResponse(text, 421)(scope, receive, send)
            return

        async def guarded(message: Any) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await self._app(scope, receive, guarded)

    def _is_own(self, host: str) -> bool:
        if self._hosts is None:
            return True
        name, colon, port = host.rpartition(":")
        if not colon or not port.isdecimal():
            name = host
        if name.lower().removesuffix(".") in self._hosts:
            return True
        try:
            ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
        except ValueError:
            return False
        return True


class RequestBodies:
    """Read request bodies: each limited in size and time, and all together in memory."""

    def __init__(self) -> None:
        self.held = 0

    @contextlib.asynccontextmanager
    async def read(self, request: Any) -> AsyncIterator[bytes]:
        """Yield the body of a request.

        Raises:
            HTTPException: if it is too large, too slow, or there are too many.
        """
        from starlette.exceptions import HTTPException
        from starlette.requests import ClientDisconnect

        body = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for part in request.stream():
                    body += part
                    self.held += len(part)
                    if len(body) > MAX_REQUEST_BYTES:
                        raise HTTPException(413, f"request exceeds {MAX_REQUEST_BYTES:,} bytes")
                    if self.held > MAX_HELD_BYTES:
                        raise HTTPException(503, "too many uploads", {"retry-after": "5"})
            yield bytes(body)
        except TimeoutError:
            raise HTTPException(408, f"no body within {BODY_SECONDS:g} s") from None
        except ClientDisconnect:
            raise HTTPException(400, "disconnected") from None
        finally:
            self.held -= len(body)


def limited_protocol() -> type:
    """Return uvicorn's HTTP protocol with limits for connections that send no request."""
    try:
        from uvicorn.protocols.http.h11_impl import H11Protocol
    except ImportError as error:
        raise missing_flower(error) from error

    class LimitedProtocol(H11Protocol):
        """Close connections beyond the limit, and those whose next request takes too long."""

        timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) > MAX_CONNECTIONS:
                transport.abort()
            else:
                self.set_timer()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self.set_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self.stop_timer()

        def set_timer(self) -> None:
            """Run the timer while no request is in progress; bytes do not restart it."""
            if self.cycle is not None and not self.cycle.response_complete:
                self.stop_timer()
            elif self.timer is None:
                self.timer = self.loop.call_later(HEAD_SECONDS, self.transport.abort)

        def stop_timer(self) -> None:
            """Stop the timer."""
            if self.timer is not None:
                self.timer.cancel()
                self.timer = None

    return LimitedProtocol


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
    artifacts: Path | None = None,
    origins: Sequence[str] = (),
    hosts: Sequence[str] = (),
    certificate: Path | None = None,
    key: Path | None = None,
) -> None:
    """Serve pages and forward their calls to a SuperLink, until interrupted.

    Args:
        address: address of the SuperLink.
        host: interface to listen on; clients on other machines need a certificate.
        port: port of the pages.
        folders: static files to serve: URL path -> folder.
        artifacts: a directory of artifacts to serve as ``/artifacts``.
        origins: origins of pages on other servers that may call this one.
        hosts: names of this server that clients use; with a certificate, its names suffice.
        certificate: a .pem file; without it, browsers create keys on localhost only.
        key: private key of the certificate.
    """
    names = None if certificate else (host, socket.gethostname(), *hosts)
    app = proxy_app(address, folders=folders, artifacts=artifacts, origins=origins, hosts=names)
    protocol = limited_protocol()
    import uvicorn

    uvicorn.run(
        app,
        host=host,
        port=port,
        http=protocol,
        ws="none",
        log_level="warning",
        ssl_certfile=None if certificate is None else str(certificate),
        ssl_keyfile=None if key is None else str(key),
    )
