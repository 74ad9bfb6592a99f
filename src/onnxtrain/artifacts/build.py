"""From a forward-only model to everything that training needs.

Training artifacts for an older opset: every model goes through the lowering stage.

Whether a stock runtime takes what was given and what was built, before anything is written.

A session is made once of the file, of the evaluation and of the step model. A file that the runtime
refuses is the user's matter; a model of ours that it refuses is a defect of this library.
"""

from __future__ import annotations

import collections
import dataclasses
import fnmatch
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.artifacts.directory import Artifacts, inference_model, merge_targets
from onnxtrain.artifacts.graphs import (
    BuiltModel,
    DifferentiatedModel,
    differentiate_loss,
    dtype_name,
    eval_graph,
    model_key,
    optimizer_graph,
    step_graph,
    training_graph,
)
from onnxtrain.artifacts.multi_step import multi_step_model, pack_parameters, resolve_steps_per_call
from onnxtrain.artifacts.per_example import per_example
from onnxtrain.artifacts.request import (
    LOSS_SCALE_OWNER,
    BuildOptions,
    BuildRequest,
    Precision,
    initial_scaler_state,
    resolve_precision,
)
from onnxtrain.artifacts.trainable import aliases_of, candidates, names_list, untrained_reasons
from onnxtrain.artifacts.update import mark_in_place, vector_models
from onnxtrain.autodiff.gradients import Names, normalize, registered_domains
from onnxtrain.autodiff.recompute import copy_scopes
from onnxtrain.autodiff.selection import batch_statistics
from onnxtrain.errors import (
    DefectError,
    LoadError,
    LoweringError,
    MissingExtraError,
    OnnxTrainError,
    PrepareError,
    hints_name_freeze,
)
from onnxtrain.graph.io import Source, load
from onnxtrain.graph.io.external_data import SharedWeights
from onnxtrain.graph.io.proto_checks import STANDARD_DOMAINS
from onnxtrain.graph.memory_usage import symbolic_peaks
from onnxtrain.graph.shapes.unknown import specialize
from onnxtrain.importer import Prepared, expose_weights
from onnxtrain.importer.parameters import ADAPTERS
from onnxtrain.losses import LossLike, MetricLike
from onnxtrain.losses.attach import loss_inputs
from onnxtrain.lowering.lower import lower
from onnxtrain.manifest import Manifest, ModelSpec, StateSpec, WeightSpec
from onnxtrain.modes import unshare_running_statistics
from onnxtrain.modes.mixed_precision import upcast_to_float32
from onnxtrain.optim import Optimizer
from onnxtrain.optim import resolve as resolve_optimizer
from onnxtrain.optim.optimizer import Clip
from onnxtrain.optim.privacy import DP
from onnxtrain.optim.transforms import ANCHOR
from onnxtrain.options import from_arguments, recorded_options
from onnxtrain.runtime import session as runtime
from onnxtrain.targets import BUNDLES, Target, find

LARGE_WEIGHTS_NOT_LOWERED = (
    "weights so large are kept in a file, which no lowering rewrites\n"
    "hint: build without opset, and lower what is exported"
)
_SCATTER_HINT = "\nhint: target='portable' gives gradients of pooling that scatter nothing"


def lower_models(models: Mapping[str, onnx.ModelProto], opset: int) -> dict[str, onnx.ModelProto]:
    """Return the models at an opset, each compared with what it came from.

    Raises:
        LoweringError: naming the model and its nodes that cannot be lowered, or that differ.
    """
    lowered = {}
    for name, model in models.items():
        try:
            lowered[name] = lower(model, opset=opset)
        except LoweringError as error:
            hint = _SCATTER_HINT if "Scatter" in str(error) else ""
            raise LoweringError(f"the {name} model: {error}{hint}") from error
    return lowered


_NO_KERNEL = ("NOT_IMPLEMENTED", "Could not find an implementation")
_ROLES = ("eval", "step")


def check_inputs(model: ir.Model) -> None:
    """Refuse inputs that no batch of numbers can be given for.

    Raises:
        PrepareError: naming all of them.
    """
    odd = [x for x in model.graph.inputs if not _is_numeric(x)]
    if odd:
        listing = ", ".join(f"{x.name!r} ({_type_name(x)})" for x in odd)
        raise PrepareError(
            f"inputs that are not tensors of numbers: {listing}\n"
            "hint: cut the model behind them, for example with onnx.utils.extract_model, "
            "and train what comes after"
        )


def _is_numeric(x: ir.Value) -> bool:
    return isinstance(x.type, ir.TensorType) and x.dtype != ir.DataType.STRING


