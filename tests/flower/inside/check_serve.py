"""The web server of a federation, as strangers call it."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.client
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uvicorn
from examples.federated import machines

from onnxtrain.federation import serve
from tests.flower.inside.federations import saved

Connect = Callable[[int], socket.socket]
CALL = "/v1/fleet/pull-messages"


@contextlib.contextmanager
def running(**options: object) -> Iterator[int]:
    """Run the server in a thread; yield its port. Nothing answers behind it."""
    options.setdefault("folders", {})
    app = serve.proxy_app(f"http://127.0.0.1:{machines.free_port()}", **options)  # type: ignore[arg-type]
    config = uvicorn.Config(
        app, port=0, http=serve.limited_protocol(), ws="none", log_level="critical"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(20)


def get(port: int, path: str, host: str = "localhost") -> tuple[int, bytes]:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=20)) as client:
        client.putrequest("GET", path, skip_host=True)
        if host:
            client.putheader("Host", host)
        client.endheaders()
        response = client.getresponse()
        return response.status, response.read()


@pytest.fixture
def connect() -> Iterator[Callable[[int], socket.socket]]:
    """Return a function that connects to a port."""
    with contextlib.ExitStack() as stack:
        yield lambda port: stack.enter_context(
            socket.create_connection(("127.0.0.1", port), timeout=20)
        )


def post(connection: socket.socket, body: bytes, length: int | None = None) -> socket.socket:
    """Send a call, and return the connection."""
    head = f"POST {CALL} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {length or len(body)}\r\n"
    connection.sendall(head.encode() + b"\r\n" + body)
    return connection


def status(connection: socket.socket) -> int:
    return int(connection.recv(1000).split()[1])


def is_closed(connection: socket.socket) -> bool:
    """Return whether the server closes the connection; it waits for it."""
    try:
        return connection.recv(10) == b""
    except ConnectionResetError:
        return True


def test_other_names_are_refused(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("page")
    with running(folders={"/": tmp_path}, hosts=["Lab.example"]) as port:
        for host in ("localhost", f"127.0.0.1:{port}", f"[::1]:{port}", "10.1.2.3", "lab.EXAMPLE."):
            assert get(port, "/", host) == (200, b"page"), host
        for host in ("evil.example", f"evil.example:{port}", "localhost.evil.example", "", "[x]"):
            code, text = get(port, "/", host)
            assert code in (400, 421), host  # 400: HTTP/1.1 requires one
            assert code == 400 or b"--allow-host" in text
    with running(folders={"/": tmp_path}, hosts=None) as port:
        assert get(port, "/", "any.example")[0] == 200


def test_hidden_files_and_links_are_not_served(tmp_path: Path) -> None:
    folder, outside = tmp_path / "page", tmp_path / "outside"
    for made in (folder / "a" / "b", folder / ".git", folder / "a" / ".c", outside):
        made.mkdir(parents=True)
    for path in (".env", ".git/config", "a/.c/x", "a/b/file.txt", "index.html"):
        (folder / path).write_text("text")
    (outside / "secret").write_text("secret")
    (folder / "link").symlink_to(outside / "secret")
    (folder / "inner").symlink_to(folder / "index.html")
    (folder / "linked").symlink_to(outside)
    with running(folders={"/": folder}) as port:
        assert get(port, "/a/b/file.txt")[0] == 200
        assert get(port, "/")[0] == 200
        for path in (
            *("/.env", "/.git/config", "/a/.c/x", "/link", "/inner", "/linked/secret"),
            *("/a/../.env", "/%2eenv", "/a/%2e%2e/.env", "/../outside/secret", "//etc/passwd"),
            *("/a%00b", "/" + "x" * 5000),
        ):
            assert get(port, path)[0] == 404, path


def test_of_artifacts_only_their_files_are_served(tmp_path: Path) -> None:
    folder = saved(tmp_path / "artifacts", target="wasm")
    (folder / "run").mkdir()
    (folder / "run" / "history.jsonl").write_text("mine")
    (folder / "notes.txt").write_text("mine")
    names = [path.name for path in folder.iterdir() if path.is_file() and path.name != "notes.txt"]
    with running(artifacts=folder) as port:
        assert "checkpoint" in names
        for name in names:
            assert get(port, f"/artifacts/{name}") == (200, (folder / name).read_bytes())
        for path in ("notes.txt", "run/history.jsonl", "", "run"):
            assert get(port, f"/artifacts/{path}")[0] == 404, path


def test_connections_without_a_request_are_closed(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "HEAD_SECONDS", 1.0)
    with running() as port:
        silent, slow, second = (connect(port) for _ in range(3))
        second.sendall(b"GET /x HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert status(second) == 404
        second.sendall(b"GET /x HT")  # the next request on a connection that was kept open
        start = time.monotonic()
        with contextlib.suppress(ConnectionError):
            slow.sendall(b"GET / HTTP/1.1\r\nx: ")
            while time.monotonic() < start + 10:  # a byte now and then does not help
                slow.sendall(b"x")
                time.sleep(0.1)
        assert time.monotonic() < start + 5
        assert is_closed(silent)
        assert is_closed(second)
        assert time.monotonic() < start + 5


def test_connections_are_limited(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "MAX_CONNECTIONS", 5)
    with running() as port:
        held = [connect(port) for _ in range(5)]
        time.sleep(0.3)
        assert is_closed(connect(port))
        held.pop().close()
        time.sleep(0.3)
        assert get(port, "/x")[0] == 404


def test_uploads_are_limited_in_size_time_and_sum(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "MAX_REQUEST_BYTES", 200_000)
    monkeypatch.setattr(serve, "MAX_HELD_BYTES", 500_000)
    monkeypatch.setattr(serve, "BODY_SECONDS", 2.0)
    with running() as port:
        assert status(post(connect(port), b"x")) == 502  # forwarded: nothing answers
        assert status(post(connect(port), bytes(300_000))) == 413
        held = [post(connect(port), bytes(150_000), 199_000) for _ in range(3)]
        time.sleep(0.5)
        assert status(post(connect(port), bytes(100_000))) == 503
        assert [status(connection) for connection in held] == [408] * 3
        assert status(post(connect(port), bytes(100_000))) == 502


def test_pages_cannot_be_framed(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("page")
    with running(folders={"/": tmp_path}) as port:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port)) as client:
            client.request("GET", "/")
            headers = client.getresponse().headers
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"


def test_the_policy_of_the_page_allows_its_own_scripts_only() -> None:
    text = (machines.PAGES / "index.html").read_text("utf-8")
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    imports = re.search(r'<script type="importmap">(.*?)</script>', text, re.S)
    assert policy is not None
    assert imports is not None
    digest = base64.b64encode(hashlib.sha256(imports[1].encode()).digest()).decode()
    assert f"script-src 'self' 'sha256-{digest}' 'wasm-unsafe-eval';" in policy[1]
    assert "default-src 'none'" in policy[1]
    assert re.findall(r"<script[^>]*>", text) == [
        '<script type="importmap">',
        '<script type="module" src="page.mjs">',
    ]
