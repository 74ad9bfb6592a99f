"""Lower the zoo: ``python -m tests.lowering.zoo [NAME ...]``.

Lowers each model to four opsets and compares it with the original export on the zoo's own inputs,
in addition to the comparison in ``lower``. Also lowers each model to onnxjs and runs it there.
Without names, the command updates the table in docs/lowering.md.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime

from onnxtrain.errors import OnnxTrainError
from onnxtrain.lowering.lower import lower
from tests.zoo.export import export, input_names
from tests.zoo.models import ZOO, ZooModel

from .onnxjs_zoo import in_onnxjs
from .single import run

PAGE = Path(__file__).resolve().parents[2] / "docs" / "lowering.md"
START, END = "<!-- zoo -->", "<!-- end of zoo -->"


@dataclass(frozen=True)
class Goal:
    """An opset, whether shapes are static, and the share of the zoo that must lower to it."""

    opset: int
    static: bool
    share: float

    def __str__(self) -> str:
        return f"{self.opset}{' (static)' if self.static else ''}"


ONNXJS = "onnxjs 0.1.8"
ONNXJS_SHARE = 0.85  # of the models that lower to opset 7
GOALS = (Goal(17, False, 0.95), Goal(13, False, 0.92), Goal(9, True, 0.70), Goal(7, True, 0.60))


_COLUMNS = (*(f"opset {g}" for g in GOALS), ONNXJS)


@dataclass(frozen=True)
class Result:
    """Outcome of one model at one goal: ``ok``, ``refused`` or ``WRONG``, with an explanation."""

    status: str
    nodes: int = 0
    note: str = ""


def fixed_sizes(model: onnx.ModelProto, size: int) -> dict[str, int]:
    """Return ``size`` for each symbolic dimension of the inputs."""
    dims = (d for x in model.graph.input for d in x.type.tensor_type.shape.dim)
    return {d.dim_param: size for d in dims if d.dim_param}


def attempt(entry: ZooModel, goal: Goal) -> Result:
    """Lower a model and compare it with its export, at two batch sizes if the batch is symbolic."""
    model = export(entry).model
    batches = entry.batches[:1] if goal.static or entry.static else entry.batches
    sizes = fixed_sizes(model, batches[0]) if goal.static else {}
    try:
        lowered = lower(model, opset=goal.opset, dims=sizes)
    except OnnxTrainError as error:
        lines = str(error).splitlines()
        status = "WRONG" if "differs" in lines[0] else "refused"
        return Result(status, note=" / ".join(line.strip() for line in lines[:3]))
    for batch in batches:
        values = [x.numpy() for x in entry.inputs(batch)]
        feeds = dict(zip(input_names(entry), values, strict=True))
        for a, b in zip(run(model, feeds), run(lowered, feeds), strict=True):
            scale = max(float(np.abs(a).max(initial=0)), 1e-3) if a.dtype.kind == "f" else 1
            if a.shape != b.shape or not np.allclose(a, b, rtol=1e-3, atol=1e-4 * scale):
                return Result("WRONG", note=f"differs at batch {batch}")
    return Result("ok", len(lowered.graph.node))


def main(arguments: list[str]) -> int:
    """Lower the named models (all by default), print a table, return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.lowering.zoo")
    parser.add_argument("names", nargs="*", metavar="NAME", help="models to lower (default: all)")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.names) - set(ZOO))
    if unknown:
        parser.error(f"unknown models: {', '.join(unknown)} (see tests/zoo/models.py)")
    entries = [z for z in ZOO.values() if not options.names or z.name in options.names]
    table: dict[str, list[Result]] = {}
    in_browser = _in_onnxjs([entry.name for entry in entries])
    for entry in entries:
        table[entry.name] = [*(attempt(entry, goal) for goal in GOALS), in_browser[entry.name]]
        print(entry.name.ljust(26), *(_cell(r).ljust(10) for r in table[entry.name]), flush=True)
        for result in table[entry.name]:
            if result.status != "ok":
                print("   ", result.note)
    print(_summary(table))
    if len(entries) == len(ZOO):
        _write(table)
    counts = [sum(rs[i].status == "ok" for rs in table.values()) for i in range(len(GOALS))]
    reached = all(n >= g.share * len(table) for n, g in zip(counts, GOALS, strict=True))
    ran = sum(rs[-1].status == "ok" for rs in table.values())
    reached = reached and ran >= ONNXJS_SHARE * counts[-1]
    wrong = any(r.status == "WRONG" for rs in table.values() for r in rs)
    return 0 if reached and not wrong else 1


def _in_onnxjs(names: list[str]) -> dict[str, Result]:
    """Return the outcomes of the models in onnxjs, at batch 1."""
    status = {"right": "ok", "wrong": "WRONG", "refused": "refused", "not lowered": "refused"}
    with tempfile.TemporaryDirectory() as folder:
        outcomes = in_onnxjs(names, Path(folder), verify=True)
    results = {}
    for name, (_, outcome) in outcomes.items():
        lines = [line.strip() for line in outcome.note.splitlines()[:3]]
        results[name] = Result(status[outcome.status], outcome.nodes, " / ".join(lines))
    return results


def _cell(result: Result) -> str:
    return str(result.nodes) if result.status == "ok" else result.status


def _summary(table: dict[str, list[Result]]) -> str:
    parts = []
    for i, goal in enumerate(GOALS):
        ok = sum(rs[i].status == "ok" for rs in table.values())
        wrong = sum(rs[i].status == "WRONG" for rs in table.values())
        parts.append(f"opset {goal}: {ok} of {len(table)}, {wrong} wrong")
    ok = sum(rs[-1].status == "ok" for rs in table.values())
    wrong = sum(rs[-1].status == "WRONG" for rs in table.values())
    parts.append(f"{ONNXJS}: {ok} of {len(table)}, {wrong} wrong")
    return "; ".join(parts)


def _write(table: dict[str, list[Result]]) -> None:
    text = PAGE.read_text()
    before, rest = text.split(START)
    after = rest.split(END)[1]
    lines = [
        START,
        f"{_summary(table)} (onnx {onnx.__version__}, onnxruntime {onnxruntime.__version__}).",
        "",
        "| model | " + " | ".join(_COLUMNS) + " |",
        "|" + "---|" * (len(_COLUMNS) + 1),
    ]
    lines += [f"| {n} | " + " | ".join(_cell(r) for r in rs) + " |" for n, rs in table.items()]
    notes = {
        f"- {name}, {column}: {r.note}"
        for name, rs in table.items()
        for column, r in zip(_COLUMNS, rs, strict=True)
        if r.status != "ok"
    }
    lines += ["", *sorted(notes), END]
    PAGE.write_text(before + "\n".join(lines) + after)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