def _type_name(x: ir.Value) -> str:
    return "string" if x.dtype == ir.DataType.STRING else type(x.type).__name__


def check_sessions(artifacts: Artifacts, target: str) -> None:
    """Make a session of the file and of each kind of model, if there is a runtime for it.

    Raises:
        LoadError: the runtime refuses the file, and says why.
        DefectError: it refuses a model that was made of a file it takes; the model is kept.
    """
    try:
        runtime.import_onnxruntime()
    except MissingExtraError:
        return
    specs = {m.role: m for m in artifacts.manifest.models if m.steps_per_call == 1}
    if "infer" not in specs or _has_own_operators(artifacts, specs["infer"]):
        return
    of_file = _session_error(artifacts, specs["infer"], plain=True)
    if of_file and not _lacks_kernel(of_file):
        raise _load_error(of_file)
    for spec in (specs[role] for role in _ROLES if role in specs):
        reason = _session_error(artifacts, spec)
        if reason is None or (_lacks_kernel(reason) and find(target).gpu):
            continue
        raise _load_error(of_file) if of_file else _defect_error(artifacts, spec, reason)


def _has_own_operators(artifacts: Artifacts, spec: ModelSpec) -> bool:
    """Return whether a model has operators that no stock runtime knows."""
    model = artifacts.models[spec.role]
    local = {f.domain for f in model.functions}
    domains = {o.domain for o in model.opset_import} | {n.domain for n in model.graph.node}
    return bool(domains - STANDARD_DOMAINS - local)


def _session_error(artifacts: Artifacts, spec: ModelSpec, *, plain: bool = False) -> str | None:
    """Return why the runtime refuses a model, if it does."""
    try:
        runtime.create(artifacts.source_of(spec), options=_options(artifacts, plain=plain))
    except OnnxTrainError as error:
        return str(error).removeprefix("onnxruntime cannot load the model: ")
    return None


def _options(artifacts: Artifacts, *, plain: bool) -> Any:
    options = runtime.session_options(1)
    if plain or artifacts.shared is not None:
        levels = runtime.import_onnxruntime().GraphOptimizationLevel
        options.graph_optimization_level = levels.ORT_DISABLE_ALL
        # Weights stay where they are: nobody computes with them here.
        options.add_session_config_entry("session.disable_prepacking", "1")
    return options


def _lacks_kernel(reason: str) -> bool:
    return any(words in reason for words in _NO_KERNEL)


def _load_error(reason: str) -> LoadError:
    return LoadError(
        f"onnxruntime cannot load this file: {reason}\n"
        "hint: mend or export the file again; check=False builds without asking onnxruntime"
    )


def _defect_error(artifacts: Artifacts, spec: ModelSpec, reason: str) -> DefectError:
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


