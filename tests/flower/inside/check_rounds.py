"""Rounds over nodes in this process, against the same updates made by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from examples.federated import adapters
from flwr.serverapp import strategy as strategies

import onnxtrain
from onnxtrain.errors import OnnxTrainError
from onnxtrain.flower import client_app, pseudo_gradient, server_app, weighted_mean
from tests.flower.inside.federations import LocalGrid, built, rows, run_server

TOLD = {"batch-size": 8, "shuffle": False, "lr": 0.1}


def own_rows(context: Any) -> dict[str, np.ndarray]:
    return rows(context.node_id, 16 + 8 * context.node_id)


def federate(
    artifacts: onnxtrain.Artifacts, strategy: Any = None, nodes: int = 2, **options: Any
) -> tuple[Any, Any, LocalGrid]:
    """Return result and strategy of a run."""
    found: list[Any] = []
    client = {
        "optimizer_state": options.pop("optimizer_state", None),
        "mods": options.pop("mods", ()),
    }
    grid = LocalGrid(client_app(artifacts, own_rows, **client), nodes, options.pop("spoil", None))
    options = {"rounds": 3, "config": TOLD, **options}
    run_server(
        server_app(artifacts, strategy, on_result=lambda *r: found.extend(r), **options), grid
    )
    return found[0], found[1], grid


def by_hand(
    artifacts: onnxtrain.Artifacts, nodes: int = 2, rounds: int = 3, *, keep: bool = False
) -> dict[str, np.ndarray]:
    """Return the global weights of FedAvg, by trainers and numpy alone."""
    names = list(artifacts.values)
    weights = {n: np.array(a) for n, a in artifacts.values.items()}
    trainers = {node: onnxtrain.Trainer(artifacts) for node in range(1, nodes + 1)}
    for _ in range(rounds):
        results, counts = [], []
        for node, trainer in trainers.items():
            if not keep:
                trainer = onnxtrain.Trainer(artifacts)
            trainer.load_weights(weights)
            data = rows(node, 16 + 8 * node)
            trainer.fit(data, epochs=1, batch_size=8, shuffle=False, progress=False)
            results.append({n: np.array(trainer.view(n), np.float64) for n in names})
            counts.append(len(data["x"]))
        weights = {
            n: np.float32(sum(c * r[n] for c, r in zip(counts, results, strict=True)) / sum(counts))
            for n in names
        }
    return weights


def same(arrays: Any, expected: dict[str, np.ndarray]) -> None:
    assert set(arrays) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(arrays[name].numpy(), value, rtol=1e-5, atol=1e-6)


def test_averages_what_clients_trained() -> None:
    artifacts = built()
    result, _, grid = federate(artifacts)
    same(result.arrays, by_hand(artifacts))
    assert set(grid.sent[0].content["arrays"]) == set(artifacts.values)
    assert result.train_metrics_clientapp[3]["loss"] < result.train_metrics_clientapp[1]["loss"]
    assert 0 <= result.evaluate_metrics_clientapp[3]["accuracy"] <= 1


@pytest.mark.parametrize("state", ["keep", "reset"])
def test_optimizer_state_stays_or_goes(state: str) -> None:
    artifacts = built("sgd:lr=0.1,momentum=0.9")
    result, _, _ = federate(artifacts, optimizer_state=state)
    same(result.arrays, by_hand(artifacts, keep=state == "keep"))


def test_what_is_frozen_does_not_travel() -> None:
    from tests.flower.inside.federations import net

    artifacts = onnxtrain.build(
        net(), loss="cross_entropy", optimizer="sgd:lr=0.1", freeze="fc1.*", metrics=["accuracy"]
    )
    _, _, grid = federate(artifacts)
    assert set(grid.sent[0].content["arrays"]) == {"fc2.weight", "fc2.bias"}


def test_of_a_net_with_adapters_only_these_travel(tmp_path: Path) -> None:
    onnx.save(adapters.wide_net(), tmp_path / "large.onnx")
    artifacts = adapters.artifacts_of(tmp_path / "large.onnx")
    data = onnxtrain.examples.digits_data(64)
    grid = LocalGrid(client_app(artifacts, data, batch_size=32), nodes=2)
    results: list[Any] = []
    run_server(server_app(artifacts, rounds=2, on_result=lambda r, _: results.append(r)), grid)
    sent = {n: a.numpy() for n, a in grid.sent[0].content["arrays"].items()}
    layers = ("fc1.lora_A", "fc1.lora_B", "fc2.lora_A", "fc2.lora_B")
    assert set(sent) == set(results[0].arrays) == set(layers)
    whole = sum(
        w.const_value.nbytes for w in ir.load(tmp_path / "large.onnx").graph.initializers.values()
    )
    assert sum(a.nbytes for a in sent.values()) < whole / 100
    assert np.abs(results[0].arrays["fc2.lora_B"].numpy()).max() > 0  # zero at the start
    losses = results[0].train_metrics_clientapp
    assert losses[2]["loss"] < losses[1]["loss"]


@pytest.mark.parametrize("statistics", ["average", "local"])
def test_statistics_travel_or_stay(statistics: str) -> None:
    artifacts = built(norm=True)
    result, _, grid = federate(artifacts, statistics=statistics)
    travels = "norm.mean" in result.arrays
    assert travels == (statistics == "average")
    kept = [c.state.array_records for c in grid.contexts.values()]
    assert all(("onnxtrain.kept" in k) != travels for k in kept)
    if travels:
        assert np.abs(result.arrays["norm.mean"].numpy()).max() > 0
    else:
        means = [k["onnxtrain.kept"]["norm.mean"].numpy() for k in kept]
        assert not np.array_equal(*means)
        assert np.abs(means[0]).max() > 0


def test_the_proximal_term_holds_clients_near() -> None:
    def moved(mu: float) -> float:
        artifacts = built(f"sgd:lr=0.1,proximal={mu}")
        strategy = strategies.FedProx(proximal_mu=mu)
        result, _, _ = federate(artifacts, strategy, rounds=1)
        return sum(
            float(np.square(result.arrays[n].numpy() - a).sum())
            for n, a in artifacts.values.items()
        )

    assert moved(5.0) < moved(1.0) < moved(0.0)


def test_a_proximal_term_that_is_not_in_the_graph_is_refused() -> None:
    with pytest.raises(OnnxTrainError, match="proximal_mu=1"):
        federate(built(), strategies.FedProx(proximal_mu=1.0))


@pytest.mark.parametrize(
    "make",
    [
        lambda: strategies.FedAdam(eta=0.05),
        strategies.FedMedian,
        lambda: strategies.Krum(num_malicious_nodes=1, min_train_nodes=5),
        lambda: strategies.DifferentialPrivacyServerSideFixedClipping(
            strategies.FedAvg(), 0.0, 100.0, 5
        ),
    ],
    ids=["FedAdam", "FedMedian", "Krum", "privacy on the server"],
)
def test_strategies_of_flower(make: Any) -> None:
    artifacts = built()
    result, checked, _ = federate(artifacts, make(), nodes=5)
    assert checked.refusals == []
    assert result.train_metrics_clientapp[3]["loss"] < result.train_metrics_clientapp[1]["loss"]
    assert all(result.arrays[n].numpy().dtype == a.dtype for n, a in artifacts.values.items())


def test_privacy_on_clients() -> None:
    from flwr.clientapp.mod import fixedclipping_mod

    strategy = strategies.DifferentialPrivacyClientSideFixedClipping(
        strategies.FedAvg(), 0.0, 1e-3, 2
    )
    artifacts = built()
    _, checked, _ = federate(artifacts, strategy, rounds=1, mods=[fixedclipping_mod])
    assert np.sqrt(sum(np.square(g).sum() for g in checked.pseudo_gradient.values())) < 1.1e-3


def test_updates_by_name() -> None:
    artifacts = built()
    _, checked, _ = federate(artifacts, rounds=1, keep_updates=True)
    weighted = [(update, 16 + 8 * node) for node, update in checked.updates.items()]
    mean = weighted_mean(weighted)
    for name, gradient in checked.pseudo_gradient.items():
        np.testing.assert_allclose(gradient, mean[name], rtol=1e-4, atol=1e-6)
    new = {n: a - checked.pseudo_gradient[n] for n, a in artifacts.values.items()}
    back = pseudo_gradient(artifacts.values, new)
    np.testing.assert_allclose(back["fc1.weight"], checked.pseudo_gradient["fc1.weight"], atol=1e-6)


def test_the_global_weights_are_a_checkpoint(tmp_path: Any) -> None:
    artifacts = built()
    result, _, _ = federate(artifacts, out=tmp_path / "out" / "global", report=tmp_path / "r.jsonl")
    trainer = onnxtrain.Trainer(artifacts)
    trainer.load(tmp_path / "out" / "global")
    same(result.arrays, {n: trainer.parameters[n] for n in artifacts.values})
    lines = (tmp_path / "r.jsonl").read_text().splitlines()
    assert [("train" in line, '"1": 24' in line) for line in lines[::2]] == [(True, True)] * 3


def test_a_setting_that_clients_do_not_know_is_refused() -> None:
    with pytest.raises(OnnxTrainError, match="'learning-rate'"):
        federate(built(), config={"learning-rate": 1})
