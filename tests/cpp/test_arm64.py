"""The same sources for arm64, run by an emulator with npm's arm64 library."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import onnxtrain
from tests.cpp import nets, ort_root
from tests.cpp.programs import SOURCE, need, run

CROSS = "aarch64-linux-gnu-g++"
PROCESSOR = """processor\t: 0
Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 cpuid
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x0
CPU part\t: 0xd08
CPU revision\t: 3

"""
LIBRARIES = ort_root.ROOT / "web/node_modules/onnxruntime-node/bin"


def machine(folder: Path) -> Path:
    """Return a root of the file system in which the processor is that of the emulator.

    The library asks for it when it is loaded, and cannot stand the answer of another machine.
    """
    cpus = folder / "sys/devices/system/cpu"
    cpus.mkdir(parents=True)
    (folder / "proc").mkdir()
    (folder / "proc/cpuinfo").write_text(PROCESSOR)
    for name in ("possible", "present"):
        (cpus / name).write_text("0\n")
    (folder / "lib").symlink_to("/usr/aarch64-linux-gnu/lib")
    return folder


@pytest.mark.full
@pytest.mark.parametrize("name", ["mlp", "cnn", "transformer"])
def test_steps(tmp_path: Path, name: str) -> None:
    need(CROSS, "qemu-aarch64")
    library = next(LIBRARIES.glob("*/linux/arm64/libonnxruntime.so.1"), None)
    if library is None:
        pytest.skip("npm's arm64 library is not installed (npm ci in web/)")
    include = ort_root.headers()
    assert include is not None
    root = ort_root.make(tmp_path / "ort", library, include)
    program = tmp_path / "driver"
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-Wno-psabi"]
    paths = [f"-I{SOURCE}", f"-I{root / 'include'}", f"-L{root / 'lib'}"]
    run(CROSS, *flags, *paths, SOURCE / "tests/driver.cpp", "-lonnxruntime", "-o", program)
    folder = nets.artifacts(name, tmp_path / "artifacts")
    rows = nets.batches(name, tmp_path / "batches")
    places = (folder, tmp_path / "batches", 20, tmp_path / "losses", tmp_path / "saved")
    emulated = ["-cpu", "cortex-a72", "-L", machine(tmp_path / "root")]
    emulated += ["-E", f"LD_LIBRARY_PATH={root / 'lib'}"]
    run("qemu-aarch64", *emulated, program, "train", *places, env={"SEED": "5"})
    trainer = onnxtrain.Trainer(folder, seed=5, threads=1)
    losses = [trainer.step(**rows[i % len(rows)]).loss for i in range(20)]
    # Another processor and another version of the library: other last bits.
    np.testing.assert_allclose(np.fromfile(tmp_path / "losses", np.float32), losses, rtol=1e-4)
    trainer.load(tmp_path / "saved")
    assert trainer.global_step == 20
