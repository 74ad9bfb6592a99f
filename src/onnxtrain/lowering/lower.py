"""``onnxtrain.lower``: models for older opsets and smaller runtimes, compared with the original.

``lower_model`` has the passes in order. ``downgrade_opset`` is the strict variant for training
graphs: a node gets the form that the older opset has for it, or the whole model stays unchanged.
Expansions may be costly there (ScatterND becomes a matmul with a one-hot matrix). The one
exception is Shape with ``start`` and ``end``, which becomes a Slice of Shape.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import onnx
import onnx.version_converter
import onnx_ir as ir

from onnxtrain.errors import LoweringError, ProfileError, VerificationError
from onnxtrain.expand.expansions import apply_lowering
from onnxtrain.expand.shape import shape
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder, replace_value
from onnxtrain.graph.io import Source, load
from onnxtrain.graph.io.limits import JSON_BYTES, read_json, read_regular
from onnxtrain.graph.io.writer import ONNX_ERRORS, PRODUCER, transform_proto
from onnxtrain.graph.nodes import is_standard
from onnxtrain.graph.shapes import dims as D
from onnxtrain.graph.shapes.inference import infer_shapes
from onnxtrain.graph.shapes.unknown import specialize
from onnxtrain.graph.simplify import remove_dead, simplify
from onnxtrain.importer import prepare
from onnxtrain.lowering import profile as profiles
from onnxtrain.lowering.folding import (
    check_run_budget,
    fold_constants,
    remove_inference_no_ops,
    with_assumed_sizes,
)
from onnxtrain.lowering.opset_converters import convert_operators
from onnxtrain.lowering.profile import (
    NEWEST,
    OLDEST,
    LoweringTarget,
    Profile,
    read_config,
    unsupported_nodes,
)
from onnxtrain.lowering.replace import replace_unsupported
from onnxtrain.runtime.compare import REFERENCE, compare


def lower_model(
    model: ir.Model, opset: int, profile: Profile | None, sizes: Mapping[str, int]
) -> tuple[ir.Model, Counter[str]]:
    """Return a loaded model at an opset, in the operators of a profile, and the replaced operators.

    Args:
        model: from ``load``; it is consumed.
        opset: opset of the result.
        profile: what the runtime supports; ``None`` for everything that the opset has.
        sizes: values of symbolic sizes.
    """
    _check_opset(opset, profile)
    given = _names_of_weights(model)
    prepared = prepare(specialize(model, sizes), infer_from_consumers=False)
    model, weights = prepared.model, given - prepared.constants
    working = model.opset_imports[""]
    _simplify(model, weights)
    symbols = {s for x in model.graph.inputs for d in S.dims_of(x) or () for s in D.symbols(d)}
    target = LoweringTarget(opset, working, profile, sorted(symbols))
    replaced = replace_unsupported(model, target, weights)
    if replaced:
        # Folding simplifies the general form that expansions emit, so more of it can be lowered.
        _simplify(model, weights)
        replaced += replace_unsupported(model, target, weights)
        remove_dead(model)
    if opset <= working:
        convert_operators(model, opset)
    else:
        model = _upgrade_opset(model, opset)
    remove_dead(model)
    _set_opset_and_ir_version(model, target)
    return model, replaced


def _simplify(model: ir.Model, weights: frozenset[str]) -> None:
    remove_inference_no_ops(model)
    fold_constants(model, weights)
    remove_dead(model)
    infer_shapes(model.graph, model.opset_imports[""])
    fold_constants(model, weights)
    remove_inference_no_ops(model)
    simplify(model)


def _names_of_weights(model: ir.Model) -> frozenset[str]:
    return frozenset(n for n, x in model.graph.initializers.items() if S.is_float(x))


def _check_opset(opset: int, profile: Profile | None) -> None:
    if not OLDEST <= opset <= NEWEST:
        raise LoweringError(f"unknown opset: {opset} (expected {OLDEST} to {NEWEST})")
    if profile is not None and not profile.opset[0] <= opset <= profile.opset[1]:
        low, high = profile.opset
        raise LoweringError(
            f"{profile.name} does not read opset {opset}\nhint: use opset {low} to {high}"
        )


def _upgrade_opset(model: ir.Model, opset: int) -> ir.Model:
    try:
        return transform_proto(model, lambda p: onnx.version_converter.convert_version(p, opset))
    except ONNX_ERRORS as error:
        raise LoweringError(
            f"the model cannot be converted to opset {opset}: {S.first_line(error)}"
        ) from error


def _set_opset_and_ir_version(model: ir.Model, target: LoweringTarget) -> None:
    model.ir_version = target.ir_version
    graph = model.graph
    if target.initializers_as_inputs:
        listed = set(graph.inputs)
        graph.inputs.extend(x for x in graph.initializers.values() if x not in listed)
    for x in graph.initializers.values():
        if x.const_value is not None and x.shape is None:
            x.shape, x.type = (
                ir.Shape(x.const_value.shape.numpy()),
                ir.TensorType(x.const_value.dtype),
            )


VERIFIED_ON_KEY = "onnxtrain.compared_on"
_LARGEST = (1 << 31) - (
    1 << 24
)  # bytes of weights; with the graph they must fit into one 2 GiB protobuf


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
        profile: a runtime (``onnxtrain profiles`` lists them) or ``opset-N``; or a file: a profile
            in JSON, or the operator list of a reduced onnxruntime build.
        opset: opset of the result; required without a profile.
        dims: values of symbolic input sizes. Fewer symbolic sizes allow more lowerings.
        verify: compare the result with the original on random inputs of several shapes.

    Raises:
        ProfileError: if the profile is unknown.
        LoweringError: if some nodes cannot be lowered, with their names and the reasons.
        VerificationError: if the result differs, with the first tensor that does; or if the model
            is too large to run, with the nodes.

    Without onnxruntime, models are compared on onnx's reference evaluator, with a warning.
    ``verified_on`` returns the runtime that was used.
    """
    target_profile = find_profile(profile) if isinstance(profile, str) else profile
    if opset is None:
        if target_profile is not None:
            opset = target_profile.prefer
        elif isinstance(profile, str):
            opset = int(profile.removeprefix("opset-"))
        else:
            raise LoweringError("lower needs opset= or profile=")
    sizes = dict(dims or {})
    lowered, _ = lower_model(load(model), opset, target_profile, sizes)
    lowered.producer_name = PRODUCER
    proto = ir.to_proto(lowered)
    size = sum(len(t.raw_data) for t in proto.graph.initializer)
    if size > _LARGEST:
        if verify:
            raise VerificationError(
                f"the model has {size:,} bytes of weights, too many to verify\nhint: verify=False"
            )
        return proto
    _check(proto)
    if verify:
        runtime = _verify(model, proto, target_profile, sizes)
        proto.metadata_props.add(key=VERIFIED_ON_KEY, value=runtime)
    return proto


