"""Run the zoo: ``python -m tests.zoo [NAME ...] [--fast]``; a full run also writes docs/zoo.md."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import onnx
import onnxruntime
import torch

from .check import Result, check
from .models import ZOO
from .report import COLUMNS, page, row, summary

PAGE = Path(__file__).resolve().parents[2] / "docs" / "zoo.md"
WIDTHS = (22, 5, 8, 10, 11, 11, 0)


def main(arguments: list[str]) -> int:
    """Check the named models (all by default), print a table, return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.zoo")
    parser.add_argument("names", nargs="*", metavar="NAME", help="models to run (default: all)")
    parser.add_argument("--fast", action="store_true", help="only the subset that pytest runs")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.names) - set(ZOO))
    if unknown:
        parser.error(f"no such model: {', '.join(unknown)}; there are {', '.join(sorted(ZOO))}")
    torch.set_num_threads(1)
    chosen = [z for z in ZOO.values() if not options.names or z.name in options.names]
    chosen = [z for z in chosen if z.fast or not options.fast]
    _print(COLUMNS)
    results = []
    for entry in chosen:
        for mode in entry.modes:
            results.append(_guarded(entry, mode))
            _print(row(results[-1]))
    print(summary(results))
    if len(chosen) == len(ZOO):
        versions = f"torch {torch.__version__}, onnx {onnx.__version__}, "
        PAGE.write_text(page(results, versions + f"onnxruntime {onnxruntime.__version__}"))
    return 0 if all(result.status == "pass" for result in results) else 1


def _guarded(entry, mode: str) -> Result:
    """Return the result; an unexpected exception becomes a failure with its message."""
    try:
        return check(entry, mode)
    except Exception as error:
        result = Result(entry.name, mode)
        text = str(error).strip() or "no message"
        result.fail(f"{type(error).__name__}: {text.splitlines()[0]}")
        return result


def _print(cells: tuple[str, ...]) -> None:
    padded = (cell.ljust(width) for cell, width in zip(cells, WIDTHS, strict=True))
    print("  ".join(padded), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
