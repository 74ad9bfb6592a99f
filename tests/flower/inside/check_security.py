"""TLS, and keys that were registered before."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from examples.federated import machines

from onnxtrain.federation.serve import flower_program
from tests.flower.inside.certificates import Certificates, write_certificates, write_key
from tests.flower.inside.running import Federation, apart, mean, needs_browser

pytest_plugins = ["tests.flower.inside.running"]


@contextlib.contextmanager
def guarded_superlink(files: Certificates, log: Path) -> Iterator[str]:
    """Run a SuperLink with TLS that lets in registered keys only."""
    port = machines.free_port()
    command = [flower_program("flower-superlink"), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--ssl-ca-certfile", str(files.authority), "--ssl-certfile", str(files.certificate)]
    command += ["--ssl-keyfile", str(files.key), "--enable-supernode-auth"]
    command += ["--disable-runtime-dependency-installation"]
    home = Path(os.environ["FLWR_HOME"])
    with machines.process(command, log, machines.environment(home)) as started:
        machines.wait_for_port(port, started)
        yield f"https://127.0.0.1:{port}"


def register(federation: Federation, public_key: Path) -> None:
    """Tell the SuperLink of a key."""
    command = [flower_program("flwr"), "supernode", "register", str(public_key), "lab"]
    done = subprocess.run(
        command, env=machines.environment(federation.home), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "registered successfully" in done.stdout


def test_registered_keys_over_tls(federation: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients join by their keys, directly and through a proxy; a stranger is refused."""
    files, folder = write_certificates(federation.folder), federation.folder
    address = federation.stack.enter_context(guarded_superlink(files, federation.logs / "guarded"))
    machines.write_connection(federation.home, address, files.authority)
    trust = {"NODE_EXTRA_CA_CERTS": str(files.authority)}

    with monkeypatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(files.authority))
        proxy = federation.stack.enter_context(
            machines.proxy(address, {}, federation.logs / "proxy")
        )

    def node(part: int, log: str, url: str = address, **own: str) -> subprocess.Popen[bytes]:
        data = federation.data / f"{part}.json"
        client = machines.node_client(
            url, federation.artifacts, data, federation.logs / log, **trust, **own
        )
        return federation.stack.enter_context(client)

    for part in (2, 3):
        key = str(folder / f"node{part}.key")
        node(part, "making", KEY=key).wait(60)  # makes the key, and ends
        register(federation, Path(f"{key}.pub"))
    register(federation, write_key(folder / "python.key"))
    project = federation.project(3)
    key = str(folder / "python.key")
    options = ["--root-certificates", str(files.authority), "--auth-supernode-private-key", key]
    data, log = str(federation.data / "1.npz"), federation.logs / "python1"
    federation.stack.enter_context(
        machines.supernode(address, federation.home, log, *options, data=data)
    )
    node(2, "node2", KEY=str(folder / "node2.key"))
    node(3, "node3", proxy, KEY=str(folder / "node3.key"))
    stranger = node(4, "stranger")
    final = federation.run(project, rounds=1, batch_size=8, shuffle=False)

    nodes = {federation.number(log) for log in ("python1", "node2", "node3")}
    assert set(federation.replies_of(1)) == nodes, federation.all_logs()
    assert apart(final, mean(federation.replies(1))) < 1e-6
    end = time.monotonic() + 60
    while stranger.poll() is None and time.monotonic() < end:
        time.sleep(0.2)
    assert stranger.returncode not in (None, 0)
    log = (federation.logs / "stranger").read_text()
    assert "FlowerError" in log
    assert "joined as node" not in log


@needs_browser
@pytest.mark.full
def test_all_kinds_of_client_through_a_proxy_with_a_certificate(federation: Federation) -> None:
    """The SuperLink stays on loopback; remote clients connect through the proxy."""
    files = write_certificates(federation.folder)
    folders = machines.page_folders(federation.artifacts, federation.data)
    options = ["--certificate", str(files.certificate), "--key", str(files.key)]
    proxy = federation.stack.enter_context(
        machines.proxy(federation.address, folders, federation.logs / "proxy", *options)
    )
    assert proxy.startswith("https://")
    enter, logs = federation.stack.enter_context, federation.logs
    roots = ["--root-certificates", str(files.authority)]
    data = str(federation.data / "1.npz")
    enter(machines.supernode(proxy, federation.home, logs / "python1", *roots, data=data))
    trust = {"NODE_EXTRA_CA_CERTS": str(files.authority)}
    data2 = federation.data / "2.json"
    enter(machines.node_client(proxy, federation.artifacts, data2, logs / "node2", **trust))
    enter(machines.tab(f"{proxy}/?data=3.json&heartbeat=30", logs / "tab3"))
    project = federation.project(3)
    final = federation.run(project, rounds=1, batch_size=8, shuffle=False)
    nodes = {federation.number(log) for log in ("python1", "node2", "tab3")}
    assert set(federation.replies_of(1)) == nodes, federation.all_logs()
    assert apart(final, mean(federation.replies(1))) < 1e-6