def build(
    model: Source,
    *,
    loss: LossLike,
    optimizer: str | Optimizer,
    train: Names = None,
    freeze: Names = None,
    mode: str = "train",
    metrics: Sequence[MetricLike] = (),
    outputs: Names = (),
    clip: float | Clip | None = None,
    accumulate: int = 1,
    ema: float | None = None,
    precision: str | Precision = "float32",
    recompute: str | Sequence[str] = (),
    target: str = "cpu",
    dims: Mapping[str, int] | None = None,
    dp: DP | None = None,
    straight_through: bool = False,
    randomness: str = "portable",
    steps_per_call: int | None = None,
    opset: int | None = None,
    check: bool = True,
) -> Artifacts:
    """Return training, evaluation, optimizer, step and inference models with their manifest.

    Args:
        model: a path, bytes, ``ModelProto`` or ``ir.Model``; it is not changed.
        loss: a name (``"cross_entropy"``), a loss object, the name of a scalar output, a function
            over the builder, another model, or a list of weighted losses.
        optimizer: a name (``"adamw"``) or an optimizer object.
        train: names or globs of the parameters to train; ``None`` stands for every tensor that
            works as a weight and reaches the loss: no constants, no running statistics. A word
            stands for some: ``"bias"``, ``"norm"``, ``"last:2"`` (the last two blocks or layers).
        freeze: names or globs to take out of those.
        mode: ``"train"`` puts BatchNormalization with a trainable scale into training mode and
            Dropout on; ``"as-is"`` leaves the model as it was exported.
        metrics: names or objects of what to report besides the loss; ``"grad_norm"`` among them.
        outputs: outputs of the model that the training and evaluation models give too.
        clip: the largest joint norm of the gradients, or a :class:`Clip`.
        accumulate: how many batches the optimizer sees as one, by default.
        ema: decay of a moving average of the weights.
        precision: ``"float32"``, or ``"bf16-mixed"`` or ``"fp16-mixed"``: products in 16 bits,
            parameters and all else in float32; a :class:`Precision` also sets the loss scaling.
            Files in 16 bits train in float32 too, and are exported as they were; ``"file"`` trains
            them in their own types.
        recompute: what to compute again in the backward pass instead of keeping it: ``"auto"``,
            or globs of scopes (``"layers.*"``), nodes, or values that blocks end with; ``"none"``
            keeps what ``cuda`` would make again by itself.
        target: which spelling to choose: ``cpu``, ``cuda``, ``wasm``, ``webgpu`` or ``portable``;
            ``web`` gives the forms for wasm and WebGPU together.
        dims: sizes to fix, by the name of the symbolic dimension or by its place (``"x[0]"``).
        dp: clip the gradients of each example, and add noise to their sum (:class:`DP`).
        straight_through: train through quantisers as if they did not round: gradients pass inside
            the range of the integers, and nothing outside. Without it such models are refused.
        randomness: ``"portable"`` masks are a function of seed, step and place, the same on every
            runtime; ``"native"`` uses the runtime's own random operators.
        steps_per_call: with more than one, there is also a step model that trains so many batches
            in one call. ``None`` is 8 for small models on wasm, else 1.
        opset: of all models, where a runtime wants an older one; each then goes through
            :func:`onnxtrain.lower` and is compared with what it came from.
        check: make a session of the file and of what was built, once, where onnxruntime is
            installed; what it refuses is found here then, and not at the first step.
    """
    request = from_arguments(BuildRequest, locals())
    first, *rest = BUNDLES.get(target, (target,))
    with hints_name_freeze():
        one = dataclasses.replace(request, target=first)
        _check_options(mode, accumulate, ema, first, randomness)
        resolve_precision(precision, first)
        source = _load_source(model, one)
        artifacts = _check_artifacts(_build_for_target(source, one), one)
        for name in rest:
            one = dataclasses.replace(request, target=name)
            if not find(name).prefers("multi-step"):
                one = dataclasses.replace(one, steps_per_call=1)
            artifacts = merge_targets(
                artifacts, _check_artifacts(_build_for_target(source, one), one)
            )
    return artifacts


@dataclasses.dataclass(frozen=True)
class LoadedSource:
    """The user's model, loaded and checked once for all targets."""

    model: ir.Model
    """As it is served: every weight is an initializer, ``dims`` are fixed."""
    repairs: tuple[str, ...]
    shared: SharedWeights | None
    """The file that large weights are kept in."""


def _load_source(model: Source, request: BuildRequest) -> LoadedSource:
    """Load the user's model."""
    source, exposed = expose_weights(load(model, allow_domains=registered_domains()))
    source = specialize(source, request.dims or {})
    check_inputs(source)
    shared = SharedWeights()
    large = shared.take(source)
    if large and request.opset is not None:
        raise PrepareError(LARGE_WEIGHTS_NOT_LOWERED)
    apart = unshare_running_statistics(source)
    return LoadedSource(source, (*exposed, *apart), shared if large else None)


def _build_for_target(loaded: LoadedSource, request: BuildRequest) -> Artifacts:
    """Return the artifacts for a single target."""
    source = loaded.model
    target, accumulate, opset = request.target, request.accumulate, request.opset
    mixed_precision = resolve_precision(request.precision, target)
    base = _normal_form(source, request)
    options = _resolve_options(request, base, mixed_precision)
    untrained = untrained_reasons(base) if request.train is None else []
    trained = {*options.candidates, *options.buffers}
    widened = (
        upcast_to_float32(base.model, trained, target=options.target)
        if mixed_precision.upcasts_to_float32
        else []
    )
    origin = differentiate_loss(base.copy(), options)
    if request.dp is not None:
        _check_private(request, mixed_precision)
        origin = per_example(origin, request.dp, options.target)
    arrays = {n: _initializer_array(base.model, n) for n in origin.parameters}
    values = {n: _initializer_array(base.model, n) for n in origin.buffers}
    weights = _weight_specs(source, arrays)
    state = [*_state_specs(options, arrays), *mixed_precision.state()]
    _check_names(origin.parameters, origin.buffers, state)
    slots = {s.name: _initial_state(s, arrays) for s in state}
    size = sum(a.nbytes for group in (arrays, values, slots) for a in group.values())
    # Where the rest is large, a call costs little beside it, and a second session much.
    frozen = [x.const_value for x in base.graph.initializers.values() if x.name not in trained]
    size += sum(t.nbytes for t in frozen if t is not None)
    count = resolve_steps_per_call(request.steps_per_call, target, accumulate, size)
    graphs = _graphs(base, origin, options, weights, state, accumulate, count)
    infer, infer_spec = inference_model(source)
    models = {model_key(spec): proto for proto, spec in graphs}
    models["infer"] = infer
    if opset is not None:
        models = lower_models(models, opset)
    manifest = Manifest(
        models=(*(mark_in_place(spec, models[model_key(spec)]) for _, spec in graphs), infer_spec),
        parameters=weights,
        buffers=tuple(_weight_spec(n, a) for n, a in values.items()),
        state=tuple(state),
        optimizer=_optimizer_settings(options.optimizer),
        loss={"output": "loss", "name": _loss_name(request.loss)},
        accumulate=accumulate,
        options={
            **recorded_options(request),
            "loss_scale": mixed_precision.settings(),
            "repairs": [*loaded.repairs, *base.repairs, *untrained, *widened, *origin.repairs],
            **({"above_one": list(origin.above_one)} if origin.above_one else {}),
            **({"dp": dataclasses.asdict(request.dp)} if request.dp else {}),
            **_web_options(source, graphs, options.target),
        },
    )
    return Artifacts(manifest, models, {**arrays, **values}, slots, shared=loaded.shared)


