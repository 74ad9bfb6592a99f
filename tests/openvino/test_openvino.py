"""Training on OpenVINO equals training on the CPU: nets, LoRA on int4 weights, checkpoints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onnxtrain
from onnxtrain import losses, optim
from onnxtrain.artifacts import Artifacts
from onnxtrain.text import without_cache
from tests.openvino import ROOT, python_path
from tests.text.models import llama
from tests.training.made import made
from tests.zoo.export import export, input_names
from tests.zoo.models import ZOO

NETS = ("mlp", "siren", "deep_sets", "lenet", "resnet", "unet", "tcn", "gcn", "two_towers", "gpt2")
LORA = "int4 decoder with LoRA"
WEB = ROOT / "web"


def write_net(name: str, folder: Path) -> None:
    """Write artifacts for OpenVINO, and a batch."""
    entry = ZOO[name]
    model, inputs = export(entry, entry.modes[-1]).model, entry.inputs(4)
    loss = losses.LossTerm(losses.MSE(), output=model.graph.output[0].name)
    artifacts = onnxtrain.build(model, loss=loss, optimizer=optim.AdamW(lr=1e-3), target="openvino")
    artifacts.save(folder)
    batch = {n: x.numpy() for n, x in zip(input_names(entry), inputs, strict=True)}
    y = entry.build()(*inputs)
    y = y[0] if isinstance(y, tuple) else y
    goal = 0.5 * np.random.default_rng(0).standard_normal(tuple(y.shape))
    np.savez(folder / "batch.npz", **batch, **{target_of(artifacts): goal.astype(np.float32)})


def target_of(artifacts: Artifacts) -> str:
    spec = artifacts.manifest.model("train")
    assert spec is not None
    (goal,) = spec.inputs_of("target")
    return goal.name


def write_decoder(folder: Path) -> None:
    """Write a decoder with int4 weights and LoRA branches."""
    adapted = onnxtrain.lora(without_cache(llama(layers=1)), 4)
    artifacts = onnxtrain.build(
        adapted, loss="causal_lm", optimizer=optim.AdamW(lr=1e-2), target="openvino"
    )
    artifacts.save(folder)
    spec = artifacts.manifest.model("train")
    assert spec is not None
    ids = np.random.default_rng(0).integers(0, 96, (2, 12))
    arrays = {t.name: np.ones((2, 12), np.int64) for t in spec.inputs_of("input", "target")}
    np.savez(folder / "batch.npz", **(arrays | {n: ids for n in arrays if "mask" not in n}))


def classifier_batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((8, 6)).astype(np.float32)
    return {"x": x, "labels": rng.integers(0, 3, 8)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Artifacts, batches and a checkpoint of the CPU."""
    top = tmp_path_factory.mktemp("openvino")
    for name in NETS:
        (top / "nets" / name).mkdir(parents=True)
        write_net(name, top / "nets" / name)
    (top / "nets" / LORA).mkdir()
    write_decoder(top / "nets" / LORA)
    resumed = top / "resumed"
    made(optimizer=optim.AdamW(lr=0.05), target="openvino").save(resumed)
    batch = classifier_batch()
    np.savez(resumed / "batch.npz", **batch)
    trainer = onnxtrain.Trainer(resumed, threads=1)
    for _ in range(5):
        trainer.step(**batch)
    trainer.save(resumed / "cpu.safetensors")
    return top


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    """What a process with OpenVINO computes."""
    command = [sys.executable, "-m", "tests.openvino.inside", str(folder)]
    environment = {**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert not done.returncode, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("net", [*NETS, LORA])
def test_losses_equal_those_of_the_cpu(net: str, results: dict[str, Any]) -> None:
    there, here = results["nets"][net]
    assert len(there) == 20
    assert there == pytest.approx(here, rel=1e-5)
    assert there[-1] < there[0]


def test_layouts_evaluation_and_prediction(folder: Path, results: dict[str, Any]) -> None:
    batch = classifier_batch()
    trainer = onnxtrain.Trainer(folder / "resumed", threads=1)
    wanted = [trainer.step(**batch).loss for _ in range(3)]
    evaluation = trainer.evaluate_batch(**batch).loss
    prediction = trainer.predict(batch["x"])["scores"].ravel()[:5]
    gradient = np.abs(trainer.gradients(**batch)["fc1.weight"]).sum()
    for found in results["layouts"].values():
        assert found["losses"] == pytest.approx(wanted, rel=1e-5)
        assert found["evaluation"] == pytest.approx(evaluation, rel=1e-5)
        assert found["prediction"] == pytest.approx(prediction, rel=1e-4)
        assert found["gradient"] == pytest.approx(gradient, rel=1e-4)
    nodes = {
        role: counts for f in results["layouts"].values() for role, counts in f["nodes"].items()
    }
    assert set(nodes) == {"step", "train", "optimizer"}
    for role in ("step", "train"):
        assert nodes[role]["OpenVINOExecutionProvider"] > nodes[role].get("CPUExecutionProvider", 0)
    assert set(nodes["optimizer"]) == {"CPUExecutionProvider"}, "state is in memory of the CPU"


def test_errors_of_the_real_provider(results: dict[str, Any]) -> None:
    for case in ("no such option", "no such hardware"):
        assert "openvino: OpenVINOExecutionProvider does not start: " in results[case]
    assert results["tested"]


def test_a_checkpoint_continues_on_other_devices(folder: Path, results: dict[str, Any]) -> None:
    """From the CPU to OpenVINO, and from there to the CPU and to Node."""
    batch, resumed = classifier_batch(), folder / "resumed"
    trainer = onnxtrain.Trainer(
        made(optimizer=optim.AdamW(lr=0.05), target="cpu"), threads=1, layout="vector"
    )
    trainer.load(resumed / "cpu.safetensors")
    wanted = [trainer.step(**batch).loss for _ in range(10)]
    assert results["resumed"] == pytest.approx(wanted[:5], rel=1e-5)
    again = onnxtrain.Trainer(resumed, threads=1)
    again.load(resumed / "openvino.safetensors")
    assert again.global_step == 10
    assert [again.step(**batch).loss for _ in range(5)] == pytest.approx(wanted[5:], rel=1e-5)
    assert in_node(resumed, batch) == pytest.approx(wanted[5:], rel=1e-5)


def in_node(folder: Path, batch: dict[str, np.ndarray]) -> list[float]:
    """Return the losses of five steps in Node, from the checkpoint of OpenVINO."""
    module = WEB / "node_modules" / ".cache" / "openvino" / "onnxtrain.mjs"  # finds its runtime
    source = WEB / "packages" / "onnxtrain" / "src" / "index.ts"
    bundle = [WEB / "node_modules" / ".bin" / "esbuild", source, "--bundle", "--format=esm"]
    externals = [f"--external:onnxruntime-{name}" for name in ("node", "web", "web/webgpu")]
    flags = ["--platform=node", f"--outfile={module}", "--log-level=warning", *externals]
    subprocess.run([*bundle, *flags], check=True, timeout=60)
    arrays = {n: {"dims": a.shape, "values": a.ravel().tolist()} for n, a in batch.items()}
    (folder / "batch.json").write_text(json.dumps(arrays))
    script = Path(__file__).with_name("resume.mjs")
    command = ["node", script, module, folder, folder / "openvino.safetensors"]
    done = subprocess.run(
        [*command, folder / "batch.json"], capture_output=True, text=True, timeout=120, check=False
    )
    assert not done.returncode, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])
