"""Models for older opsets and smaller runtimes, compared with what they came from."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Mapping
from pathlib import Path

import onnx
import onnx_ir as ir

from onnxtrain.errors import LoweringError, ProfileError, VerificationError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.io import Source, load
from onnxtrain.graph.io.finish import PRODUCER
from onnxtrain.lowering import profile as profiles
from onnxtrain.lowering.check import problems
from onnxtrain.lowering.pipeline import lower_model
from onnxtrain.lowering.profile import Profile
from onnxtrain.lowering.reduced_ops import read_config
from onnxtrain.lowering.run_budget import check_run_budget
from onnxtrain.runtime.compare import REFERENCE, compare

COMPARED = "onnxtrain.compared_on"
_LARGEST = (1 << 31) - (1 << 24)  # bytes of weights that fit into one protobuf, graph included


def lower(
    model: Source,
    profile: str | Profile | None = None,
    *,
    opset: int | None = None,
    dims: Mapping[str, int] | None = None,
    verify: bool = True,
) -> onnx.ModelProto:
    """Return the model for an older opset or a smaller runtime; its weights keep their names.

    Args:
        model: a path, bytes, ``ModelProto`` or ``ir.Model``; it is not changed.
        profile: name of a runtime (``onnxtrain profiles`` lists them) or ``opset-N``; or a file: a
            profile in JSON, or the operator list of a reduced onnxruntime.
        opset: of the result; needed if no profile is named.
        dims: numbers for symbolic sizes of the inputs. The fewer are left, the more can be lowered.
        verify: compare the result with the original on random inputs of several shapes.

    Raises:
        ProfileError: if there is no such profile.
        LoweringError: if some nodes cannot be lowered, naming them and why.
        VerificationError: if the result differs, naming the first tensor that does; or if the model
            is too large to be run for this, naming the nodes.

    Where onnxruntime is not installed, models are compared on onnx's reference evaluator, with a
    warning; ``compared_on`` tells the runtime from the result.
    """
    target_profile = find_profile(profile) if isinstance(profile, str) else profile
    if opset is None:
        if target_profile is not None:
            opset = target_profile.prefer
        elif isinstance(profile, str):
            opset = int(profile.removeprefix("opset-"))
        else:
            raise LoweringError("nothing to lower to\nhint: give an opset or a profile")
    sizes = dict(dims or {})
    lowered, _ = lower_model(load(model), opset, target_profile, sizes)
    lowered.producer_name = PRODUCER
    proto = ir.to_proto(lowered)
    size = sum(len(t.raw_data) for t in proto.graph.initializer)
    if size > _LARGEST:
        if verify:
            raise VerificationError(
                f"weights of {size:,} bytes are too large to be compared\nhint: verify=False"
            )
        return proto
    _check(proto)
    if verify:
        runtime = _verify(model, proto, target_profile, sizes)
        proto.metadata_props.add(key=COMPARED, value=runtime)
    return proto


def compared_on(model: onnx.ModelProto) -> str | None:
    """Return the runtime on which a lowered model was compared with its original, if it was."""
    return next((p.value for p in model.metadata_props if p.key == COMPARED), None)


def find_profile(name: str) -> Profile | None:
    """Return a profile by name or file, ``None`` for a plain opset.

    Raises:
        ProfileError: if there is none.
    """
    if re.fullmatch(r"opset-\d+", name):
        return None
    path = Path(name)
    if path.suffix in (".json", ".config") and path.is_file():
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".config":
            return read_config(text, path.name)
        try:
            return profiles.parse(json.loads(text))
        except (json.JSONDecodeError, TypeError, KeyError) as error:
            raise ProfileError(f"{name}: not a profile: {S.first_line(error)}") from error
    return profiles.find(name)


def _check(proto: onnx.ModelProto) -> None:
    try:
        onnx.checker.check_model(proto)
    except onnx.checker.ValidationError as error:
        raise LoweringError(
            f"the lowered model is not valid ONNX: {S.first_line(error)}"
        ) from error


def _verify(
    model: Source, proto: onnx.ModelProto, profile: Profile | None, sizes: dict[str, int]
) -> str:
    """Return the runtime on which the two are equal."""
    # By onnx's own inference: our formulas know the working opset alone.
    check_run_budget(ir.from_proto(onnx.shape_inference.infer_shapes(proto)))
    if profile is not None:
        obstacles = problems(load(proto), profile)
        if obstacles:
            raise VerificationError(
                "\n  ".join([f"not for {profile.name} after all:", *map(str, obstacles)])
            )
    comparison = compare(ir.to_proto(load(model)), proto, sizes)
    if comparison.difference is not None:
        raise VerificationError(
            f"the lowered model differs from the original: {comparison.difference}\n"
            "hint: this is a defect of a lowering; nothing was written"
        )
    if comparison.runtime == REFERENCE:
        warnings.warn(
            f"onnxruntime is not installed, or does not run this: compared on {REFERENCE}",
            stacklevel=3,
        )
    return comparison.runtime
