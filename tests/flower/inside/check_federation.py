"""A stock ``flwr run`` with clients in Python, in Node and in a tab, on this machine's loopback."""

from __future__ import annotations

import json
import urllib.error
import urllib.request

import pytest
from examples.federated import machines

from tests.flower.inside.reference import reference
from tests.flower.inside.running import Federation, apart, mean, needs_browser

pytest_plugins = ["tests.flower.inside.running"]


def three_kinds(federation: Federation, rounds: int) -> None:
    project = federation.project(3)
    federation.python(1)
    federation.node(2)
    federation.tab(3)
    try:
        final = federation.run(project, rounds=rounds, batch_size=8, shuffle=False)
    except RuntimeError as error:
        raise AssertionError(f"{error}\n{federation.all_logs()}") from error
    for server_round in range(1, rounds + 1):
        assert len(federation.replies(server_round)) == 3, federation.all_logs()
    assert apart(final, mean(federation.replies(rounds))) < 1e-6
    clients = {federation.number(log): (log[:-1], int(log[-1])) for log in LOGS}
    orders = [list(federation.replies_of(r)) for r in range(1, rounds + 1)]
    expected = reference(federation, [[clients[n] for n in order] for order in orders])
    far = apart(final, expected)
    print(f"{rounds} rounds: {far:.1e} from the reference")
    assert far < 1e-6


LOGS = ("python1", "node2", "tab3")


@needs_browser
def test_python_node_and_a_tab_train_together(federation: Federation) -> None:
    three_kinds(federation, rounds=2)


@needs_browser
@pytest.mark.full
def test_ten_rounds(federation: Federation) -> None:
    three_kinds(federation, rounds=10)


def test_the_interface_is_the_one_that_was_read(federation: Federation) -> None:
    from onnxtrain.federation.serve import CALLS, FLEET

    with urllib.request.urlopen(f"{federation.address}/openapi.json") as answer:
        api = json.load(answer)
    paths = {p for p in api["paths"] if p.startswith(FLEET)}
    assert paths == {FLEET + call for call in CALLS}, (
        f"Flower {api['info']['version']} has other calls"
    )


def test_the_proxy_forwards_client_calls_only(federation: Federation) -> None:
    folders = {"/": machines.PAGES}
    proxy = federation.stack.enter_context(
        machines.proxy(federation.address, folders, federation.logs / "proxy")
    )

    def status(path: str, method: str = "POST") -> int:
        request = urllib.request.Request(proxy + path, data=b"" if method == "POST" else None)
        request.method = method
        try:
            with urllib.request.urlopen(request) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code

    assert status("/", "GET") == 200
    assert status("/v1/fleet/pull-messages") in (401, 415)  # the SuperLink's own answers
    assert status("/v1/fleet/../control/start-run") in (404, 405)
    for path in (
        "/v1/control/start-run",
        "/v1/control/list-runs",
        "/v1/runtime/x",
        "/v1/fleet/other",
    ):
        assert status(path) in (404, 405)
    assert status("/openapi.json", "GET") == 404


def test_a_node_that_is_killed_comes_back_with_its_id(federation: Federation) -> None:
    project, store = federation.project(2), str(federation.folder / "store")
    federation.python(1)
    first = federation.node(2, store)
    federation.number("node2")
    first.kill()
    first.wait()
    federation.node(2, store)
    final = federation.run(project, rounds=2, batch_size=8, shuffle=False)
    lines = (federation.logs / "node2").read_text().splitlines()
    joined = [line for line in lines if line.startswith("joined as node")]
    assert len(joined) == 2
    assert joined[0] == joined[1]
    assert apart(final, mean(federation.replies(2))) < 1e-6


@needs_browser
@pytest.mark.full
def test_a_tab_that_reloads_goes_on(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RELOAD_AFTER", "6")
    project = federation.project(2)
    federation.python(1)
    federation.tab(2)
    final = federation.run(project, rounds=2, batch_size=8, shuffle=False)
    lines = (federation.logs / "tab2").read_text().splitlines()
    joined = [line for line in lines if line.startswith("joined as node")]
    assert "reloaded" in lines, federation.all_logs()
    assert len(joined) == 2, federation.all_logs()
    assert joined[0] == joined[1]
    assert apart(final, mean(federation.replies(2))) < 1e-6
