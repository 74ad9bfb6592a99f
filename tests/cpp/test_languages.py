"""The programs of docs/any-language.md train, each with the numbers of Python's trainer."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

import onnxtrain
from onnxtrain.checkpoint import load_checkpoint
from onnxtrain.compat.ort import artifacts
from onnxtrain.compat.ort.api import CheckpointState
from tests.artifacts.models import finished, graph, weight
from tests.cpp import nets, ort_root
from tests.cpp.programs import SOURCE, built, need, run

STEPS = 500
CHECKS = ["trainer_checks", "compat_checks"]
OLDEST = "1.20.1"
X = np.array([[0, 0], [0, 1], [1, 0], [1, 1]], np.float32)
LABELS = np.array([0, 1, 1, 0])


def exclusive_or() -> onnx.ModelProto:
    rng, op = np.random.default_rng(3), graph()

    def draw(name: str, *shape: int) -> ir.Value:
        return weight(op, name, rng.standard_normal(shape).astype(np.float32))

    x = op.input("x", ir.DataType.FLOAT, ["batch", 2])
    h = op.Tanh(op.Gemm(x, draw("fc1.weight", 2, 8), draw("fc1.bias", 8)))
    return finished(op, logits=op.Gemm(h, draw("fc2.weight", 8, 2), draw("fc2.bias", 2)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with ``artifacts``, in which programs run."""
    built_artifacts = onnxtrain.build(
        exclusive_or(),
        loss="cross_entropy",
        optimizer=onnxtrain.optim.AdamW(lr=0.02),
        metrics=["accuracy"],
    )
    built_artifacts.save(tmp_path / "artifacts")
    return tmp_path


def check(folder: Path, printed: str, *, exact: bool = True) -> None:
    """Compare the last loss that a program printed and what it wrote with Python's."""
    trainer = onnxtrain.Trainer(folder / "artifacts", threads=1)
    loss = [trainer.step(X, LABELS).loss for _ in range(STEPS)][-1]
    assert loss < 0.05
    assert float(printed.split()[-1]) == pytest.approx(loss, abs=5e-5)
    tensors, meta = load_checkpoint(folder / "checkpoint.safetensors")
    assert meta["step"] == STEPS
    for key, array in trainer.state_dict().items():
        same = tensors[key].tobytes() == array.tobytes()
        assert same or (not exact and np.allclose(tensors[key], array, rtol=1e-3)), key
    session = onnxruntime.InferenceSession(folder / "trained.onnx")
    logits = np.asarray(session.run(None, {"x": X})[0])
    bound = 0 if exact else 1e-3
    np.testing.assert_allclose(logits, trainer.predict(X)["logits"], rtol=bound)
    np.testing.assert_array_equal(logits.argmax(1), LABELS)


@pytest.mark.parametrize("program", ["quickstart", "c_example", "compat_example"])
def test_example(folder: Path, program: str) -> None:
    check(folder, run(built() / "tests" / program, cwd=folder))


@pytest.mark.parametrize("program", CHECKS)
def test_promises(tmp_path: Path, program: str) -> None:
    nets.artifacts("mlp", tmp_path / "artifacts")
    assert run(built() / "tests" / program, cwd=tmp_path) == "all checks passed\n"


@pytest.mark.full
@pytest.mark.parametrize("program", CHECKS)
def test_promises_under_the_sanitizers(tmp_path: Path, program: str) -> None:
    nets.artifacts("mlp", tmp_path / "artifacts")
    folder = built("sanitized", program)
    assert run(folder / "tests" / program, cwd=tmp_path) == "all checks passed\n"


def test_artifacts_of_onnxruntime_training(tmp_path: Path) -> None:
    """Four files that ``generate_artifacts`` wrote are enough, the frozen weight among them."""
    (tmp_path / "artifacts").mkdir()
    module = nets.fixtures()
    artifacts.generate_artifacts(
        module.mlp(),
        requires_grad=["fc1.bias", "fc2.weight", "fc2.bias"],
        frozen_params=["fc1.weight"],
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.AdamW,
        artifact_directory=tmp_path / "artifacts",
    )
    assert run(built() / "tests/compat_checks", cwd=tmp_path) == "all checks passed\n"
    # Python's own old classes go on from it.
    state = CheckpointState.load_checkpoint(tmp_path / "with_state")
    assert state.properties["epoch"] == 3


def java(folder: Path) -> Callable[[str], str]:
    need("javac", "java")
    libraries = built()
    sources = [SOURCE / "java/onnxtrain/Trainer.java", SOURCE / "tests/Example.java"]
    sources.append(SOURCE / "tests/Checks.java")
    command = ["javac", "-Xlint:all", "-Werror", "-d", folder / "classes", *sources]
    subprocess.run([str(c) for c in command], check=True)
    options = ["-Xint", f"-Djava.library.path={libraries}", "-cp", folder / "classes"]
    return lambda name: run("java", *options, name, cwd=folder)


def test_java(folder: Path) -> None:
    start = java(folder)
    check(folder, start("Example"))
    assert start("Checks") == "all checks passed\n"


def test_rust(folder: Path) -> None:
    need("rustc")
    libraries = built()
    for name, expected in (("example", None), ("checks", "all checks passed\n")):
        flags = [
            "--edition=2021",
            "-Dwarnings",
            "-L",
            libraries,
            f"-Clink-arg=-Wl,-rpath,{libraries}",
        ]
        link = [f"-Clink-arg=-Wl,-rpath-link,{libraries / 'ort/lib'}", "-o", folder / name]
        run("rustc", *flags, *link, SOURCE / f"tests/{name}.rs")
        printed = run(folder / name, cwd=folder)
        if expected is None:
            check(folder, printed)
        else:
            assert printed == expected


@pytest.mark.full
def test_oldest_runtime(folder: Path) -> None:
    """The shared library asks for no more than onnxruntime 1.20 has."""
    wheels = [folder / "wheels", "--no-deps", "--quiet", f"onnxruntime=={OLDEST}"]
    asked = [sys.executable, "-m", "pip", "download", "--dest", *wheels]
    if subprocess.run([str(a) for a in asked], check=False).returncode:
        pytest.skip(f"onnxruntime {OLDEST} cannot be downloaded")
    with zipfile.ZipFile(next((folder / "wheels").glob("*.whl"))) as wheel:
        wheel.extractall(folder / "old")
    include = ort_root.headers()
    assert include is not None
    library = folder / f"old/onnxruntime/capi/libonnxruntime.so.{OLDEST}"
    root = ort_root.make(folder / "ort", library, include)
    # The linker notes the version of the library: programs are linked with the one that they ship.
    paths = [f"-I{SOURCE}", f"-I{include}", f"-L{root / 'lib'}", "-lonnxruntime"]
    sources = [SOURCE / "src/onnxtrain_c.cpp", "-xc++", SOURCE / "tests/c_example.c"]
    run("g++", "-std=c++17", *sources, *paths, f"-Wl,-rpath,{root / 'lib'}", "-o", folder / "old/c")
    check(folder, run(folder / "old/c", cwd=folder), exact=False)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(pytest.skip.Exception, match="no-such-compiler is not installed"):
        need("no-such-compiler")
    monkeypatch.setattr(ort_root, "headers", lambda: None)
    monkeypatch.setattr(shutil, "which", lambda tool: f"/usr/bin/{tool}")
    with pytest.raises(pytest.skip.Exception, match="no onnxruntime headers"):
        need()
