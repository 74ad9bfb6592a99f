"""Measured cells as Markdown tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from benchmarks import verdicts
from benchmarks.measure import Cell, Timing
from benchmarks.peers import OURS, PEERS, REFERENCE
from benchmarks.workloads import WORKLOADS


def rival_names(cells: Iterable[Cell]) -> list[str]:
    """Return the engines besides ours that occur, in the order of the list of engines."""
    seen = {n for c in cells for n in c.engines}
    return [n for n in PEERS if n in seen and n != OURS.name]


def times(timing: Timing, clock: str) -> list[float]:
    """Return the seconds per step of each round."""
    return timing.cpu if clock == "cpu" else timing.wall


def ratio(cell: Cell, rival: str, clock: str) -> verdicts.Spread | None:
    """Return our time over theirs, if both have one."""
    ours, theirs = cell.engines[OURS.name], cell.engines.get(rival)
    if theirs is None or ours.status != "timed" or theirs.status != "timed":
        return None
    return verdicts.ratio(times(ours, clock), times(theirs, clock))


def missed(cell: Cell, clock: str) -> bool:
    """Return whether some target of the row is not met."""
    for rival in cell.engines:
        spread = ratio(cell, rival, clock) if rival != OURS.name else None
        if spread is not None and verdicts.missed(
            spread.median, verdicts.target(cell.workload, rival)
        ):
            return True
    return False


def markdown(head: list[str], rows: list[list[str]], left: int = 2) -> str:
    """Return a table whose first ``left`` columns are text."""
    marks = ["---"] * left + ["---:"] * (len(head) - left)
    lines = [head, marks, *rows]
    return "\n".join("| " + " | ".join(x) + " |" for x in lines)


def title(cell: Cell) -> str:
    """Return the name of the row's net."""
    return WORKLOADS[cell.workload].title if cell.workload in WORKLOADS else cell.workload


def ratio_table(cells: list[Cell], clock: str) -> str:
    """Return our time over theirs with the verdict on each target."""
    rivals = rival_names(cells)
    rows = []
    for cell in cells:
        row = [title(cell), cell.optimizer, milliseconds(cell.engines[OURS.name], clock)]
        rows.append(row + [_against(cell, rival, clock) for rival in rivals])
    head = ["workload", "optimizer", "onnxtrain, ms"]
    return markdown(head + [f"/ {PEERS[r].title}" for r in rivals], rows)


def _against(cell: Cell, rival: str, clock: str) -> str:
    timing = cell.engines.get(rival)
    if timing is None:
        return ""
    spread = ratio(cell, rival, clock)
    if spread is None:
        return timing.status if timing.status != "timed" else "no time of ours"
    allowed = verdicts.target(cell.workload, rival)
    text = f"{spread.median:.2f} ({spread.low:.2f}-{spread.high:.2f})"
    if allowed is None:
        return text
    said = verdicts.verdict(spread.median, allowed)
    mark = f"**{said}**" if said != "met" else said
    return f"{text}, <= {allowed:.2f} {mark}"


def milliseconds(timing: Timing, clock: str) -> str:
    """Return the median with the spread, or why the engine was not timed."""
    if timing.status != "timed":
        return timing.status
    s = verdicts.Spread.of([1000 * t for t in times(timing, clock)])
    digits = 3 if s.median < 10 else 1
    return f"{s.median:.{digits}f} ({s.low:.{digits}f}-{s.high:.{digits}f})"


def per_engine(cells: list[Cell], value: Callable[[Timing], str], *, threads: bool = True) -> str:
    """Return a table with one column per engine."""
    names = [OURS.name, *rival_names(cells)]
    rows = []
    for cell in cells:
        row = [title(cell), cell.optimizer]
        if threads:
            row.append(str(cell.threads))
        rows.append(row + [value(cell.engines[n]) if n in cell.engines else "" for n in names])
    head = ["workload", "optimizer", *(["threads"] if threads else [])]
    return markdown(head + [PEERS[n].title for n in names], rows)


def memory_table(cells: list[Cell]) -> str:
    """Return the most memory above import, in MB, and whether ours is within torch's."""
    names = [OURS.name, *rival_names(cells)]
    allowed = verdicts.targets()["memory"]
    rows = []
    for cell in cells:
        memory = {n: _memory(cell.engines.get(n)) for n in names}
        ours, theirs = memory[OURS.name], memory.get(REFERENCE.name)
        said = ""
        if ours is not None and theirs is not None:
            said = f"{ours / theirs:.2f} {verdicts.verdict(ours / theirs, allowed)}"
        shown = ["" if m is None else f"{m:.0f}" for m in memory.values()]
        rows.append([title(cell), cell.optimizer, *shown, said])
    head = ["workload", "optimizer", *(PEERS[n].title for n in names), "ours / torch"]
    return markdown(head, rows)


def _memory(timing: Timing | None) -> float | None:
    return timing.facts.get("peak_mb") if timing is not None and timing.facts else None


def cost(timing: Timing) -> str:
    """Return build and session seconds, or why there are none."""
    f = timing.facts
    if not f:
        return timing.status
    text = f"{f['session_s']:.2f} + {f['first_steps_s']:.2f}"
    return f"{f['build_s']:.2f} + {text}" if "build_s" in f else text


def refusals(cells: list[Cell]) -> str:
    """Return a list of what engines refused, got wrong, or had no time for."""
    untimed: dict[tuple[str, str, str], list[str]] = {}
    for cell in cells:
        for name, timing in cell.engines.items():
            if timing.status != "timed":
                at = (name, timing.status, timing.reason)
                untimed.setdefault(at, []).append(
                    f"{cell.workload} {cell.optimizer} {cell.threads}t"
                )
    lines = [
        f"- {PEERS[name].title}, {status}: {_short(reason)} ({', '.join(rows)})"
        for (name, status, reason), rows in untimed.items()
    ]
    return "\n".join(lines) or "None."


def _short(text: str) -> str:
    plain = text.replace("|", "/").replace("`", "'").replace("<", "(").replace(">", ")")
    return plain if len(plain) <= 200 else plain[:197] + "..."


def summary(cells: list[Cell], clock: str) -> dict[str, Any]:
    """Return how many targets are met, and the rows that miss one."""
    met, failed = 0, []
    for cell in cells:
        for rival in cell.engines:
            allowed = verdicts.target(cell.workload, rival)
            spread = ratio(cell, rival, clock) if rival != OURS.name else None
            if spread is None or allowed is None:
                continue
            if verdicts.missed(spread.median, allowed):
                failed.append(f"{cell.workload} {cell.optimizer} {cell.threads}t / {rival}")
            else:
                met += 1
    return {"met": met, "missed": failed}


def line(cell: Cell, clock: str) -> str:
    """Return a cell on one line, for the terminal."""
    parts = [f"{cell.workload:12} {cell.optimizer:6} {cell.threads}t"]
    for name, timing in cell.engines.items():
        spread = ratio(cell, name, clock) if name != OURS.name else None
        if timing.status == "timed":
            median = 1000 * verdicts.Spread.of(times(timing, clock)).median
            parts.append(f"{name} {median:.2f} ms" + (f" x{spread.median:.2f}" if spread else ""))
        else:
            parts.append(f"{name} {timing.status}")
    return "  ".join(parts)
