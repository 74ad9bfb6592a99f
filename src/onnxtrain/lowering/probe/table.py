"""A profile from the results of a runner."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import onnx

from onnxtrain.errors import ProbeError
from onnxtrain.graph import shapes as S
from onnxtrain.lowering.probe.bundle import FORMAT
from onnxtrain.lowering.probe.limits import Entry, is_right, study
from onnxtrain.lowering.profile import Profile, covers

_SHOWN = 3  # remarks about an operator
_PREFERRED = 21  # the working opset: every node is written in it


def read_results(path: Path) -> dict[str, Any]:
    """Return what a runner has written.

    Raises:
        ProbeError: if it is something else.
    """
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ProbeError(
            f"{path}: no results: {S.first_line(error)}\nhint: onnxtrain probe run DIR -o {path}"
        ) from error
    if not isinstance(results, dict) or results.get("format") != FORMAT or "results" not in results:
        raise ProbeError(f"{path}: no results of a probe\nhint: onnxtrain probe run DIR -o {path}")
    return results


def profile_of(results: dict[str, Any], name: str, base: Profile | None = None) -> dict[str, Any]:
    """Return a profile, in its JSON form, of what a runtime did right.

    Args:
        results: from ``read_results``.
        name: of the profile.
        base: what to believe of operators, versions and types that are not in the pack.

    Raises:
        ProbeError: if the runtime did nothing right.
    """
    entries: dict[str, Entry] = results["results"]
    right = [e for e in entries.values() if is_right(e)]
    if not right:
        raise ProbeError("nothing was right: no profile\nhint: see the messages in the results")
    by_op: dict[str, dict[str, Entry]] = defaultdict(dict)
    for key, entry in entries.items():
        by_op[entry["op"]][key] = entry
    ops = {} if base is None else {k: dict(v) for k, v in base.ops.items() if k not in by_op}
    comments = dict.fromkeys(ops, "not probed")
    quirks: list[str] = []
    for op, of_op in by_op.items():
        lenient = base is not None and op in base.ops
        finding = study(op, of_op, lenient=lenient, every_type=_types(op) if lenient else [])
        versions = sorted({*finding.versions, *_unprobed(op, finding.probed, base)})
        quirks += [f"{op}: {q}" for q in finding.quirks]
        if finding.remarks:
            more = len(finding.remarks) - _SHOWN
            shown = finding.remarks[:_SHOWN] + ([f"and {more} more"] if more > 0 else [])
            comments[op] = "; ".join(shown)
        if versions:
            ops[op] = {"since": versions, **finding.limits}
    opsets = [e["opset"] for e in right]
    where = f" {results['provider']}" if results["provider"] else ""
    return {
        "name": name,
        "version": results["version"],
        "opset": {"ai.onnx": [min(opsets), max(opsets)]},
        "prefer": base.prefer if base is not None else min(_PREFERRED, max(opsets)),
        "ir": [min(e["ir"] for e in right), max(e["ir"] for e in right)],
        "initializers_as_inputs": base is not None and base.initializers_as_inputs,
        "control_flow": [] if base is None else list(base.control_flow),
        "max_rank": {} if base is None else dict(base.max_rank),
        "domains": ["ai.onnx"],
        "functions": False,
        "source": f"onnxtrain probe: {results['runtime']} {results['version']}{where}, "
        f"{len(right)} of {len(entries)} nodes right (node tests of onnx {results['onnx']})",
        "probed": results["date"],
        "quirks": quirks,
        "comments": dict(sorted(comments.items())),
        "ops": dict(sorted(ops.items())),
    }


def text_of(profile: dict[str, Any]) -> str:
    """Return a profile as text, one line for each operator."""
    parts = [f" {json.dumps(k)}: {_lines(v)}" for k, v in profile.items()]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _lines(value: Any) -> str:
    if isinstance(value, dict) and any(len(json.dumps(v)) > 12 for v in value.values()):
        return (
            "{\n"
            + ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items())
            + "\n }"
        )
    if isinstance(value, list) and any(isinstance(v, str) and len(v) > 12 for v in value):
        return "[\n" + ",\n".join(f"  {json.dumps(v)}" for v in value) + "\n ]"
    return json.dumps(value)


def _types(op: str) -> list[str]:
    """Return the types that the standard has for the first input of an operator, in any version."""
    types = set()
    for schema in onnx.defs.get_all_schemas_with_history():
        if schema.name != op or schema.domain or not schema.inputs:
            continue
        kind = schema.inputs[0].type_str
        for constraint in schema.type_constraints:
            if constraint.type_param_str == kind:
                types |= set(constraint.allowed_type_strs)
    plain = (t.removeprefix("tensor(").removesuffix(")") for t in types)
    return sorted(t for t in plain if t.isalnum())


def _unprobed(op: str, probed: list[int], base: Profile | None) -> list[int]:
    """Return the versions that no node of the pack has, and the base does."""
    if base is None or op not in base.ops:
        return []
    since = base.ops[op].get("since")
    low, high = base.opset
    versions = set()
    for opset in range(low, min(high, onnx.defs.onnx_opset_version()) + 1):
        schema = S.schema_of(op, opset)
        if schema is not None and not schema.deprecated:
            versions.add(schema.since_version)
    return [v for v in versions - set(probed) if not since or covers(since, v)]
