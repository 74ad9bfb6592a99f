"""Time of a step by operator, from onnxruntime's own profiler.

    python -m benchmarks.op_profile cnn --optimizer adamw --threads 1
    python -m benchmarks.op_profile gpt2 --nodes          # single nodes instead of kinds

Sums over all sessions of a step. The profiler itself costs some microseconds per node.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import tempfile
from pathlib import Path
from typing import Any

STEPS, WARM = 10, 3


def profile(
    workload: str, optimizer: str, threads: int, steps: int = STEPS
) -> list[dict[str, Any]]:
    """Return kinds of nodes with milliseconds and calls per step, the dearest first."""
    return grouped(
        events(workload, optimizer, threads, steps), steps, lambda e: e["args"]["op_name"]
    )


def grouped(records: list[dict[str, Any]], steps: int, name: Any) -> list[dict[str, Any]]:
    """Return the events by name: milliseconds and calls per step, and the part of all time."""
    spent: dict[str, list[float]] = collections.defaultdict(list)
    for event in records:
        spent[name(event)].append(event["dur"] / 1000)
    total = sum(map(sum, spent.values())) or 1.0
    rows = [
        {"op": op, "ms": sum(ms) / steps, "calls": len(ms) / steps, "part": sum(ms) / total}
        for op, ms in spent.items()
    ]
    return sorted(rows, key=lambda r: -r["ms"])


def events(workload: str, optimizer: str, threads: int, steps: int) -> list[dict[str, Any]]:
    """Return the profiler's records of the kernels of some steps."""
    import numpy as np
    import onnxruntime

    import onnxtrain
    from benchmarks.prepare import prepared
    from benchmarks.workloads import find

    sessions: list[Any] = []
    plain = onnxruntime.InferenceSession

    with tempfile.TemporaryDirectory() as folder:

        class Recorded(plain):
            """A session that records."""

            def __init__(self, source: Any, sess_options: Any = None, *rest: Any, **named: Any):
                options = sess_options or onnxruntime.SessionOptions()
                options.enable_profiling = True
                options.profile_file_prefix = os.path.join(folder, f"s{len(sessions)}")
                super().__init__(source, options, *rest, **named)
                sessions.append(self)

        onnxruntime.InferenceSession = Recorded
        try:
            workload_folder = prepared(find(workload))
            artifacts = onnxtrain.build(
                str(workload_folder / "static.onnx"), loss="cross_entropy", optimizer=optimizer
            )
            trainer = onnxtrain.Trainer(artifacts, threads=threads)
        finally:
            onnxruntime.InferenceSession = plain
        with np.load(workload_folder / "batch.npz") as data:
            batch = data["x"], data["labels"]
        trainer.lr = 1e-7
        for _ in range(WARM + steps):
            trainer.step(*batch)
        return [e for s in sessions for e in _kernels(Path(s.end_profiling()), steps)]


def _kernels(path: Path, steps: int) -> list[dict[str, Any]]:
    """Return the kernels of the last steps of one session."""
    records = json.loads(path.read_text())
    kernels = [e for e in records if e.get("cat") == "Node" and e["name"].endswith("_kernel_time")]
    runs = [e for e in records if e["name"] == "model_run"]
    if not runs:
        return []
    each = len(runs) // (WARM + steps)
    first = sorted(runs, key=lambda e: e["ts"])[each * WARM]["ts"]
    return [e for e in kernels if e["ts"] >= first]


def table(rows: list[dict[str, Any]], limit: int) -> str:
    """Return the dearest rows in Markdown."""
    lines = ["| operator | ms per step | calls per step | part |", "|---|---:|---:|---:|"]
    lines += [
        f"| {r['op']} | {r['ms']:.2f} | {r['calls']:.0f} | {100 * r['part']:.0f}% |"
        for r in rows[:limit]
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workload")
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--limit", type=int, default=25)
    parser.add_argument("--nodes", action="store_true", help="single nodes")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    records = events(options.workload, options.optimizer, options.threads, options.steps)

    def name(event: dict[str, Any]) -> str:
        if not options.nodes:
            return event["args"]["op_name"]
        node = event["name"].removesuffix("_kernel_time")
        shapes = event["args"].get("input_type_shape", "")
        return f"{event['args']['op_name']} {node} {json.dumps(shapes)}".replace("|", " ")

    rows = grouped(records, options.steps, name)
    print(json.dumps(rows) if options.json else table(rows, options.limit))


if __name__ == "__main__":
    main()
