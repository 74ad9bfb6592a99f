"""Write, read and run packs: single-node models with inputs and expected outputs.

``write_pack`` picks a few cases per operator version, ``read_pack`` checks a pack, and ``run_pack``
starts ``files/probe.py`` in the Python interpreter that has the runtime.
"""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from onnxtrain.errors import MissingExtraError, ProbeError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.io.limits import read_json
from onnxtrain.lowering.probe import sources
from onnxtrain.lowering.probe.case import Case, case_at, versions
from onnxtrain.lowering.probe.sources import extra_cases, onnx_cases
from onnxtrain.lowering.profile import NEWEST, OLDEST

FORMAT = 1
MANIFEST = "pack.json"
SCRIPTS = ("probe.py", "probe.mjs", "runtimes.mjs", "probe.html")
_MAX_CASES = 24  # per version of an operator
_MAX_SAME_KIND = 2  # of these, with the same types, ranks and attributes
_TYPED_OPSETS = (OLDEST, 13)  # other types are tried at these opsets and at the newest
_SWITCHES = frozenset(
    {
        *(
            "across_channels",
            "allowzero",
            "antialias",
            "align_corners",
            "ceil_mode",
            "detect_negative",
        ),
        *(
            "count_include_pad",
            "detect_positive",
            "exclude_outside",
            "exclusive",
            "fmod",
            "inverse",
        ),
        *(
            "is_causal",
            "keepdims",
            "largest",
            "layout",
            "linear_before_reset",
            "noop_with_empty_axes",
        ),
        *("onesided", "reverse", "select_last_index", "sorted", "storage_order", "training_mode"),
        *("transA", "transB", "upper"),
    }
)


def write_pack(
    folder: Path, opsets: Sequence[int] = (), cases: Iterable[Case] | None = None
) -> dict[str, Any]:
    """Write a pack and return its manifest.

    Args:
        folder: Created if missing; the files of an existing pack are overwritten.
        opsets: Opsets to write each node at, by default all. If several opsets share a version
            of the operator, only the oldest is written.
        cases: Nodes to write; by default the node tests of the installed onnx and ``extra_cases``.

    Raises:
        ProbeError: if an opset is unknown or the folder cannot be written.
    """
    opsets = sorted(set(opsets or range(OLDEST, NEWEST + 1)))
    unknown = [o for o in opsets if not OLDEST <= o <= NEWEST]
    if unknown:
        raise ProbeError(f"unknown opset: {unknown[0]}\nhint: use one of {OLDEST} to {NEWEST}")
    if cases is None:
        cases = [*extra_cases(), *onnx_cases()]
    try:
        (folder / "models").mkdir(parents=True, exist_ok=True)
        entries = [_write(folder, *entry) for entry in _models(list(cases), opsets)]
        manifest = {
            "format": FORMAT,
            "onnx": onnx.__version__,
            "opsets": opsets,
            "nodes": entries,
        }
        (folder / MANIFEST).write_text(
            json.dumps(manifest, separators=(",", ":")), encoding="utf-8"
        )
        files = resources.files("onnxtrain.lowering.probe") / "files"
        for name in SCRIPTS:
            with resources.as_file(files / name) as path:
                shutil.copyfile(path, folder / name)
    except OSError as error:
        raise ProbeError(f"{folder}: cannot write a pack: {error}") from error
    return manifest


def read_pack(folder: Path) -> dict[str, Any]:
    """Return the manifest of a pack.

    Raises:
        ProbeError: if the folder is not a pack.
    """
    path = folder / MANIFEST
    try:
        manifest = read_json(path)
    except (OSError, ValueError) as error:
        raise ProbeError(
            f"{folder}: not a pack: {S.first_line(error)}\nhint: onnxtrain probe pack {folder}"
        ) from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ProbeError(
            f"{path}: not the manifest of a pack of format {FORMAT}\n"
            f"hint: onnxtrain probe pack {folder}"
        )
    missing = [n["file"] for n in manifest["nodes"] if not (folder / n["file"]).is_file()]
    if missing:
        raise ProbeError(
            f"{folder}: {len(missing)} model(s) of the pack are missing: {missing[0]!r} ...\n"
            f"hint: onnxtrain probe pack {folder}"
        )
    return manifest


def _models(cases: list[Case], opsets: list[int]) -> Iterator[tuple[Case, int, onnx.ModelProto]]:
    """Yield the models of a pack: a few cases per kind, at each version of the operator."""
    by_op: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        if S.schema_of(case.op, case.opset) is not None:
            by_op[case.op].append(sources.with_stored_weights(case))
    for op in sorted(by_op):
        counts: dict[int, Counter[Any]] = defaultdict(Counter)
        varied: set[int] = set()
        for case in by_op[op]:
            case_opsets = versions(case, opsets)
            for opset in case_opsets:
                kind = _kind(case)
                if counts[opset][kind] >= _MAX_SAME_KIND or counts[opset].total() >= _MAX_CASES:
                    continue
                model = case_at(case, opset)
                if model is None:
                    continue
                counts[opset][kind] += 1
                yield case, opset, model
                if opset not in varied and _is_float(case):
                    varied.add(opset)
                    typed = opset == case_opsets[0] or any(
                        _is_same_version(op, opset, o) for o in _TYPED_OPSETS
                    )
                    yield from _variant_models(case, opset, typed)


