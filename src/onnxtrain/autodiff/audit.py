"""Compare the differentiation tags of the ONNX specification with what its own node tests show.

The specification tags each input of an operator as Differentiable, NonDifferentiable or Unknown.
``node_cases.json`` counts, for each float input, the node tests whose outputs move with it: a
stable finite difference that is not zero. ``make ops`` measures and writes it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import onnx

from onnxtrain.importer.functions import PREVIEW_DOMAIN

EVIDENCE = Path(__file__).with_name("node_cases.json")
DIFFERENTIABLE, NON_DIFFERENTIABLE, UNKNOWN = "Differentiable", "NonDifferentiable", "Unknown"


@dataclasses.dataclass(frozen=True)
class Finding:
    """An input whose tag should change."""

    op: str
    since: int
    index: int
    name: str
    tag: str
    """The tag of the specification."""
    proposed: str
    """The tag that the evidence supports."""
    evidence: str

    @property
    def contradicts(self) -> bool:
        """Return whether the tag is wrong, not only missing."""
        return self.tag != UNKNOWN


def audit() -> list[Finding]:
    """Return a line per input whose tag is missing or contradicts the node tests, by operator.

    >>> {f.proposed for f in audit() if f.op == "LayerNormalization"}
    {'Differentiable'}
    """
    cases = json.loads(EVIDENCE.read_text(encoding="utf-8"))
    findings: list[Finding] = []
    for schema in _newest_schemas():
        for i, formal in enumerate(schema.inputs):
            tag = str(formal.differentiation_category).rpartition(".")[2]
            moving, still = cases.get(schema.name, {}).get(formal.name, (0, 0))
            proposed, why = _judge(set(formal.types), moving, still)
            if proposed is not None and proposed != tag:
                findings.append(
                    Finding(schema.name, schema.since_version, i, formal.name, tag, proposed, why)
                )
    return findings


def _newest_schemas() -> list[onnx.defs.OpSchema]:
    newest: dict[str, onnx.defs.OpSchema] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        known = newest.get(schema.name)
        if schema.domain in ("", PREVIEW_DOMAIN) and (
            known is None or known.since_version < schema.since_version
        ):
            newest[schema.name] = schema
    return [newest[name] for name in sorted(newest) if not newest[name].deprecated]


def _judge(types: set[str], moving: int, still: int) -> tuple[str | None, str]:
    """Return the tag that types and node tests support, ``None`` if they show nothing."""
    if all(_is_discrete(t) for t in types):
        return NON_DIFFERENTIABLE, "all allowed types are discrete"
    if moving:
        return DIFFERENTIABLE, f"{moving} node test(s) with a stable difference other than zero"
    if still:
        # A flat point, such as a negative input of Relu, does not show that all are flat.
        return None, f"{still} node test(s) with a difference of zero"
    return None, "no node test with a stable difference"


def _is_discrete(name: str) -> bool:
    inner = name.replace("seq(", "").replace("optional(", "").replace("tensor(", "").strip(")")
    return inner.removeprefix("u").startswith(("int", "bool", "string"))


_PAGE = """# Differentiation tags of the ONNX specification

The specification tags each input of an operator as Differentiable, NonDifferentiable or Unknown.
This page compares the tags with ONNX's own node tests ([how they are measured](ops.md)): an input
is differentiable where an output moves with it, by a stable finite difference that is not zero.
Inputs of discrete types are not.

onnx {version}: {wrong} tags contradict the node tests, {missing} tags are Unknown although the node
tests or the types decide. `onnxtrain ops --audit` prints the same list; `make ops` measures again
and writes this page.

## Tags that contradict

{contradictions}

## Tags that are missing

{unknown}

## Changes to the definitions

One change per operator, to the `.Input(...)` entries of its newest version in `onnx/defs`: the
argument after the type constraint flags becomes

{changes}
"""


def to_markdown(findings: Sequence[Finding]) -> str:
    """Return the report: wrong tags, missing tags, and the definitions to change."""
    wrong = [f for f in findings if f.contradicts]
    missing = [f for f in findings if not f.contradicts]
    by_op: dict[str, list[str]] = {}
    for f in findings:
        entry = f'`.Input({f.index}, "{f.name}", ..., OpSchema::{f.proposed})`'
        by_op.setdefault(f"{f.op}-{f.since}", []).append(entry)
    return _PAGE.format(
        version=onnx.__version__,
        wrong=len(wrong),
        missing=len(missing),
        contradictions=_table(wrong),
        unknown=_table(missing),
        changes="\n".join(f"- {op}: {', '.join(entries)}" for op, entries in by_op.items()),
    )


def _table(findings: Sequence[Finding]) -> str:
    lines = [
        "| operator | since | input | tag | proposed | evidence |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {f.op} | {f.since} | {f.index}: {f.name} | {f.tag} | {f.proposed} | {f.evidence} |"
        for f in findings
    ]
    return "\n".join(lines)
