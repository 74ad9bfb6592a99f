"""Build a profile from the results of a probe: operator versions that work, and their limits."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx

from onnxtrain import profiles
from onnxtrain.errors import ProbeError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.io.limits import read_json
from onnxtrain.lowering.opset_converters import default_of
from onnxtrain.lowering.probe.pack import FORMAT
from onnxtrain.lowering.profile import Profile

Entry = dict[str, Any]
_LONGEST = 120  # characters of a message
_SIZES = re.compile(r"[_-]?(\d+d|batch\d+|rank\d+)")
_RANKS = range(7)  # ranks to list in a profile if some of them fail


@dataclass
class Finding:
    """Profile entry of an operator, with its quirks and comments."""

    limits: dict[str, Any] = field(default_factory=dict)
    versions: list[int] = field(default_factory=list)
    """Versions with at least one right node and no wrong node that the limits do not explain."""
    probed: list[int] = field(default_factory=list)
    quirks: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


def is_correct(entry: Entry) -> bool:
    """Return whether the runtime computed the expected outputs."""
    return entry["status"] == "right"


def _type(entry: Entry) -> str:
    types = entry["dtypes"]["inputs"][:1] or entry["dtypes"]["outputs"][:1]
    return types[0] or ""


def analyze_operator(
    op: str, entries: dict[str, Entry], *, lenient: bool, every_type: list[str]
) -> Finding:
    """Return the profile entry of an operator.

    Args:
        op: Operator name.
        entries: Results by identifier.
        lenient: Keep versions with wrong nodes that no limit explains.
        every_type: Types to allow if the pack does not probe them.
    """
    finding = Finding(probed=sorted({e["since_version"] for e in entries.values()}))
    plain = {k: e for k, e in entries.items() if e["variant"] != "fed" and not e["empty"]}
    if not any(map(is_correct, plain.values())):
        plain = {k: e for k, e in entries.items() if e["variant"] != "fed"}
    running = {e["since_version"] for e in plain.values() if is_correct(e)}
    left = {k: e for k, e in plain.items() if e["since_version"] in running}
    left = _find_type_limits(finding, left, every_type)
    left = _ranks(finding, left)
    left = _batches(finding, left)
    left = _attributes(finding, op, left)
    left = _arity(finding, left)
    _constants(finding, entries)
    failed = {k: e for k, e in left.items() if not is_correct(e)}
    finding.remarks += _describe_cases(
        {k: e for k, e in failed.items() if e["status"] == "refused"}
    )
    silent = {k: e for k, e in failed.items() if e["status"] != "refused"}
    finding.quirks += _describe_cases(silent)
    if not lenient:
        running -= {e["since_version"] for e in silent.values()}
    finding.versions = sorted(running)
    return finding


def _describe_cases(entries: dict[str, Entry]) -> list[str]:
    """Return a line for each case, with the opsets."""
    opsets: dict[str, list[int]] = {}
    texts: dict[str, str] = {}
    for name, entry in entries.items():
        case = name.rpartition("@")[0]
        opsets.setdefault(case, []).append(entry["opset"])
        texts[case] = f"{entry['status']}: {entry.get('message', '')[:_LONGEST]}"
    return [f"{c} (opset {', '.join(map(str, sorted(opsets[c])))}): {t}" for c, t in texts.items()]


def _split(
    entries: dict[str, Entry], key: Callable[[Entry], Any]
) -> tuple[set[Any], set[Any], dict[str, Entry]]:
    """Return the keys with a right entry, those without, and the entries of the former."""
    good = {key(e) for e in entries.values() if is_correct(e)}
    bad = {key(e) for e in entries.values()} - good
    return good, bad, {k: e for k, e in entries.items() if key(e) not in bad}


def _quirk(finding: Finding, entries: dict[str, Entry], rest: dict[str, Entry], what: str) -> None:
    bad = [e for k, e in entries.items() if k not in rest and e["status"] in ("wrong", "crashed")]
    # A wrong output type is not a quirk: the node that reads the output fails with an error.
    bad = [e for e in bad if not e.get("message", "").startswith("type ")]
    if bad:
        worst = max((e.get("error") or 0 for e in bad), default=0)
        note = f", off by {worst:.3g}" if worst else f": {bad[0].get('message', '')}"
        finding.quirks.append(f"{bad[0]['status']} for {what}{note}")


def _find_type_limits(
    finding: Finding, entries: dict[str, Entry], every: list[str]
) -> dict[str, Entry]:
    good, bad, rest = _split(entries, _type)
    for name, entry in entries.items():  # wrong where the same node in float is right
        twin = entries.get(name.replace(f"-{entry['variant']}@", "@"))
        silent = entry["status"] in ("wrong", "crashed") and entry["variant"] == _type(entry)
        if silent and twin is not None and is_correct(twin):
            bad.add(_type(entry))
    output_types = {t for e in entries.values() if is_correct(e) for t in e["dtypes"]["outputs"]}
    bad_outputs = {t for e in entries.values() for t in e["dtypes"]["outputs"]} - output_types
    if not bad and not bad_outputs:
        return entries
    good -= bad | bad_outputs
    rest = {
        k: e
        for k, e in entries.items()
        if _type(e) not in bad and not bad_outputs & set(e["dtypes"]["outputs"])
    }
    probed = {t for e in entries.values() for side in e["dtypes"].values() for t in side if t}
    allowed = good | {t for e in rest.values() if is_correct(e) for t in e["dtypes"]["outputs"]}
    allowed |= set(every) - probed
    finding.limits["dtypes"] = sorted(allowed)
    others = {
        i
        for e in rest.values()
        for i, t in enumerate(e["dtypes"]["inputs"])
        if i and t and t not in allowed and is_correct(e)
    }
    if others:
        finding.limits["any_dtype"] = sorted(others)
    _quirk(finding, entries, rest, " and ".join(sorted(bad | bad_outputs)))
    return rest


def _family(name: str) -> str:
    """Return the name of a case without its opset, rank and batch."""
    return _SIZES.sub("", name.rpartition("@")[0])


def _ranks(finding: Finding, entries: dict[str, Entry]) -> dict[str, Entry]:
    _, bad, _ = _split(entries, lambda e: e["rank"])
    # Blame wrong values on the rank only if the same node is right at another rank.
    known = {_family(k) for k, e in entries.items() if is_correct(e)}
    bad -= {
        e["rank"]
        for k, e in entries.items()
        if e["status"] in ("wrong", "crashed") and _family(k) not in known
    }
    if not bad or None in bad:
        return entries
    rest = {k: e for k, e in entries.items() if e["rank"] not in bad}
    finding.limits["ranks"] = [r for r in _RANKS if r not in bad]
    _quirk(finding, entries, rest, f"rank {' and '.join(map(str, sorted(bad)))}")
    return rest


def _batches(finding: Finding, entries: dict[str, Entry]) -> dict[str, Entry]:
    images = {k: e for k, e in entries.items() if (e["rank"] or 0) >= 3 and e["batch"]}
    good, bad, rest = _split(images, lambda e: e["batch"] > 1)
    if bad != {True} or good != {False}:
        return entries
    finding.limits["batch"] = 1
    _quirk(finding, images, rest, "batch above 1")
    return {k: e for k, e in entries.items() if k in rest or k not in images}


def _attributes(finding: Finding, op: str, entries: dict[str, Entry]) -> dict[str, Entry]:
    for name in sorted({n for e in entries.values() for n in e["attrs"]}):

        def value(e: Entry, name: str = name) -> Any:
            return e["attrs"].get(name, default_of(op, e["opset"], name))

        good, bad, rest = _split(entries, value)
        if not bad or bad == {None}:
            continue
        finding.limits.setdefault("attrs", {})[name] = sorted(
            (v for v in good if v is not None), key=str
        )
        settings = " and ".join(f"{name}={v}" for v in sorted(bad, key=str) if v is not None)
        _quirk(finding, entries, rest, settings)
        entries = rest
    return entries


def _arity(finding: Finding, entries: dict[str, Entry]) -> dict[str, Entry]:
    """Limit the number of inputs and outputs if every larger number fails."""
    right = [e["arity"] for e in entries.values() if is_correct(e)]
    if not right:
        return entries
    largest = [max(n[side] for n in right) for side in (0, 1)]
    rest = {
        k: e
        for k, e in entries.items()
        if all(a <= m for a, m in zip(e["arity"], largest, strict=True))
    }
    if len(rest) < len(entries):
        finding.limits["arity"] = largest
        _quirk(finding, entries, rest, f"more than {largest[0]} inputs or {largest[1]} outputs")
    return rest


def _constants(finding: Finding, entries: dict[str, Entry]) -> None:
    """Find the inputs that must be constant: nodes that fail only if these are fed."""
    positions: set[int] = set()
    for name, entry in entries.items():
        if entry["variant"] != "fed" or is_correct(entry):
            continue
        twin = entries.get(name.replace("-fed@", "@"))
        if twin is not None and is_correct(twin):
            positions |= set(twin["stored"])
    if positions:
        finding.limits["const_inputs"] = sorted(positions)


_MAX_LISTED = 3  # remarks about an operator
_PREFERRED = 21  # the working opset of onnxtrain


def read_results(path: Path) -> dict[str, Any]:
    """Read the results file of a runner.

    Raises:
        ProbeError: if the file is not a results file.
    """
    try:
        results = read_json(path)
    except (OSError, ValueError) as error:
        raise ProbeError(
            f"{path}: not a results file: {S.first_line(error)}\n"
            f"hint: onnxtrain probe run DIR -o {path}"
        ) from error
    if not isinstance(results, dict) or results.get("format") != FORMAT or "results" not in results:
        raise ProbeError(f"{path}: not a results file\nhint: onnxtrain probe run DIR -o {path}")
    return results


def build_profile(
    results: dict[str, Any], name: str, base: Profile | None = None
) -> dict[str, Any]:
    """Return the profile of a runtime, as JSON data, from its results.

    Args:
        results: Results from ``read_results``.
        name: Name of the profile.
        base: Profile to copy operators, versions and types from that the pack does not probe.

    Raises:
        ProbeError: if no node of the pack is right.
    """
    entries: dict[str, Entry] = results["results"]
    right = [e for e in entries.values() if is_correct(e)]
    if not right:
        raise ProbeError(
            "cannot build a profile: no node is right\nhint: see the messages in the results file"
        )
    by_op: dict[str, dict[str, Entry]] = defaultdict(dict)
    for key, entry in entries.items():
        by_op[entry["op"]][key] = entry
    ops = {} if base is None else {k: dict(v) for k, v in base.ops.items() if k not in by_op}
    comments = dict.fromkeys(ops, "not probed")
    quirks: list[str] = []
    for op, of_op in by_op.items():
        lenient = base is not None and op in base.ops
        finding = analyze_operator(
            op, of_op, lenient=lenient, every_type=_schema_types(op) if lenient else []
        )
        versions = sorted({*finding.versions, *_unprobed(op, finding.probed, base)})
        quirks += [f"{op}: {q}" for q in finding.quirks]
        if finding.remarks:
            more = len(finding.remarks) - _MAX_LISTED
            lines = finding.remarks[:_MAX_LISTED] + ([f"and {more} more"] if more > 0 else [])
            comments[op] = "; ".join(lines)
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


def format_profile(profile: dict[str, Any]) -> str:
    """Format a profile as JSON with one line per operator."""
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


def _schema_types(op: str) -> list[str]:
    """Return the types that any version of the schema allows for the operator's first input."""
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
    """Return the versions of the base profile that the pack does not test."""
    if base is None or op not in base.ops:
        return []
    since = base.ops[op].get("since")
    low, high = base.opset
    versions = set()
    for opset in range(low, min(high, onnx.defs.onnx_opset_version()) + 1):
        schema = S.schema_of(op, opset)
        if schema is not None and not schema.deprecated:
            versions.add(schema.since_version)
    return [v for v in versions - set(probed) if not since or profiles.covers(since, v)]