def _variant_models(
    case: Case, opset: int, typed: bool
) -> Iterator[tuple[Case, int, onnx.ModelProto]]:
    cases = [c for c in (sources.with_fed_weights(case),) if c is not None]
    if typed:
        cases += [*sources.with_other_types(case), *sources.with_other_ranks(case)]
    for other in cases:
        model = case_at(other, opset)
        if model is not None:
            yield other, opset, model


def _is_same_version(op: str, opset: int, at: int) -> bool:
    """Return whether two opsets have the same version of an operator."""
    a, b = S.schema_of(op, opset), S.schema_of(op, at)
    return a is not None and b is not None and a.since_version == b.since_version


def _is_float(case: Case) -> bool:
    return case.main is not None and case.main.dtype == np.float32


def _kind(case: Case) -> tuple[Any, ...]:
    types = tuple(None if a is None else a.dtype.str for a in (*case.inputs, *case.outputs))
    main = case.main
    rank = None if main is None else main.ndim
    batch = None if main is None or main.ndim < 3 else min(main.shape[0], 2)
    switches = tuple(sorted(_switches(case.attributes).items()))
    return types, rank, batch, case.is_empty, switches


def _switches(attributes: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes that select between modes."""
    return {
        k: v
        for k, v in attributes.items()
        if (isinstance(v, str) and k != "equation") or (isinstance(v, int) and k in _SWITCHES)
    }


def _write(folder: Path, case: Case, opset: int, model: onnx.ModelProto) -> dict[str, Any]:
    node = model.graph.node[0]
    name = f"{case.id}@{opset}"
    file = f"models/{name}.onnx"
    (folder / file).write_bytes(model.SerializeToString(deterministic=True))
    schema = S.schema_of(node.op_type, opset)
    assert schema is not None
    fed = {x.name for x in model.graph.input} - {x.name for x in model.graph.initializer}
    arrays = {f"x{i}": a for i, a in enumerate(case.inputs) if a is not None}
    main = arrays.get(node.input[0]) if node.input else None
    return {
        "id": name,
        "op": node.op_type,
        "since_version": schema.since_version,
        "opset": opset,
        "ir": model.ir_version,
        "dtypes": {
            "inputs": [
                None if x not in arrays else sources.type_name(arrays[x]) for x in node.input
            ],
            "outputs": [sources.type_name(a) for a in case.outputs if a is not None],
        },
        "rank": None if main is None else main.ndim,
        "batch": None if main is None or not main.ndim else main.shape[0],
        "arity": [len(node.input), max(i for i, a in enumerate(case.outputs) if a is not None) + 1],
        "empty": case.is_empty,
        "variant": case.variant,
        "stored": [i for i, x in enumerate(node.input) if x and x not in fed],
        "attrs": _switches({a.name: _value(a) for a in node.attribute}),
        "file": file,
        "inputs": [_tensor(x, arrays[x]) for x in node.input if x in fed and x in arrays],
        "outputs": [_tensor(f"y{i}", a) for i, a in enumerate(case.outputs) if a is not None],
    }


def _value(attribute: onnx.AttributeProto) -> Any:
    if attribute.type == onnx.AttributeProto.STRING:
        return attribute.s.decode()
    return attribute.i if attribute.type == onnx.AttributeProto.INT else None


def _tensor(name: str, array: np.ndarray) -> dict[str, Any]:
    little_endian = array.astype(array.dtype.newbyteorder("<"))
    return {
        "name": name,
        "type": sources.type_name(array),
        "dims": list(array.shape),
        "data": base64.b64encode(little_endian.tobytes()).decode(),
    }


RUNTIMES = ("onnxruntime", "tract", "opencv")
_MISSING = 3  # exit code of the runner


def run_pack(
    folder: Path, runtime: str, output: Path, *, provider: str = "", python: str = sys.executable
) -> str:
    """Run every node of a pack, write the results, and return a summary line.

    Args:
        folder: Directory of the pack.
        runtime: One of ``RUNTIMES``.
        output: Results file (JSON) to write.
        provider: Execution provider of onnxruntime. Nodes it leaves to the CPU count as refused.
        python: Python interpreter that has the runtime installed.

    Raises:
        MissingExtraError: if the runtime is not installed.
        ProbeError: if the pack or runtime is unknown, or the runtime does not start.
    """
    if runtime not in RUNTIMES:
        raise ProbeError(
            f"unknown runtime: {runtime!r} (expected one of {', '.join(RUNTIMES)})\n"
            "hint: for JavaScript runtimes, run probe.mjs (Node) or open probe.html of the pack"
        )
    if provider and runtime != "onnxruntime":
        raise ProbeError(f"{runtime} has no providers\nhint: omit --provider {provider}")
    read_pack(folder)
    script = resources.files("onnxtrain.lowering.probe") / "files" / "probe.py"
    with resources.as_file(script) as path:
        command = [python, path, runtime, "--pack", folder, "-o", output, f"--provider={provider}"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            raise ProbeError(f"cannot run {python}: {error}") from error
    summary = done.stdout.strip()
    if done.returncode == _MISSING:
        raise MissingExtraError(summary)
    if done.returncode:
        messages = summary or done.stderr.strip() or f"exit code {done.returncode}"
        raise ProbeError(f"cannot probe {runtime}: {messages.splitlines()[-1]}")
    return summary
