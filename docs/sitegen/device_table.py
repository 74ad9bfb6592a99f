"""The table of the page "Devices", from the table of devices and the stored runs of ten nets."""

from __future__ import annotations

import json
import statistics
from typing import Any

from onnxtrain.runtime.devices import DEVICES, Device
from sitegen.contents import DOCS

PAGE = DOCS / "devices.md"
RESULTS = DOCS.parent / "benchmarks" / "results" / "devices"
BEGIN, END = (
    "<!-- devices, written by `make docs` -->",
    "<!-- end of devices -->",
)
_SYSTEMS = {"Darwin": "macOS"}
_EQUAL = 1e-2
"""Largest relative difference of a loss that counts as equal: TF32 has ten bits."""


def results(name: str) -> dict[str, Any] | None:
    """Return the stored run of a device, if there is one."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def table() -> str:
    """Return the table in Markdown."""
    head = (
        "`device=`",
        "provider",
        "install",
        "target",
        "tested",
        "nets that train",
        "difference",
        "step time",
    )
    rows = [head, ("---",) * len(head), *(_row(d) for d in DEVICES.values())]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(device: Device) -> tuple[str, ...]:
    systems = " or ".join(_SYSTEMS.get(s, s) for s in device.systems)
    wheel = f"`{device.wheel}`" + (f", {systems}" if systems else "")
    run = results(device.name)
    nets = {} if run is None else run["nets"]
    nets = {n: {**r, **r.get("tensors", {})} for n, r in nets.items()}
    equal = [n for n in nets.values() if n.get("difference", 1.0) <= _EQUAL]
    ratios = [n["ms"] / n["ms_cpu"] for n in equal]
    return (
        f"`{device.name}`",
        f"`{device.provider}`",
        wheel,
        f"`{device.target}`, {device.target_source}",
        device.tested or "untested",
        f"{len(equal)} of {len(nets)} ({run['date']})" if run else "",
        f"{max(n['difference'] for n in equal):.0e}" if equal else "",
        f"{statistics.median(ratios):.1f} x CPU" if ratios else "",
    )


def write() -> None:
    """Put the table where the page has a place for it."""
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, tail = rest.partition(END)
    PAGE.write_text(f"{head}{BEGIN}\n\n{table()}\n\n{END}{tail}", encoding="utf-8")
