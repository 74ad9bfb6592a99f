"""The section of docs/benchmarks-web.md on fine-tuning, which ``finetune.py`` writes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

TITLE = "## Fine-tuning in a tab"
AIMS = {1: 40, 2: 60}  # tokens per second, by threads
MEMORY, FRAME, SECONDS, LOSS = 900, 50, 60, 1e-3


HEAD = f"""\
{TITLE}

`python -m benchmarks.web.finetune` makes this section. Training runs in a worker; losses are
compared with Python's. Chromium {{browser}}, {{cores}} cores of {{cpu}}; load average {{load:.1f}}
before and {{loadAfter:.1f}} after; {{date}}.

"""
DECODER = """\
SmolLM2-135M shape, drawn int4 weights, adapters of rank 8 on all linear layers, AdamW, 1x128
tokens. Memory is the largest resident size of the page's process, the page itself included.

| threads | s per step | tokens/s | aim | memory, MB | aim \
| losses off by | frames, 95 % below | ready after | a sampled token |
|---|---|---|---|---|---|---|---|---|---|
"""
ROW = (
    "| {threads} | {seconds:.2f} | {tokens:.0f} | {speed} | {memory:.0f} | {size} "
    "| {off:.1e}, {close} | {frame:.0f} ms, {live} | {ready:.0f} s | {token:.2f} s |\n"
)
ENCODER = """
Encoder of MiniLM's shape (22 million parameters), adapters and classifier, {examples} examples of
{classes} classes, one thread: {seconds:.0f} s from nothing to a classifier ({quick}), of which
{ready:.0f} s until the first step; {steps} steps; {right:.0f} % of {tested} other texts are right.
"""


def section(found: dict[str, Any]) -> str:
    """Return the text of the section."""
    text = HEAD.format(**found, date=found["started"][:10])
    if rows := found.get("decoder"):
        text += DECODER + "".join(_row(r) for r in rows)
    if e := found.get("encoder"):
        quick = f"aim {_said(SECONDS, e['seconds'] < SECONDS)}"
        text += ENCODER.format(**e, quick=quick, right=100 * e["accuracy"])
    return text


def _row(r: dict[str, Any]) -> str:
    aim = AIMS[r["threads"]]
    return ROW.format(
        **r,
        speed=_said(aim, r["tokens"] >= aim),
        size=_said(MEMORY, r["memory"] < MEMORY),
        close=f"aim {_said(LOSS, r['off'] < LOSS)}",
        live=f"aim {_said(FRAME, r['frame'] < FRAME)}",
    )


def _said(aim: float, met: bool) -> str:
    return f"{aim:g}: {'met' if met else 'missed'}"


def write_section(results: Path, page: Path) -> None:
    """Put the section into the page, in place of an older one."""
    text = page.read_text()
    own = section(json.loads(results.read_text()))
    old = re.compile(rf"{re.escape(TITLE)}\n.*?(?=\n## |\Z)", re.DOTALL)
    if old.search(text):
        text = old.sub(lambda _: own.rstrip("\n") + "\n", text)
    else:
        text = f"{text.rstrip()}\n\n{own.rstrip()}\n"
    page.write_text(text)
