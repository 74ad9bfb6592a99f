"""The blocks of docs/federated.md, run one after the other in an empty folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from examples.federated import machines

from onnxtrain.federation.serve import superlink
from tests.docs.blocks import blocks
from tests.flower.inside.running import build_javascript, needs_browser

PAGE = "docs/federated.md"
PACKAGE = machines.WEB / "packages" / "onnxtrain"


def block(kind: str, word: str) -> str:
    """Return the one block of the page with a word in it."""
    (code,) = [b.code for b in blocks(PAGE) if b.kind == kind and word in b.code and not b.why]
    return code


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder, where what the page installs is installed."""
    build_javascript()
    monkeypatch.chdir(tmp_path)
    home, programs = tmp_path / "home", tmp_path / "programs"
    for made in (home, programs, tmp_path / "site" / "node_modules"):
        made.mkdir(parents=True)
    monkeypatch.setenv("FLWR_HOME", str(home))
    for name, value in machines.environment(home).items():
        monkeypatch.setenv(name, value)
    onnxtrain = programs / "onnxtrain"
    onnxtrain.write_text(f'#!/bin/sh\nexec {sys.executable} -m onnxtrain "$@"\n')
    onnxtrain.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "node_modules").symlink_to(machines.WEB / "node_modules")
    site = tmp_path / "site" / "node_modules"
    shutil.copytree(PACKAGE / "dist", site / "onnxtrain" / "dist")
    runtime = machines.WEB / "node_modules" / "onnxruntime-web" / "dist"
    shutil.copytree(runtime, site / "onnxruntime-web" / "dist")
    return tmp_path


def shell(code: str) -> str:
    done = subprocess.run(
        ["bash", "-ec", code], capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, f"{code}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done.stdout


def start(folder: Path) -> None:
    """Do what comes before both ways to run."""
    shell(block("sh", "onnxtrain federate init"))
    assert (folder / "study" / "federated" / "client.py").exists()


def check_result(folder: Path, nodes: int) -> None:
    lines = (folder / "study" / "rounds.jsonl").read_text().splitlines()
    trained = [entry for entry in map(json.loads, lines) if entry["kind"] == "train"]
    assert [entry["round"] for entry in trained] == [1, 2, 3]
    assert all(len(entry["nodes"]) == nodes for entry in trained)
    assert trained[-1]["metrics"]["loss"] < trained[0]["metrics"]["loss"]
    shell(block("sh", "onnxtrain export"))
    session = onnxruntime.InferenceSession("trained.onnx", providers=["CPUExecutionProvider"])
    with np.load("train.npz") as file:
        (logits,) = session.run(["logits"], {"image": file["image"]})
        assert (logits.argmax(1) == file["labels"]).mean() > 0.5


@pytest.mark.full
def test_the_simulation_of_the_page(folder: Path) -> None:
    pytest.importorskip("ray", reason="simulations need flwr[simulation]")
    start(folder)
    # Flower would start a SuperLink for `local` by itself, and leave it running.
    with superlink(machines.free_port(), simulation=True, log=folder / "superlink.log") as address:
        machines.write_connection(folder / "home", address, name="local")
        shell(block("sh", "flwr run study local"))
    check_result(folder, 3)


@needs_browser
@pytest.mark.full
def test_the_federation_of_the_page(folder: Path) -> None:
    start(folder)
    exec(block("python", "tab.json"), {})
    link, proxy = machines.free_port(), machines.free_port()

    def here(text: str) -> str:
        return text.replace(":8000", f":{link}").replace(":8080", f":{proxy}")

    (folder / "client.mjs").write_text(here(block("js", "fileNodeStore")))
    (folder / "site" / "index.html").write_text(block("html", "FlowerNode"))
    (folder / "home" / "config.toml").write_text(here(block("toml", "superlink.lab")))
    serve, supernode, node, run = here(block("sh", "flower-supernode")).strip().splitlines()
    serve = f"{serve.partition('#')[0]} --port {proxy} --superlink-port {link}"
    supernode += f" --port {machines.free_port()}"
    with machines.process(["bash", "-c", f"exec {serve}"], folder / "serve.log") as served:
        machines.wait_for_port(proxy, served)
        with (
            machines.process(["bash", "-c", f"exec {supernode}"], folder / "python.log"),
            machines.process(["bash", "-c", f"exec {node}"], folder / "node.log"),
            machines.tab(f"http://127.0.0.1:{proxy}", folder / "tab.log"),
        ):
            shell(run)
            time.sleep(1)
    check_result(folder, 3)
