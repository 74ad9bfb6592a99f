"""Invalid replies are rejected by name; the round continues without them."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict

from tests.flower.inside.check_rounds import by_hand, federate, same
from tests.flower.inside.federations import built


def changed(reply: Message, change: Callable[[dict[str, Array], dict[str, Any]], None]) -> Message:
    arrays = dict(reply.content["arrays"]) if "arrays" in reply.content else {}
    metrics = dict(reply.content["metrics"])
    change(arrays, metrics)
    records = {"arrays": ArrayRecord(arrays)} if arrays else {}
    reply.content = RecordDict({**records, "metrics": MetricRecord(metrics)})
    return reply


def nan(arrays: dict[str, Array], metrics: dict[str, Any]) -> None:
    arrays["fc2.bias"] = Array(np.full(3, np.nan, np.float32))


def wrong_shape(arrays: dict[str, Array], metrics: dict[str, Any]) -> None:
    arrays["fc2.bias"] = Array(np.zeros(4, np.float32))


def scalar(arrays: dict[str, Array], metrics: dict[str, Any]) -> None:
    arrays["fc2.bias"] = Array(np.asarray(0, np.float32))


def wrong_type(arrays: dict[str, Array], metrics: dict[str, Any]) -> None:
    arrays["fc2.bias"] = Array(np.zeros(3, np.float64))


def missing(arrays: dict[str, Array], metrics: dict[str, Any]) -> None:
    del arrays["fc2.bias"]


def foreign(arrays: dict[str, Array], metrics: dict[str, Any]) -> None:
    arrays["evil"] = Array(np.zeros(3, np.float32))


def huge(arrays: dict[str, Array], metrics: dict[str, Any]) -> None:
    big = Array(np.zeros(1 << 20, np.float32))
    arrays["fc2.bias"] = Array("float32", (3,), "numpy.ndarray", big.data)


def announced_wrongly(arrays: dict[str, Array], metrics: dict[str, Any]) -> None:
    other = Array(np.zeros(5, np.float32))
    arrays["fc2.bias"] = Array("float32", (3,), "numpy.ndarray", other.data)


def no_file(arrays: dict[str, Array], metrics: dict[str, Any]) -> None:
    arrays["fc2.bias"] = Array("float32", (3,), "numpy.ndarray", b"garbage")


def far(arrays: dict[str, Array], metrics: dict[str, Any]) -> None:
    arrays["fc2.bias"] = Array(np.full(3, 1e6, np.float32))


def archive(arrays: dict[str, Array], metrics: dict[str, Any]) -> None:
    file = io.BytesIO()
    np.savez(file, np.zeros(3, np.float32))
    arrays["fc2.bias"] = Array("float32", (3,), "numpy.ndarray", file.getvalue())


def strange_name(arrays: dict[str, Array], metrics: dict[str, Any]) -> None:
    arrays["\x1b[2J" + "x" * 10**6] = Array(np.zeros(3, np.float32))


def heavy(arrays: dict[str, Array], metrics: dict[str, Any]) -> None:
    metrics["num-examples"] = 10**12


def negative(arrays: dict[str, Array], metrics: dict[str, Any]) -> None:
    metrics["num-examples"] = -5


def no_weight(arrays: dict[str, Array], metrics: dict[str, Any]) -> None:
    del metrics["num-examples"]


def bad_loss(arrays: dict[str, Array], metrics: dict[str, Any]) -> None:
    metrics["loss"] = math.inf


def listed_loss(arrays: dict[str, Array], metrics: dict[str, Any]) -> None:
    metrics["loss"] = [1.0, 2.0]


def listed_examples(arrays: dict[str, Array], metrics: dict[str, Any]) -> None:
    metrics["num-examples"] = [24, 24]


def large_loss(arrays: dict[str, Array], metrics: dict[str, Any]) -> None:
    metrics["loss"] = 1e300


def many_metrics(arrays: dict[str, Array], metrics: dict[str, Any]) -> None:
    metrics["mine"] = [0.0] * 100_000


def long_metric(arrays: dict[str, Array], metrics: dict[str, Any]) -> None:
    metrics["x" * 10**6] = 1.0


BAD = {
    nan: "'fc2.bias' has values that are infinite or NaN",
    wrong_shape: "'fc2.bias' is float32[4], expected float32[3]",
    scalar: "'fc2.bias' is float32[], expected float32[3]",
    wrong_type: "'fc2.bias' is float64[3], expected float32[3]",
    missing: "missing array 'fc2.bias'",
    foreign: "unknown array 'evil'",
    huge: "'fc2.bias' has 4,194,432 bytes, more than",
    announced_wrongly: "'fc2.bias' contains float32[5]",
    no_file: "'fc2.bias' cannot be read",
    far: "its update has norm 1.7",
    archive: "'fc2.bias' cannot be read: it is not an .npy file",
    strange_name: "unknown array '",
    heavy: "'num-examples' is 1000000000000",
    listed_loss: "metric 'loss' is a list, expected a number",
    listed_examples: "metric 'num-examples' is a list, expected a number",
    large_loss: "metric 'loss' is 1e+300",
    many_metrics: "it has 100,004 metrics, more than 100",
    long_metric: "the name of a metric has 1,000,000 characters",
    negative: "'num-examples' is -5",
    no_weight: "missing metric 'num-examples'",
    bad_loss: "metric 'loss' is inf",
}


@pytest.mark.parametrize("change", BAD, ids=lambda change: change.__name__)
def test_an_invalid_reply_is_rejected_by_name(change: Any) -> None:
    artifacts = built()

    def spoil(node: int, reply: Message) -> Message:
        return changed(reply, change) if node == 3 and "arrays" in reply.content else reply

    result, checked, _ = federate(artifacts, nodes=3, spoil=spoil, largest_update=1000.0)
    assert [(r.round, r.node) for r in checked.refusals] == [(1, 3), (2, 3), (3, 3)]
    assert all(BAD[change] in r.reason for r in checked.refusals), checked.refusals[0]
    assert all(len(r.reason) <= 300 and r.reason.isprintable() for r in checked.refusals)
    same(result.arrays, by_hand(artifacts, nodes=2))


def test_a_round_without_a_good_reply_changes_nothing(tmp_path: Path) -> None:
    artifacts = built()

    def spoil(node: int, reply: Message) -> Message:
        return changed(reply, nan) if "arrays" in reply.content else reply

    found, checked, _ = federate(artifacts, spoil=spoil, rounds=1, out=tmp_path / "global")
    assert len(checked.refusals) == 2
    assert not (tmp_path / "global").exists()
    assert found.arrays is None or len(found.arrays) == 0


def test_nodes_that_do_not_answer_are_reported(tmp_path: Path) -> None:
    artifacts, report = built(), tmp_path / "rounds.jsonl"

    def spoil(node: int, reply: Message) -> Message | None:
        if node == 2:
            return None
        trained = "arrays" in reply.content
        return changed(reply, nan) if node == 3 and trained else reply

    result, _, _ = federate(artifacts, nodes=3, spoil=spoil, report=report, timeout=0.2)
    trained, evaluated = (
        [line for line in map(json.loads, report.read_text().splitlines()) if line["kind"] == kind]
        for kind in ("train", "evaluate")
    )
    assert [line["silent"] for line in trained] == [["2"]] * 3
    assert [list(line["refused"]) for line in trained] == [["3"]] * 3
    assert [line["silent"] for line in evaluated] == [["2"]] * 3
    same(result.arrays, by_hand(artifacts, nodes=1))


def test_a_reply_that_flower_cannot_read_does_not_end_the_run(tmp_path: Path) -> None:
    artifacts, report = built(), tmp_path / "rounds.jsonl"

    def spoil(node: int, reply: Message) -> Message:
        if node == 3:
            raise json.JSONDecodeError("Expecting value", "?", 0)  # as of a damaged RecordDict
        return reply

    result, checked, _ = federate(artifacts, nodes=3, spoil=spoil, report=report)
    lines = [json.loads(line) for line in report.read_text().splitlines()]
    assert len(lines) == 6
    for line in lines:
        assert "cannot be read: JSONDecodeError" in line["refused"]["3"]
        assert (line["failed"], line["silent"]) == ([], [])
    assert {r.node for r in checked.refusals} == {3}
    same(result.arrays, by_hand(artifacts, nodes=2))


def test_errors_of_the_network_are_not_replies() -> None:
    def spoil(node: int, reply: Message) -> Message:
        raise ConnectionResetError("by peer")

    with pytest.raises(ConnectionResetError):
        federate(built(), spoil=spoil, rounds=1)


def test_by_default_an_update_is_at_most_ten_times_the_median() -> None:
    artifacts = built()
    for size in (1e38, 20.0):

        def spoil(node: int, reply: Message, size: float = size) -> Message:
            if node != 3 or "arrays" not in reply.content:
                return reply
            return changed(
                reply, lambda a, _: a.update({"fc2.bias": Array(np.full(3, size, np.float32))})
            )

        result, checked, _ = federate(artifacts, nodes=3, spoil=spoil)
        assert [(r.round, r.node) for r in checked.refusals] == [(1, 3), (2, 3), (3, 3)]
        assert "its update has norm" in checked.refusals[0].reason
        same(result.arrays, by_hand(artifacts, nodes=2))
    result, checked, _ = federate(artifacts, nodes=3, spoil=spoil, largest_update=math.inf)
    assert not checked.refusals


def test_of_two_clients_an_update_is_at_most_ten_times_the_weights() -> None:
    artifacts = built()

    def spoil(node: int, reply: Message) -> Message:
        if node != 2 or "arrays" not in reply.content:
            return reply
        return changed(
            reply, lambda a, _: a.update({"fc2.bias": Array(np.full(3, 1e38, np.float32))})
        )

    result, checked, _ = federate(artifacts, nodes=2, spoil=spoil)
    assert [r.node for r in checked.refusals] == [2, 2, 2]
    same(result.arrays, by_hand(artifacts, nodes=1))


def test_by_default_a_claim_weighs_at_most_ten_times_the_median(tmp_path: Path) -> None:
    """The weights of the client that claims too much stay one update of several."""
    artifacts, report = built(), tmp_path / "rounds.jsonl"

    def spoil(node: int, reply: Message) -> Message:
        if node == 3:
            return changed(reply, lambda _, m: m.update({"num-examples": 1_000_000_000}))
        return reply

    _, checked, _ = federate(artifacts, nodes=3, spoil=spoil, rounds=1, report=report)
    assert not checked.refusals
    trained, evaluated = [json.loads(line) for line in report.read_text().splitlines()]
    for line in (trained, evaluated):
        assert line["capped"] == {"3": 1_000_000_000}
        assert line["nodes"]["3"] == 10 * line["nodes"]["2"]
    federate(artifacts, nodes=3, spoil=spoil, rounds=1, report=report, most_examples=1e10)
    last = json.loads(report.read_text().splitlines()[-2])
    assert (last["capped"], last["nodes"]["3"]) == ({}, 1_000_000_000)


def test_lists_of_metrics_that_differ_are_left_out() -> None:
    def spoil(node: int, reply: Message) -> Message:
        return changed(reply, lambda _, m: m.update(own=[1.0] * node, each=[1.0, 3.0]))

    result, checked, _ = federate(built(), spoil=spoil, rounds=1)
    assert checked.refusals == []
    assert "own" not in result.train_metrics_clientapp[1]
    assert result.train_metrics_clientapp[1]["each"] == pytest.approx([1.0, 3.0])


def test_metrics_of_one_client_alone_are_left_out() -> None:
    def spoil(node: int, reply: Message) -> Message:
        return changed(reply, lambda _, m: m.update(mine=1.0)) if node == 1 else reply

    result, checked, _ = federate(built(), spoil=spoil, rounds=1)
    assert checked.refusals == []
    assert "mine" not in result.train_metrics_clientapp[1]
    assert "mine" not in result.evaluate_metrics_clientapp[1]


def test_an_invalid_evaluation_is_rejected(tmp_path: Path) -> None:
    def spoil(node: int, reply: Message) -> Message:
        evaluated = "arrays" not in reply.content
        return changed(reply, bad_loss) if node == 1 and evaluated else reply

    report = tmp_path / "rounds.jsonl"
    result, checked, _ = federate(built(), spoil=spoil, rounds=1, report=report)
    assert [r.node for r in checked.refusals] == [1]
    trained, evaluated = [json.loads(line) for line in report.read_text().splitlines()]
    assert (list(trained["refused"]), list(evaluated["refused"])) == ([], ["1"])
    assert math.isfinite(result.evaluate_metrics_clientapp[1]["loss"])
