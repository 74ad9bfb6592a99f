"""onnxruntime's own tests of ``onnxruntime.training``, against ``onnxtrain.compat.ort``.

The files are not in this repository: ``make ort-suite ORT_SRC=<checkout of onnxruntime v1.19.2>``.
What is adapted: the imports are aliased, "cuda" is read as "cpu", and torch exports with its legacy
exporter. Stamps of newer ONNX versions than stock onnxruntime takes are lowered by
``onnxblock.base``.
"""

from __future__ import annotations

import functools
import sys
import tempfile
from pathlib import Path

import pytest
import torch

import onnxtrain.compat.ort

FOLDER = "orttraining/orttraining/test/python"
FILES = ("orttraining_test_ort_apis_onnxblock.py", "orttraining_test_ort_apis_py_bindings.py")
CANNOT = {
    "test_cuda_execution_provider": "asserts that parameters are on a CUDA device",
    "test_ort_custom_ops": "needs libcustom_op_library.so, which is not in git",
}


class Counter:
    """Counts the cases by outcome."""

    def __init__(self) -> None:
        self.passed: list[str] = []
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid.split("::")[-1])
        elif report.when == "call" and report.passed:
            self.passed.append(report.nodeid.split("::")[-1])


def main(checkout: str, *arguments: str) -> int:
    """Run the files of a checkout; give 0 if all pass that can."""
    source = Path(checkout) / FOLDER
    missing = [name for name in FILES if not (source / name).exists()]
    if missing:
        print(f"{source} has no {', '.join(missing)}\nhint: ORT_SRC is a checkout of tag v1.19.2")
        return 2
    onnxtrain.compat.ort.install()
    torch.onnx.export = functools.partial(torch.onnx.export, dynamo=False)
    counter = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for name in FILES:
            text = (source / name).read_text().replace('"cuda"', '"cpu"')
            (Path(folder) / name).write_text(text)
        options = [
            "-q",
            "-p",
            "no:randomly",
            "-p",
            "no:cacheprovider",
            "-W",
            "ignore",
            "-c",
            "/dev/null",
        ]
        options += [f"--rootdir={folder}", *arguments]
        pytest.main([*options, *(str(Path(folder) / name) for name in FILES)], plugins=[counter])
    print(f"\n{len(counter.passed)} of {len(counter.passed) + len(counter.failed)} cases pass")
    for name in counter.failed:
        print(f"  {name}: {CANNOT.get(name, 'should pass')}")
    return int(any(name not in CANNOT for name in counter.failed))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
