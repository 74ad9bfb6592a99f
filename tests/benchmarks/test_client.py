"""The protocol with an engine's process."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
from benchmarks.peers import Peer

from benchmarks import client

ENGINE = """
import os, sys, time
from benchmarks.workers.serve import Engine, serve

class Toy(Engine):
    def load(self, folder, made, optimizer, threads, **facts):
        print("noise on standard output", flush=True)
        if optimizer == "none":
            raise NotImplementedError("no rule for Foo\\nmore")
        if optimizer == "dies":
            print("the last words", file=sys.stderr)
            os._exit(3)
        if optimizer == "sleeps":
            time.sleep(1200)
        self.loss = 2.0
    def step(self, lr):
        self.loss -= lr
        return self.loss
    def versions(self):
        return {"toy": "1"}

serve(Toy())
"""


@dataclasses.dataclass(frozen=True)
class Here(Peer):
    """An engine in the environment of the tests."""

    def python(self) -> Path:
        return Path(sys.executable)


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Peer:
    folder = tmp_path / "benchmarks" / "workers"
    folder.mkdir(parents=True)
    real = Path(client.ROOT) / "benchmarks"
    (tmp_path / "benchmarks" / "__init__.py").write_text("")
    (folder / "__init__.py").write_text("")
    (folder / "serve.py").write_text((real / "workers" / "serve.py").read_text())
    (folder / "toy.py").write_text(ENGINE)
    monkeypatch.setattr(client, "ROOT", tmp_path)
    monkeypatch.setattr(client, "CACHE", tmp_path / "cache")
    return Here("toy", "toy", None, "toy")


def prepare(engine: client.Client, optimizer: str, timeout: float = 1200.0) -> dict:
    asked = {"folder": ".", "made": ".", "optimizer": optimizer, "threads": 1, "lr": 0.1}
    return engine.ask("prepare", timeout, **asked)


def test_an_engine_answers_and_can_go_on_after_a_refusal(toy: Peer) -> None:
    with client.Client(toy, 1, "test") as engine:
        with pytest.raises(client.Refused, match=r"^NotImplementedError: no rule for Foo$"):
            prepare(engine, "none")
        answer = prepare(engine, "sgd")
        assert answer["losses"] == pytest.approx([1.9, 1.8, 1.7, 1.6, 1.5, 1.4])
        assert answer["versions"]["toy"] == "1"
        assert answer["peak_mb"] >= 0
        times = engine.ask("run", 1200.0, steps=3)
        assert times["wall"] > 0


def test_an_engine_that_dies_is_refused_with_its_last_words(toy: Peer) -> None:
    with (
        client.Client(toy, 1, "test") as engine,
        pytest.raises(client.Refused, match="ended with 3: the last words"),
    ):
        prepare(engine, "dies")


def test_an_engine_that_takes_too_long_is_refused(toy: Peer) -> None:
    with (
        client.Client(toy, 1, "test") as engine,
        pytest.raises(client.Refused, match="took more than 2 s"),
    ):
        prepare(engine, "sleeps", timeout=2.0)
    assert engine.process.poll() is not None


def test_an_engine_without_environment_is_refused() -> None:
    with pytest.raises(client.Refused, match="make bench-setup"):
        client.Client(Peer("x", "x", "no-such-environment", "x"), 1, "test")


def test_memory_of_an_engine_is_not_that_of_its_parent(toy: Peer) -> None:
    ballast = bytearray(400_000_000)
    ballast[::4096] = b"x" * len(ballast[::4096])
    with client.Client(toy, 1, "test") as engine:
        assert prepare(engine, "sgd")["peak_mb"] < 100
    assert len(ballast) == 400_000_000
