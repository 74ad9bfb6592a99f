"""Gradient graphs of this project beside those of onnx-ad: building, running, agreement.

    python -m benchmarks.gradients            # prints the table
    python -m benchmarks.gradients --write    # docs/benchmarks.md

Both compute vector-Jacobian products for every parameter and the input, as standard ONNX, and run
on the same onnxruntime with one thread, in turns. Loss and optimizer are left out.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime

import onnxtrain
from benchmarks import machine, page, quiet, report
from benchmarks.prepare import prepared
from benchmarks.workers.serve import first_line
from benchmarks.workloads import WORKLOADS

NETS = ["mlp", "cnn", "lm2k", "gpt2"]
ROUNDS, SLICE = 7, 0.2  # a round runs an engine for about that many seconds


def lifted(name: str) -> onnx.ModelProto:
    """Return the net with its parameters as inputs, which is what onnx-ad differentiates by."""
    folder = prepared(WORKLOADS[name])
    model = onnx.load(str(folder / "opset17.onnx"))
    trained = (folder / "parameters.txt").read_text().split()
    stored = {t.name: t for t in model.graph.initializer}
    for parameter in trained:
        tensor = stored[parameter]
        value = model.graph.input.add(name=parameter)
        value.type.tensor_type.elem_type = tensor.data_type
        for size in tensor.dims:
            value.type.tensor_type.shape.dim.add(dim_value=size)
        model.graph.initializer.remove(tensor)
    return model


def values(name: str) -> list[np.ndarray]:
    """Return the batch and the parameters, in the order of the lifted model's inputs."""
    folder = prepared(WORKLOADS[name])
    trained = (folder / "parameters.txt").read_text().split()
    model = onnx.load(str(folder / "opset17.onnx"))
    stored = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}  # noqa: TID251
    with np.load(folder / "batch.npz") as data:
        return [data["x"], *(stored[n] for n in trained)]


def session(model: onnx.ModelProto) -> Any:
    """Return a session with one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    options.add_session_config_entry("session.set_denormal_as_zero", "1")
    model.ir_version = min(model.ir_version, 10)
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def ours(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return our gradient graph, for every float input."""
    kind = onnx.TensorProto.FLOAT
    wrt = [v.name for v in model.graph.input if v.type.tensor_type.elem_type == kind]
    return onnxtrain.vjp(model, wrt)


def theirs(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return onnx-ad's gradient graph."""
    import onnx_ad

    return onnx_ad.reverse(model, layout="onnx")


def attempt(
    make: Callable[[onnx.ModelProto], onnx.ModelProto], model: onnx.ModelProto
) -> dict[str, Any]:
    """Return build seconds, nodes and a session, or the refusal."""
    start = time.process_time()
    try:
        made = make(model)
        spent = time.process_time() - start
        return {"build": spent, "nodes": len(made.graph.node), "session": session(made)}
    except Exception as error:  # whatever a tool raises is its refusal
        return {"error": first_line(error)}


def measure(name: str) -> list[str]:
    """Return a row of the table."""
    model = lifted(name)
    inputs = values(name)
    rows, classes = WORKLOADS[name].rows, WORKLOADS[name].classes
    seed = np.random.RandomState(1).standard_normal((rows, classes)).astype(np.float32) / rows
    sides = {"onnxtrain": attempt(ours, model), "onnx-ad": attempt(theirs, model)}
    feeds = {"onnxtrain": [*inputs, seed], "onnx-ad": [*inputs, seed[..., None]]}
    runs = {}
    for side, facts in sides.items():
        if "error" not in facts:
            names = [v.name for v in facts["session"].get_inputs()]
            runs[side] = dict(zip(names, feeds[side], strict=True))
    outputs = {s: sides[s]["session"].run(None, feed) for s, feed in runs.items()}
    agreement = _agreement(outputs) if len(outputs) == 2 else ""
    ms = _times({s: sides[s]["session"] for s in runs}, runs)
    row = [WORKLOADS[name].title]
    for side, facts in sides.items():
        if "error" in facts:
            row += [f"refused: {facts['error'][:80]}", "", ""]
        else:
            row += [f"{facts['build']:.2f}", str(facts["nodes"]), f"{ms[side]:.2f}"]
    both = len(ms) == 2
    return [*row, f"{ms['onnxtrain'] / ms['onnx-ad']:.2f}" if both else "", agreement]


def _agreement(outputs: dict[str, list[np.ndarray]]) -> str:
    """Return the largest difference of a gradient, as a part of its largest element."""
    pairs = zip(outputs["onnxtrain"][1:], outputs["onnx-ad"][1:], strict=True)
    worst = max(
        float(np.abs(a - b.reshape(a.shape)).max() / max(np.abs(a).max(), 1e-12)) for a, b in pairs
    )
    return f"{worst:.0e}"


def _times(sessions: dict[str, Any], feeds: dict[str, dict[str, np.ndarray]]) -> dict[str, float]:
    """Return the median milliseconds of each side, taken in turns."""
    counts, spent = {}, {s: [] for s in sessions}
    for side, s in sessions.items():
        start = time.perf_counter()
        s.run(None, feeds[side])
        counts[side] = max(1, round(SLICE / (time.perf_counter() - start)))
    for _ in range(ROUNDS):
        for side, s in sessions.items():
            start = time.process_time()
            for _ in range(counts[side]):
                s.run(None, feeds[side])
            spent[side].append(1000 * (time.process_time() - start) / counts[side])
    return {s: statistics.median(t) for s, t in spent.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nets", nargs="+", default=NETS)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    facts = machine.facts()
    facts["others"] = quiet.begin(strict=options.write)
    head = ["net"]
    for side in ("onnxtrain", "onnx-ad"):
        head += [f"{side}: build, s", "nodes", "run, CPU ms"]
    rows = []
    for name in options.nets:
        rows.append(measure(name))
        print(" | ".join(rows[-1]), flush=True)
        facts["others"].append(quiet.others())
    made = "\n\n".join(
        [
            (
                f"{facts['date']}, commit {facts['commit']}: `python -m benchmarks.gradients "
                f"--write`, onnx-ad {machine.version('onnx-ad')}, one thread, processor time."
            ),
            report.markdown([*head, "run ratio", "largest difference"], rows, left=1),
        ]
    )
    print(made)
    if options.write:
        quiet.refuse_busy(facts)
        page.write(made, "gradients")


if __name__ == "__main__":
    main()
