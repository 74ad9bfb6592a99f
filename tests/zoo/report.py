"""The zoo's results as a table, for the terminal and for docs/zoo.md."""

from __future__ import annotations

from .check import DOUBLE_TOLERANCE, FLOOR, TOLERANCE, TORCH_FACTOR, Result

COLUMNS = ("model", "mode", "exporter", "parameters", "nodes", "worst error", "result")


def row(result: Result) -> tuple[str, ...]:
    """One line of the table."""
    return (
        result.name,
        result.mode,
        result.exporter,
        f"{result.parameters}",
        f"{result.nodes_forward} + {result.nodes_backward}",
        f"{result.worst:.1e}" if result.status != "refused" else "",
        "; ".join([result.status, *(_first_line(note) for note in result.notes[:2])]),
    )


def summary(results: list[Result]) -> str:
    """How many runs passed, failed and were refused, and the graph growth."""
    passed = sum(r.status == "pass" for r in results)
    refused = sum(r.status == "refused" for r in results)
    forward = sum(r.nodes_forward for r in results)
    backward = sum(r.nodes_backward for r in results)
    models = len({r.name for r in results})
    ratio = f"{backward / forward:.2f}" if forward else "n/a"
    return (
        f"{models} models, {len(results)} runs: {passed} passed, "
        f"{len(results) - passed - refused} failed, {refused} refused; "
        f"nodes backward / forward: {ratio}"
    )


def page(results: list[Result], versions: str) -> str:
    """The text of docs/zoo.md."""
    lines = [
        "# The zoo",
        "",
        "Written by `python -m tests.zoo` (`make zoo`). Each model is a small torch module of our",
        "own in the shape of a real architecture, exported by torch with a dynamic batch, then",
        "differentiated; every parameter gradient is compared with torch's in float64 at two",
        "batch sizes.",
        "",
        f"A gradient `g` passes if `|g - g64| <= {TOLERANCE:g} * max(|g64|, {FLOOR:g} * largest)`,",
        "where `largest` is the largest parameter-gradient norm of the model, or if it is within",
        f"{TORCH_FACTOR:g} times torch float32's own distance from torch float64. Where rounding",
        "flips an argmax or a kink, the same graph cast to float64 must be within",
        f"{DOUBLE_TOLERANCE:g} on onnx's reference evaluator; such runs say so. `worst error` is",
        "the largest `|g - g64| / max(|g64|, ...)` in float32. `train` runs BatchNorm on the batch",
        "and Dropout in training mode; `legacy` is the exporter where dynamo is wrong (BatchNorm",
        "in training mode). `nodes` counts forward + backward.",
        "",
        summary(results) + f" ({versions}).",
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|" + "---|" * len(COLUMNS),
    ]
    lines += ["| " + " | ".join(row(result)) + " |" for result in results]
    return "\n".join(lines) + "\n"


def _first_line(text: str) -> str:
    return text.splitlines()[0].replace("|", "/")[:160]