def _web_options(source: ir.Model, graphs: Sequence[BuiltModel], target: Target) -> dict[str, Any]:
    """Return what trainers that know no graphs need: names of adapters, memory of a step."""
    notes: dict[str, Any] = {}
    if ADAPTERS in source.metadata_props:
        notes["adapters"] = json.loads(source.metadata_props[ADAPTERS])
    if target.lacks("output-binding"):
        step = next(p for p, spec in graphs if spec.role == "step" and spec.steps_per_call == 1)
        graph = ir.from_proto(step).graph
        constants = [x.const_value for x in graph.initializers.values()]
        notes["memory"] = {
            "constants": sum(t.nbytes for t in constants if t is not None),
            "nodes": len(graph),
            "results": symbolic_peaks(graph),
        }
    return notes


def _normal_form(source: ir.Model, request: BuildRequest) -> Prepared:
    """Return what the rules can differentiate, with the weights of the source."""
    base = normalize(
        source.clone(),
        request.target,
        straight_through=request.straight_through,
        weights_exposed=True,
    )
    if request.blocks:
        copy_scopes(source, base.model)
    return base


def _graphs(
    base: Prepared,
    origin: DifferentiatedModel,
    options: BuildOptions,
    weights: tuple[WeightSpec, ...],
    state: list[StateSpec],
    accumulate: int,
    steps: int,
) -> list[BuiltModel]:
    """Return all models that training needs; one trains several ``steps`` in a call, if asked."""
    graphs = [
        training_graph(origin, options),
        eval_graph(base.model.clone(), options, origin.parameters),
        optimizer_graph(options, weights, state),
        step_graph(origin, options, state),
    ]
    if steps > 1:
        leaner, fewer, packs = pack_parameters(origin, options, state)
        lean = step_graph(leaner, options, fewer)
        graphs.append(multi_step_model(lean, steps, graphs[-1][1], packs))
    return [*graphs, *vector_models(origin, options, weights, state, accumulate)]


def _check_artifacts(artifacts: Artifacts, request: BuildRequest) -> Artifacts:
    """Return artifacts that onnxruntime takes, if it is to be asked."""
    if request.check:
        check_sessions(artifacts, request.target)
    return artifacts


def _resolve_options(
    request: BuildRequest, base: Prepared, mixed_precision: Precision
) -> BuildOptions:
    """Return what was asked for in terms of the model."""
    return BuildOptions(
        loss=request.loss,
        optimizer=resolve_optimizer(request.optimizer),
        metrics=tuple(request.metrics),
        outputs=_output_names(base.model, request.outputs),
        candidates=tuple(
            x.name or ""
            for x in candidates(
                base, request.train, request.freeze, inner=loss_inputs(request.loss, base.model)
            )
        ),
        chosen_by_user=request.train is not None,
        buffers=_buffer_names(base.model),
        mode=request.mode,
        clip=Clip.of(request.clip),
        ema=request.ema,
        target=base.restrict(_resolve_target(request)),
        randomness=request.randomness,
        precision=mixed_precision,
        recompute=request.blocks,
    )


def _loss_name(loss: LossLike) -> str:
    return loss if isinstance(loss, str) else type(loss).__name__