def verified_on(model: onnx.ModelProto) -> str | None:
    """Return the runtime on which a lowered model was compared with its original, if it was."""
    return next((p.value for p in model.metadata_props if p.key == VERIFIED_ON_KEY), None)


def find_profile(name: str) -> Profile | None:
    """Return a profile by name or file, ``None`` for ``opset-N``.

    Raises:
        ProfileError: if the profile is unknown or not valid.
    """
    if re.fullmatch(r"opset-\d+", name):
        return None
    path = Path(name)
    if path.suffix in (".json", ".config") and path.is_file():
        try:
            if path.suffix == ".config":
                return read_config(read_regular(path, JSON_BYTES).decode(), path.name)
            return profiles.parse(read_json(path))
        except (OSError, ValueError, TypeError, KeyError) as error:
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
    # onnx's shape inference: ours has formulas for the working opset only.
    sized = with_assumed_sizes(proto, sizes)
    check_run_budget(ir.from_proto(onnx.shape_inference.infer_shapes(sized)))
    if profile is not None:
        obstacles = unsupported_nodes(load(proto), profile)
        if obstacles:
            raise VerificationError(
                "\n  ".join(
                    [
                        f"the lowered model has nodes that {profile.name} rejects:",
                        *map(str, obstacles),
                    ]
                )
            )
    comparison = compare(ir.to_proto(load(model)), proto, sizes)
    if comparison.difference is not None:
        raise VerificationError(
            f"the lowered model differs from the original: {comparison.difference}\n"
            "hint: please report this; nothing was written"
        )
    if comparison.runtime == REFERENCE:
        warnings.warn(
            f"onnxruntime is not installed or cannot run the model: compared on {REFERENCE}",
            stacklevel=3,
        )
    return comparison.runtime


_MIN_OPSET = 11  # the oldest opset at which training graphs are tested


def downgrade_opset(model: ir.Model, opset: int, prefix: str = "lower/") -> list[str]:
    """Convert a model to an older opset, in place; nodes of other domains stay unchanged.

    Args:
        model: a model of the working opset with inferred shapes.
        opset: opset of the result; a newer one changes nothing.
        prefix: prefix of the names of new values.

    Returns:
        The operators that cannot be converted; if there are any, the model is unchanged.
    """
    working = model.opset_imports[""]
    if opset >= working:
        return []
    if opset < _MIN_OPSET:
        return [f"opset {opset}"]
    destination = LoweringTarget(opset, working)
    unfit = [
        node
        for node in model.graph.all_nodes()
        if is_standard(node) and destination.obstacle(node) is not None
    ]
    stuck = sorted({node.op_type for node in unfit if not _is_part_of_shape(node)})
    if stuck:
        return stuck
    root = OpBuilder(model.graph, prefix)
    for node in unfit:
        _slice_of_shape(root, node)
    convert_operators(model, opset, prefix)
    remove_dead(model)
    return []


def _is_part_of_shape(node: ir.Node) -> bool:
    x = node.inputs[0] if node.inputs else None
    return node.op_type == "Shape" and x is not None and x.shape is not None


def _slice_of_shape(root: OpBuilder, node: ir.Node) -> None:
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    op = OpBuilder(graph, root.prefix, before=node, parent=root)
    parts = apply_lowering(shape, op, node)
    assert parts is not None
    part = parts[0]
    assert part is not None
    y = node.outputs[0]
    replace_value(y, part, list(y.uses()))
    graph.remove(node, safe=True)
