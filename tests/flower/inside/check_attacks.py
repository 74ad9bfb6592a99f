"""Replies of malicious nodes in a stock ``flwr run`` are rejected; the round continues."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from examples.federated import machines

from tests.flower.inside.running import Federation, apart, mean

pytest_plugins = ["tests.flower.inside.running"]

EVIL = Path(__file__).with_name("evil.mjs")
KINDS = {
    "nan": "'fc1.weight' has values that are infinite or NaN",
    "shape": "'fc1.weight' is float32[7], expected float32[4, 6]",
    "huge": "'fc1.weight' is float32[4000000], expected float32[4, 6]",
    "disguised": "'fc1.weight' has 16,000,128 bytes, more than",
    "names": "missing array 'fc1.weight'; unknown array 'evil'",
    "double": "'fc1.weight' is float64[4, 6], expected float32[4, 6]",
    "broken": "it cannot be read: JSONDecodeError",
    "listed": "metric 'loss' is a list, expected a number",
    "heavy": "'num-examples' is 1000000000000000, expected a number up to",
}
"""Attack of a node -> reason its reply is rejected."""


def test_malicious_nodes_are_refused_over_the_wire(federation: Federation) -> None:
    project = federation.project(2 + len(KINDS))
    for kind in KINDS:
        federation.script(EVIL, str(machines.WEB), kind, log=f"evil-{kind}")
    federation.node(1)
    federation.node(2)
    good = {federation.number("node1"), federation.number("node2")}
    evil = {federation.number(f"evil-{kind}"): text for kind, text in KINDS.items()}
    final = federation.run(project, rounds=2, batch_size=8, shuffle=False)

    trained = [line for line in federation.report(project) if line["kind"] == "train"]
    assert [line["round"] for line in trained] == [1, 2]
    for line in trained:
        assert set(line["nodes"]) == good, federation.all_logs()
        assert (line["failed"], line["silent"]) == ([], []), federation.all_logs()
        assert set(line["refused"]) == set(evil), federation.all_logs()
        for node, reason in line["refused"].items():
            assert evil[node] in reason
    log = (federation.logs / "run").read_text(errors="replace")
    assert all(f"rejected node {node}: " in log for node in evil)
    for server_round in (1, 2):
        assert set(federation.replies_of(server_round)) == good
    assert all(np.isfinite(a).all() for a in final.values())
    assert apart(final, mean(federation.replies(2))) < 1e-6