def _check_options(
    mode: str,
    accumulate: int,
    ema: float | None,
    target: str,
    randomness: str,
) -> None:
    if mode not in ("train", "as-is"):
        raise PrepareError(f"no such mode: {mode!r}\nhint: train or as-is")
    find(target, bundles=True)
    if randomness not in ("portable", "native"):
        raise PrepareError(f"no such randomness: {randomness!r}\nhint: portable or native")
    if accumulate < 1:
        raise PrepareError(f"accumulate must be at least 1: {accumulate}")
    if ema is not None and not 0.0 < ema < 1.0:
        raise PrepareError(f"ema must lie between 0 and 1: {ema}")


def _check_private(request: BuildRequest, mixed_precision: Precision) -> None:
    if request.accumulate > 1:
        raise PrepareError("dp= adds noise to every batch\nhint: leave accumulate at 1")
    if mixed_precision.half is not None or mixed_precision.scaled:
        raise PrepareError("dp= clips in float32\nhint: leave precision at float32")


def _resolve_target(request: BuildRequest) -> Target:
    """Return the target; at an older opset few operators take sizes that data decide."""
    chosen = find(request.target)
    if request.disables_recompute:
        chosen = chosen.without("chunked-attention", "rematerialize")
    newer = ("fuse-attention", "data-dependent-shapes")
    return chosen if request.opset is None else chosen.without(*newer)


def _output_names(base: ir.Model, outputs: Names) -> tuple[str, ...]:
    """Return names; patterns stand for outputs, a plain name may be any value of the model."""
    known = [y.name or "" for y in base.graph.outputs]
    names: dict[str, None] = {}
    for name in names_list(outputs):
        hits = fnmatch.filter(known, name) if name not in known else []
        names.update(dict.fromkeys(hits or [name]))
    return tuple(names)


def _buffer_names(base: ir.Model) -> tuple[str, ...]:
    statistics = batch_statistics(base.graph)
    return tuple(n for n, x in base.graph.initializers.items() if x in statistics)


def _initializer_array(model: ir.Model, name: str) -> np.ndarray:
    tensor = model.graph.initializers[name].const_value
    assert tensor is not None
    return np.array(tensor.numpy())


def _weight_specs(source: ir.Model, arrays: Mapping[str, np.ndarray]) -> tuple[WeightSpec, ...]:
    aliases = aliases_of(source)
    return tuple(
        dataclasses.replace(_weight_spec(n, a), aliases=aliases.get(n, ()))
        for n, a in arrays.items()
    )


def _weight_spec(name: str, array: np.ndarray) -> WeightSpec:
    return WeightSpec(name, array.dtype.name, tuple(array.shape))


def _state_specs(options: BuildOptions, arrays: Mapping[str, np.ndarray]) -> list[StateSpec]:
    specs = []
    for name, array in arrays.items():
        dtype, shape = ir.DataType.from_numpy(array.dtype), tuple(array.shape)
        specs += [
            StateSpec(f"{name}.{s.name}", name, s.name, dtype_name(s.dtype), tuple(s.dims), s.init)
            for s in options.optimizer.slots(name, shape, dtype)
        ]
        if options.ema is not None:
            specs.append(StateSpec(f"{name}.ema", name, "ema", array.dtype.name, shape, 0.0))
    return specs


def _check_names(
    parameters: Sequence[str], buffers: Sequence[str], state: Sequence[StateSpec]
) -> None:
    """Refuse a model in which the names of state or of new values are taken."""
    names = [*parameters, *buffers, *(s.name for s in state)]
    counts = collections.Counter([*names, *(f"{n}.out" for n in names)])
    twice = sorted(n for n, count in counts.items() if count > 1)
    if twice:
        raise PrepareError(
            f"names that state or new values need are taken: {', '.join(twice)}\n"
            "hint: rename those initializers in the model"
        )


def _initial_state(spec: StateSpec, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    if spec.parameter == LOSS_SCALE_OWNER:
        return initial_scaler_state(spec)
    array = arrays[spec.parameter]
    if spec.slot in ("ema", ANCHOR):
        return np.array(array)
    kind = array.dtype if spec.dtype == array.dtype.name else spec.dtype
    # Zeros take no memory until somebody writes to them.
    return np.full(spec.shape, spec.init, kind) if spec.init else np.zeros(spec.shape, kind)


def _optimizer_settings(optimizer: Optimizer) -> dict[str, Any]:
    values = dataclasses.asdict(optimizer)
    values["groups"] = [dataclasses.asdict(g) for g in optimizer.groups]
    if not optimizer.proximal:  # most have none
        del values["proximal"]
    return {"name": type(optimizer).__name__, **values}
