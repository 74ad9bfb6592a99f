"""The same updates as in a federation, made one after another without one."""

from __future__ import annotations

import base64
import contextlib
import json
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from examples.federated import machines

import onnxtrain
from tests.flower.inside.federations import rows
from tests.flower.inside.running import Federation, apart

REPLAY = Path(__file__).with_name("replay.mjs")
DEVICES = {"node": "node", "tab": "wasm"}
BATCH = 8
Weights = dict[str, np.ndarray]


def reference(
    federation: Federation, rounds: Sequence[Sequence[tuple[str, int]]]
) -> dict[str, np.ndarray]:
    """Return the weights after rounds, each a list of clients: their kind and their data.

    Kernels of different runtimes round differently, and a mean in float32 depends on its order. So
    every update is made by the runtime that the client has, and averaged in the order of replies.
    """
    artifacts = onnxtrain.Artifacts.load(federation.artifacts)
    weights = {p.name: np.array(artifacts.values[p.name]) for p in artifacts.manifest.parameters}
    with replaying(federation.artifacts) as node:
        for clients in rounds:
            updates = []
            for kind, part in clients:
                if kind == "python":
                    updates.append(by_python(artifacts, rows(part), weights))
                else:
                    data = federation.data / f"{part}.json"
                    updates.append(by_javascript(node, DEVICES[kind], data, weights))
            counts = [len(rows(part)["x"]) for _, part in clients]
            weights = mean_as_flower_does(updates, counts)
    return weights


def honest(
    artifacts: onnxtrain.Artifacts,
    data: Sequence[Weights],
    rounds: Sequence[Sequence[Weights]],
    within: float,
) -> Weights:
    """Compare every reply of rounds with updates of all clients; return the last mean.

    Raises:
        AssertionError: a reply is what no client finds from the weights of its round.
    """
    weights = {p.name: np.array(artifacts.values[p.name]) for p in artifacts.manifest.parameters}
    for replies in rounds:
        updates = [by_python(artifacts, own, weights) for own in data]
        assert replies
        for reply in replies:
            assert min(apart(reply, update) for update in updates) < within
        counts = [int(reply["examples"]) for reply in replies]
        updates = [{n: reply[n] for n in weights} for reply in replies]
        weights = mean_as_flower_does(updates, counts)
    return weights


def by_python(artifacts: onnxtrain.Artifacts, data: Weights, weights: Weights) -> Weights:
    """Return the weights after an epoch over a client's data."""
    trainer = onnxtrain.Trainer(artifacts, threads=1)
    trainer.load_weights(weights)
    trainer.fit(data, epochs=1, batch_size=BATCH, shuffle=False, progress=False)
    return {n: np.array(trainer.parameters[n]) for n in weights}


def by_javascript(node: Any, device: str, data: Path, weights: Weights) -> Weights:
    """Return the same as a runtime of JavaScript finds it."""
    sent = {n: base64.b64encode(a.astype("<f4").tobytes()).decode() for n, a in weights.items()}
    asked = {"device": device, "data": str(data), "batchSize": BATCH, "weights": sent}
    node.stdin.write(json.dumps(asked) + "\n")
    node.stdin.flush()
    answer = json.loads(node.stdout.readline())
    return {
        n: np.frombuffer(base64.b64decode(answer[n]), "<f4").reshape(a.shape)
        for n, a in weights.items()
    }


@contextlib.contextmanager
def replaying(artifacts: Path) -> Iterator[subprocess.Popen[str]]:
    """Run the program that trains in JavaScript."""
    command = ["node", REPLAY, machines.WEB / "packages" / "onnxtrain" / "dist", artifacts]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([str(c) for c in command], text=True, **pipes) as started:
        try:
            yield started
        finally:
            started.kill()  # it has nothing to put in order


def mean_as_flower_does(updates: Sequence[Weights], counts: Sequence[int]) -> Weights:
    """Return the weighted mean, summed in the order and the types that FedAvg takes."""
    factors = [count / sum(counts) for count in counts]
    means = {}
    for name in updates[0]:
        total = updates[0][name] * factors[0]
        for update, factor in zip(updates[1:], factors[1:], strict=True):
            total = total + update[name] * factor
        means[name] = total.astype(np.float32)
    return means
