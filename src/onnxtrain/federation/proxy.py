"""The door through which pages reach a SuperLink.

A SuperLink answers no preflight requests, and its port also takes calls that start and stop runs.
So pages talk to this: it passes on what SuperNodes call and nothing else, and serves the page.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from onnxtrain.errors import MissingExtraError

FLEET = "/v1/fleet/"
CALLS = (
    *("register-node", "activate-node", "deactivate-node", "unregister-node"),
    *("send-node-heartbeat", "pull-messages", "push-messages", "get-run", "get-fab"),
    *("pull-object", "push-object", "confirm-message-received"),
)
"""What SuperNodes call."""
HEADERS = ("content-type", "flwr-public-key", "flwr-timestamp", "flwr-signature")
LARGEST = 64 * 1024 * 1024  # bytes of a request; an array travels in pieces of 5 MiB


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
        raise missing(error) from error

    client = httpx.AsyncClient(base_url=superlink, timeout=130)

    async def fleet(request: Any) -> Any:
        if request.path_params["call"] not in CALLS:
            return Response("no such call", 404)
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > LARGEST:
                return Response(f"more than {LARGEST:,} bytes", 413)
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


def missing(error: ImportError) -> MissingExtraError:
    """Return what to tell somebody without Flower."""
    return MissingExtraError(
        f"Flower is not installed: {error}\nhint: pip install 'onnxtrain[flower]'"
    )
