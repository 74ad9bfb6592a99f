"""Whether a stock runtime takes what was given and what was built, before anything is written.

A session is made once of the file, of the evaluation and of the step model. A file that the runtime
refuses is the user's matter; a model of ours that it refuses is a defect of this library.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import onnx_ir as ir

from onnxtrain.artifacts.directory import Artifacts
from onnxtrain.errors import DefectError, LoadError, MissingExtraError, OnnxTrainError, PrepareError
from onnxtrain.graph.io.structure import STANDARD_DOMAINS
from onnxtrain.manifest import ModelSpec
from onnxtrain.runtime import session as runtime
from onnxtrain.targets import find

_NO_KERNEL = ("NOT_IMPLEMENTED", "Could not find an implementation")
_ROLES = ("eval", "step")


def check_inputs(model: ir.Model) -> None:
    """Refuse inputs that no batch of numbers can be given for.

    Raises:
        PrepareError: naming all of them.
    """
    odd = [x for x in model.graph.inputs if not _is_numeric(x)]
    if odd:
        listing = ", ".join(f"{x.name!r} ({_kind(x)})" for x in odd)
        raise PrepareError(
            f"inputs that are not tensors of numbers: {listing}\n"
            "hint: cut the model behind them, for example with onnx.utils.extract_model, "
            "and train what comes after"
        )


def _is_numeric(x: ir.Value) -> bool:
    return isinstance(x.type, ir.TensorType) and x.dtype != ir.DataType.STRING


def _kind(x: ir.Value) -> str:
    return "string" if x.dtype == ir.DataType.STRING else type(x.type).__name__


def check_sessions(artifacts: Artifacts, target: str) -> None:
    """Make a session of the file and of each kind of model, if there is a runtime for it.

    Raises:
        LoadError: the runtime refuses the file, and says why.
        DefectError: it refuses a model that was made of a file it takes; the model is kept.
    """
    try:
        runtime.runtime()
    except MissingExtraError:
        return
    specs = {m.role: m for m in artifacts.manifest.models if m.steps_per_call == 1}
    if "infer" not in specs or _has_own_operators(artifacts, specs["infer"]):
        return
    of_file = _refusal(artifacts, specs["infer"], plain=True)
    if of_file and not _lacks_kernel(of_file):
        raise _unloadable(of_file)
    for spec in (specs[role] for role in _ROLES if role in specs):
        reason = _refusal(artifacts, spec)
        if reason is None or (_lacks_kernel(reason) and find(target).gpu):
            continue
        raise _unloadable(of_file) if of_file else _defect(artifacts, spec, reason)


def _has_own_operators(artifacts: Artifacts, spec: ModelSpec) -> bool:
    """Return whether a model has operators that no stock runtime knows."""
    model = artifacts.models[spec.role]
    local = {f.domain for f in model.functions}
    domains = {o.domain for o in model.opset_import} | {n.domain for n in model.graph.node}
    return bool(domains - STANDARD_DOMAINS - local)


def _refusal(artifacts: Artifacts, spec: ModelSpec, *, plain: bool = False) -> str | None:
    """Return why the runtime refuses a model, if it does."""
    try:
        runtime.create(artifacts.source_of(spec), options=_options(artifacts, plain=plain))
    except OnnxTrainError as error:
        return str(error).removeprefix("onnxruntime refuses the model: ")
    return None


def _options(artifacts: Artifacts, *, plain: bool) -> Any:
    options = runtime.session_options(1)
    if plain or artifacts.shared is not None:
        levels = runtime.runtime().GraphOptimizationLevel
        options.graph_optimization_level = levels.ORT_DISABLE_ALL
        # Weights stay where they are: nobody computes with them here.
        options.add_session_config_entry("session.disable_prepacking", "1")
    return options


def _lacks_kernel(reason: str) -> bool:
    return any(words in reason for words in _NO_KERNEL)


def _unloadable(reason: str) -> LoadError:
    return LoadError(
        f"onnxruntime cannot load this file: {reason}\n"
        "hint: mend or export the file again; check=False builds without asking onnxruntime"
    )


def _defect(artifacts: Artifacts, spec: ModelSpec, reason: str) -> DefectError:
    path = Path(tempfile.mkdtemp(prefix="onnxtrain-report-")) / spec.file
    source = artifacts.source_of(spec)
    assert isinstance(source, bytes)
    path.write_bytes(source)
    return DefectError(
        f"onnxruntime refuses the {spec.role} model that was built: {reason}\n"
        f"  the model is kept for a report: {path}\n"
        "hint: this is a defect of onnxtrain, please report it with that model; "
        "check=False builds all the same"
    )
