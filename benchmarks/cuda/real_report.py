"""The results of real nets as Markdown: a table, the missed targets and their kernels."""

from __future__ import annotations

from typing import Any

TITLES = {
    "gpt2": "GPT-2 124M, 8x512",
    "bert": "BERT-base, 32x128",
    "vit": "ViT-B/16, 32",
    "resnet50": "ResNet-50, 64",
    "mobilenet": "MobileNetV3-L, 64",
    "smollm2": "SmolLM2-135M shape, 4x512",
    "unet": "U-Net, 16 x 64x64",
    "whisper": "Whisper-tiny encoder, 8",
    "gpt2-large": "GPT-2 774M, 4x512",
}
CONVOLUTIONAL = ("resnet50", "mobilenet", "unet")
# ours over torch eager and torch.compile, and memory over torch eager's
LIMITS = {
    (False, "float32"): (0.95, 1.15, 1.1),
    (False, "bf16-mixed"): (0.95, 1.4, 1.1),
    (True, "float32"): (1.1, 1.4, 1.2),
    (True, "bf16-mixed"): (1.1, 1.6, 1.2),
}
TIMES = (
    "net",
    "precision",
    "ours ms",
    "eager ms",
    "compile ms",
    "/ eager",
    "/ compile",
    "GPU busy ms: ours / eager / compile",
    "worst loss",
    "Casts",
)
MEMORY = (
    "net",
    "precision",
    "GiB ours",
    "eager",
    "compile",
    "/ eager",
    "build s",
    "build GiB",
    "trainer s",
    "first step s",
    "eager's",
    "compile's",
)


MEANING = (
    "Memory is what the device has taken more than before, by torch with what it keeps for later; "
    'the first step of torch.compile is one with a full cache. "build GiB" is memory of the host.'
)


def real_figures(report: dict[str, Any]) -> str:
    """Return the part of the page that is measured on real nets."""
    facts = "; ".join(f"{k}: {v}" for k, v in report["facts"].items() if k != "command")
    rows = sorted(
        report["rows"], key=lambda r: (list(TITLES).index(r["net"]), r["precision"] != "float32")
    )
    return "\n\n".join(
        [
            facts,
            f"```\n{report['facts']['command']}\n```",
            _table(TIMES, [_times(r) for r in rows]),
            MEANING,
            _table(MEMORY, [_memory(r) for r in rows if "error" not in r]),
            _missed(rows),
            _kernels(rows),
        ]
    )


def ratios(row: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Return what is compared: the ratio and its limit, by name."""
    eager, compiled, memory = LIMITS[row["net"] in CONVOLUTIONAL, row["precision"]]
    pairs = {
        "time / eager": ("ours_ms", "eager_ms", eager),
        "time / compile": ("ours_ms", "compile_ms", compiled),
        "memory / eager": ("ours_gib", "eager_gib", memory),
    }
    return {name: (row[a] / row[b], limit) for name, (a, b, limit) in pairs.items() if row.get(b)}


def _missed(rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        if "error" in row:
            continue
        over = [
            f"{name} {value:.2f} of {limit}"
            for name, (value, limit) in ratios(row).items()
            if value > limit
        ]
        if over:
            lines.append(f"- {TITLES[row['net']]}, {row['precision']}: {'; '.join(over)}")
    count = sum(len(ratios(r)) for r in rows if "error" not in r)
    head = f"Of {count} limits these are missed:"
    return "\n".join([head, "", *lines]) if lines else f"All {count} limits are met."


def _kernels(rows: list[dict[str, Any]]) -> str:
    parts = []
    for row in rows:
        times = {n: r for n, r in ratios(row).items() if "time" in n} if "error" not in row else {}
        if any(value > limit for value, limit in times.values()):
            for engine in ("ours", "eager", "compile"):
                if lines := row.get(f"{engine}_kernels"):
                    parts += [f"{engine}, {TITLES[row['net']]}, {row['precision']}", *lines]
    return folded("Kernels of rows that miss a time, in milliseconds per step", "\n".join(parts))


def folded(title: str, text: str) -> str:
    """Return long lines that are shown when one asks for them."""
    return f"<details>\n<summary>{title}</summary>\n\n```\n{text}\n```\n\n</details>"


def _times(row: dict[str, Any]) -> list[str]:
    head = [TITLES.get(row["net"], row["net"]), row["precision"]]
    if "error" in row:
        return [*head, row["error"].replace("|", " "), *[""] * (len(TIMES) - 3)]
    over = ratios(row)
    busy = " / ".join(_shown(row, f"{e}_gpu_ms") for e in ("ours", "eager", "compile"))
    loss = row.get("eager_worst_loss")
    return [
        *head,
        *(_shown(row, f"{e}_ms") for e in ("ours", "eager", "compile")),
        _ratio(over, "time / eager"),
        _ratio(over, "time / compile"),
        busy,
        "" if loss is None else f"{loss:.0e}",
        str(row.get("casts", "")),
    ]


def _memory(row: dict[str, Any]) -> list[str]:
    return [
        TITLES.get(row["net"], row["net"]),
        row["precision"],
        *(_shown(row, f"{e}_gib") for e in ("ours", "eager", "compile")),
        _ratio(ratios(row), "memory / eager"),
        _shown(row, "build_s"),
        _shown(row, "build_gib"),
        _shown(row, "trainer_s"),
        *(_shown(row, n) for n in ("first_step_s", "eager_first_s", "compile_first_s")),
    ]


def _ratio(over: dict[str, tuple[float, float]], name: str) -> str:
    if name not in over:
        return ""
    value, limit = over[name]
    return f"{value:.2f}" if value <= limit else f"**{value:.2f}**"


def _shown(row: dict[str, Any], name: str) -> str:
    return f"{row[name]:.1f}" if name in row else ""


def _table(heads: tuple[str, ...], rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    return "\n".join([*lines, *(f"| {' | '.join(cells)} |" for cells in rows)])
