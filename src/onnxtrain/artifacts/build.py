"""Build training artifacts from a forward-only model.

:func:`build` loads and checks the model once (:func:`_load_source`), builds the artifacts of each
target (:func:`_build_for_target`), and merges them if there are several (:func:`merge_targets`).
For one target it

1. brings the model to the normal form and selects the tensors to train;
2. adds the loss and differentiates it (``graphs.differentiate_loss``);
3. builds the graphs: training, evaluation, optimizer, step, several steps, vector updates;
4. serializes them, lowers them to an older opset if asked to, and writes the manifest;
5. creates a session of the file and of the built models (:func:`check_sessions`), to find out
   before training whether onnxruntime accepts them. A file that onnxruntime rejects is an error of
   the user; a built model that it rejects is a defect of this library.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import fnmatch
import gc
import hashlib
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.artifacts import cache
from onnxtrain.artifacts.batch_axis import free_batch_axes
from onnxtrain.artifacts.build_options import BuildOptions, Selection
from onnxtrain.artifacts.directory import Artifacts
from onnxtrain.artifacts.graphs import (
    BuiltModel,
    DifferentiatedModel,
    differentiate_loss,
    dtype_name,
    eval_graph,
    inference_model,
    model_key,
    optimizer_graph,
    step_graph,
    training_graph,
)
from onnxtrain.artifacts.multi_step import multi_step_model, pack_parameters, resolve_steps_per_call
from onnxtrain.artifacts.per_example import per_example
from onnxtrain.artifacts.precision import LOSS_SCALE_OWNER, Precision
from onnxtrain.artifacts.trainable import (
    aliases_of,
    names_list,
    select_parameters,
    shared_tensors,
    untrained_reasons,
)
from onnxtrain.artifacts.update import mark_in_place, vector_models
from onnxtrain.autodiff.gradient_nodes import TRAINING_DOMAIN
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
    by_caller,
    hints_name_freeze,
)
from onnxtrain.graph.io import Source, load
from onnxtrain.graph.io.external_data import SharedWeights, release_memory
from onnxtrain.graph.io.proto_checks import STANDARD_DOMAINS
from onnxtrain.graph.memory_usage import symbolic_peaks
from onnxtrain.graph.shapes.unknown import specialize
from onnxtrain.importer import Prepared, expose_weights
from onnxtrain.importer.opset import to_loadable
from onnxtrain.importer.parameters import ADAPTERS
from onnxtrain.losses import LossLike, MetricLike
from onnxtrain.losses.attach import loss_inputs
from onnxtrain.lowering.lower import lower
from onnxtrain.manifest import Manifest, ModelSpec, StateSpec, WeightSpec
from onnxtrain.modes import unshare_running_statistics
from onnxtrain.modes.mixed_precision import upcast_to_float32
from onnxtrain.optim import Optimizer
from onnxtrain.optim.optimizer import Clip
from onnxtrain.optim.privacy import DP
from onnxtrain.optim.transforms import ANCHOR
from onnxtrain.options import from_arguments, recorded_options
from onnxtrain.runtime import session as runtime
from onnxtrain.targets import BUNDLES, Target


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
    dims: Mapping[str, int | str] | None = None,
    dp: DP | None = None,
    straight_through: bool = False,
    randomness: str = "portable",
    steps_per_call: int | None = None,
    opset: int | None = None,
    check: bool = True,
) -> Artifacts:
    """Return the models of a training run, their initial values and their manifest.

    Args:
        model: a path, bytes, ``ModelProto`` or ``ir.Model``; it is not changed.
        loss: a name (``"cross_entropy"``), a loss object, the name of a scalar output, a function
            over the builder, a module or function of torch, another model, or a list of weighted
            losses.
        optimizer: a name (``"adamw"``) or an optimizer object.
        train: names or globs of the parameters to train. By default all weights that reach the
            loss train; constants and running statistics do not. Keywords select groups:
            ``"bias"``, ``"norm"``, ``"last:2"`` (the last two blocks or layers).
        freeze: names or globs of parameters to exclude.
        mode: ``"train"`` puts BatchNormalization with a trainable scale into training mode and
            turns Dropout on; ``"as-is"`` keeps the model as it was exported.
        metrics: names or objects of metrics to report, including ``"grad_norm"``.
        outputs: outputs of the model that the training and evaluation models also return.
        clip: maximum global norm of the gradients, or a :class:`Clip`.
        accumulate: gradient accumulation steps; the trainer can change it if it is above 1.
        ema: decay of a moving average of the weights.
        precision: ``"float32"``; ``"bf16-mixed"`` or ``"fp16-mixed"``, which compute matmuls in
            16 bits and everything else in float32; a :class:`Precision` also sets the loss scaling.
            Files in 16 bits train in float32 and are exported in 16 bits; ``"file"`` trains them in
            their own types.
        recompute: activation checkpointing: values to recompute in the backward pass instead of
            storing them. ``"auto"``, or globs of scopes (``"layers.*"``), nodes, or outputs of
            blocks; ``"none"`` also disables what ``cuda`` recomputes by default.
        target: runtime to generate operators for: ``cpu``, ``cuda``, ``wasm``, ``webgpu`` or
            ``portable``; ``web`` builds models for both wasm and WebGPU.
        dims: dimensions to fix, by symbolic name or by position (``"x[0]"``). A name frees a fixed
            batch size: ``{"x[0]": "batch"}``. That is the default where all inputs have a batch of
            1, and two examples at once give the same results as one by one.
        dp: differentially private training (:class:`DP`): clip the gradients of each example and
            add noise to their sum.
        straight_through: train through quantizers with straight-through gradients: 1 inside the
            range of the integers, 0 outside. Without it such models raise an error.
        randomness: ``"portable"`` dropout masks are a function of seed, step and position, equal on
            all runtimes; ``"native"`` uses the random operators of the runtime.
        steps_per_call: if above 1, also build a step model that trains this number of batches per
            call. The default is 8 for small models on wasm, else 1.
        opset: opset of all models, for runtimes that need an older one. Each model is lowered by
            :func:`onnxtrain.lower`, which compares the result with the original.
        check: create a session of the file and of the built models, if onnxruntime is installed,
            so that models it rejects are found now and not at the first training step.
    """
    arguments = locals()  # the fields of BuildOptions have the names of the arguments
    cached_file = cache.path_of(model, arguments)
    cached = cache.read(cached_file)
    if cached is not None:
        return cached
    with hints_name_freeze():
        first, *others = (
            from_arguments(BuildOptions, {**arguments, "target": name})
            for name in BUNDLES.get(target, (target,))
        )
        with _few_collections():
            source = _load_source(model, first)
            artifacts = _build_for_target(source, first)
            for options in others:
                if not options.target.prefers("multi-step"):
                    options = dataclasses.replace(options, steps_per_call=1)
                artifacts = merge_targets(artifacts, _build_for_target(source, options))
    if artifacts.shared is not None:
        release_memory()
    cache.write(cached_file, artifacts)
    return artifacts


@contextlib.contextmanager
def _few_collections() -> Iterator[None]:
    """Run Python's garbage collector less often: it takes a fifth of a build and frees little."""
    before = gc.get_threshold()
    if before[0]:
        gc.set_threshold(max(before[0], 200_000), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


@dataclasses.dataclass(frozen=True)
class LoadedSource:
    """The model of the user, loaded and checked once for all targets."""

    model: ir.Model
    """The model to serve: every weight is an initializer, ``dims`` are fixed."""
    repairs: tuple[str, ...]
    shared: SharedWeights | None
    """The file with the weights, if they are too large for a protobuf."""


def _load_source(model: Source, options: BuildOptions) -> LoadedSource:
    """Load and check the model of the user."""
    source, exposed = expose_weights(load(model, allow_domains=registered_domains()))
    source, expanded = _expand_for_runtimes(source)
    source, sizes, freed = free_batch_axes(source, options.dims, automatic=options.check)
    source = specialize(source, sizes)
    check_inputs(source)
    shared = SharedWeights()
    # Models for browsers and older opsets are self-contained as long as protobufs can be.
    mapped = options.opset is None and not options.target.lacks("output-binding")
    large = shared.take(source, mapped=mapped)
    if large and options.opset is not None:
        raise PrepareError(
            "opset= does not support models with weights in a shared file\n"
            "hint: build without opset=, and lower the exported model"
        )
    unshared = unshare_running_statistics(source)
    repairs = (*exposed, *expanded, *freed, *unshared)
    return LoadedSource(source, repairs, shared if large else None)


def _expand_for_runtimes(source: ir.Model) -> tuple[ir.Model, Sequence[str]]:
    """Return the model to serve without operators that no runtime has, and a line per change."""
    domains = {n.domain for n in source.graph.all_nodes()}
    if TRAINING_DOMAIN in domains:
        prepared = normalize(source)
        return prepared.model, prepared.repairs
    return to_loadable(source)


def _build_for_target(loaded: LoadedSource, options: BuildOptions) -> Artifacts:
    """Return the artifacts for a single target, accepted by onnxruntime."""
    source, precision = loaded.model, options.precision
    base = _normal_form(source, options)
    options = dataclasses.replace(options, target=base.restrict(options.graph_target))
    selection = _select(base, options)
    untrained = untrained_reasons(base) if options.train is None else []
    trained = {*selection.candidates, *selection.buffers}
    shared = shared_tensors(base.graph, selection.candidates, aliases_of(source))
    upcast = []
    if precision.upcasts_to_float32:
        upcast = upcast_to_float32(base.model, trained, target=options.target)
    origin = differentiate_loss(base.copy(), options, selection)
    if options.dp is not None:
        origin = per_example(origin, options.dp, options.target)
    parameters = {n: _initializer_array(base.model, n) for n in origin.parameters}
    buffers = {n: _initializer_array(base.model, n) for n in origin.buffers}
    _check_epsilon(options.optimizer, parameters)
    weights = _weight_specs(source, parameters)
    state = [*_state_specs(options, parameters), *precision.state()]
    _check_names(origin.parameters, origin.buffers, state)
    slots = {s.name: _initial_state(s, parameters) for s in state}
    # A large frozen part makes a step slow: a call costs little in comparison, and a second session
    # with its own copy of the weights costs much.
    frozen = [x.const_value for x in base.graph.initializers.values() if x.name not in trained]
    size = sum(a.nbytes for group in (parameters, buffers, slots) for a in group.values())
    size += sum(t.nbytes for t in frozen if t is not None)
    steps = resolve_steps_per_call(options.steps_per_call, options.target, options.accumulate, size)
    built = _graphs(base, origin, options, selection, weights, state, steps)
    web_options = _web_options(source, built, options.target)
    built.append(inference_model(source))
    models, specs = _serialize(built, options.opset)
    manifest = Manifest(
        models=specs,
        parameters=weights,
        buffers=tuple(_weight_spec(n, a) for n, a in buffers.items()),
        state=tuple(state),
        optimizer=_optimizer_settings(options.optimizer),
        loss={"output": "loss", "name": _loss_name(options.loss)},
        accumulate=options.accumulate,
        options={
            **recorded_options(options),
            "initial_weights": initial_weights(source, {**parameters, **buffers}),
            "loss_scale": precision.settings(),
            "predictions": {n: dataclasses.asdict(c) for n, c in origin.compared.items()},
            "repairs": [
                *loaded.repairs,
                *base.repairs,
                *untrained,
                *shared,
                *upcast,
                *origin.repairs,
            ],
            **({"above_one": list(origin.above_one)} if origin.above_one else {}),
            **({"dp": dataclasses.asdict(options.dp)} if options.dp else {}),
            **web_options,
        },
    )
    values = {**parameters, **buffers}
    artifacts = Artifacts(manifest, models, values, slots, shared=loaded.shared)
    if options.check:
        check_sessions(artifacts, options.target)
    return artifacts


def _normal_form(source: ir.Model, options: BuildOptions) -> Prepared:
    """Return a copy of the model in operators that have gradient rules."""
    base = normalize(
        source.clone(),
        options.target,
        straight_through=options.straight_through,
        weights_exposed=True,
    )
    if options.blocks:
        copy_scopes(source, base.model)
    return base


def _select(base: Prepared, options: BuildOptions) -> Selection:
    """Return the tensors of the model that the options select."""
    read_by_loss = loss_inputs(options.loss, base.model)
    trainable = select_parameters(
        base, options.train, options.freeze, inner=read_by_loss, loss=options.loss
    )
    statistics = batch_statistics(base.graph)
    return Selection(
        candidates=tuple(x.name or "" for x in trainable),
        explicit=options.train is not None,
        buffers=tuple(n for n, x in base.graph.initializers.items() if x in statistics),
        outputs=_output_names(base.model, options.outputs),
    )


def _output_names(base: ir.Model, outputs: Names) -> tuple[str, ...]:
    """Return the names of outputs; a name may be any value of the model, a glob only an output."""
    known = [y.name or "" for y in base.graph.outputs]
    names: dict[str, None] = {}
    for name in names_list(outputs):
        matches = fnmatch.filter(known, name) if name not in known else []
        names.update(dict.fromkeys(matches or [name]))
    return tuple(names)


def _graphs(
    base: Prepared,
    origin: DifferentiatedModel,
    options: BuildOptions,
    selection: Selection,
    weights: tuple[WeightSpec, ...],
    state: list[StateSpec],
    steps: int,
) -> list[BuiltModel]:
    """Return all models of a training run; with ``steps > 1`` one trains several batches."""
    graphs = [
        training_graph(origin, options),
        eval_graph(base.model.clone(), options, selection, origin.parameters),
        optimizer_graph(options, weights, state),
        step_graph(origin, options, state),
    ]
    if steps > 1:
        packed, packed_state, packs = pack_parameters(origin, options, state)
        step = step_graph(packed, options, packed_state)
        graphs.append(multi_step_model(step, steps, graphs[-1].spec, packs))
    return [*graphs, *vector_models(origin, options, weights, state)]


def _web_options(source: ir.Model, built: Sequence[BuiltModel], target: Target) -> dict[str, Any]:
    """Return options for trainers that cannot read graphs: adapters, and the memory of a step."""
    options: dict[str, Any] = {}
    if ADAPTERS in source.metadata_props:
        options["adapters"] = json.loads(source.metadata_props[ADAPTERS])
    if target.lacks("output-binding"):
        step = next(b for b in built if b.spec.role == "step" and b.spec.steps_per_call == 1)
        graph = step.model.graph
        constants = [x.const_value for x in graph.initializers.values()]
        options["memory"] = {
            "constants": sum(t.nbytes for t in constants if t is not None),
            "nodes": len(graph),
            "results": symbolic_peaks(graph),
        }
    return options


def _serialize(
    built: Sequence[BuiltModel], opset: int | None
) -> tuple[dict[str, onnx.ModelProto], tuple[ModelSpec, ...]]:
    """Return the models as protobufs, at an older opset if given, and their manifest entries."""
    models: dict[str, onnx.ModelProto] = {}
    specs: list[ModelSpec] = []
    for one in built:
        model, name = one.model, model_key(one.spec)
        proto = one.to_proto()
        if opset is not None:
            proto = _lower(proto, opset, name)
            model = ir.from_proto(proto)
        models[name] = proto
        specs.append(mark_in_place(one.spec, model.graph))
    return models, tuple(specs)


_SCATTER_HINT = "\nhint: target='portable' computes gradients of pooling without scatter operators"


def _lower(model: onnx.ModelProto, opset: int, name: str) -> onnx.ModelProto:
    """Return a model at an opset.

    Raises:
        LoweringError: naming the model and the nodes that cannot be lowered, or that differ.
    """
    try:
        return lower(model, opset=opset)
    except LoweringError as error:
        hint = _SCATTER_HINT if "Scatter" in str(error) else ""
        raise LoweringError(f"the {name} model: {error}{hint}") from error


def _loss_name(loss: LossLike) -> str:
    return loss if isinstance(loss, str) else getattr(loss, "__name__", type(loss).__name__)


def _optimizer_settings(optimizer: Optimizer) -> dict[str, Any]:
    values = dataclasses.asdict(optimizer)
    values["groups"] = [dataclasses.asdict(g) for g in optimizer.groups]
    for name, default in (("proximal", 0.0), ("ewc", 0.0), ("state_bits", 32)):
        if values[name] == default:
            del values[name]
    return {"name": type(optimizer).__name__, **values}


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


_SAMPLE_BYTES = 1 << 20  # of a frozen tensor; hashing all of a language model takes seconds
_PAGE_BYTES = 4096


def initial_weights(source: ir.Model, trained: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Return digests of the weights that a run starts from: the trained ones and the frozen ones.

    Frozen tensors above 1 MiB are sampled: pages at equal distances, the first and last included.
    """
    digests = {"trained": hashlib.sha256(), "frozen": hashlib.sha256()}
    for name, array in sorted(trained.items()):
        digests["trained"].update(f"{name} {array.dtype} {array.shape}".encode())
        digests["trained"].update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    for name, x in sorted(source.graph.initializers.items()):
        tensor = x.const_value
        if name in trained or tensor is None or tensor.dtype == ir.DataType.STRING:
            continue
        digests["frozen"].update(f"{name} {tensor.dtype} {tensor.shape}".encode())
        data = np.ascontiguousarray(tensor.numpy()).reshape(-1).view(np.uint8)
        if len(data) > _SAMPLE_BYTES:
            count = _SAMPLE_BYTES // _PAGE_BYTES
            starts = np.linspace(0, len(data) - _PAGE_BYTES, count).astype(np.int64)
            data = np.concatenate([data[i : i + _PAGE_BYTES] for i in starts])
        digests["frozen"].update(data.data)
    return {name: digest.hexdigest() for name, digest in digests.items()}


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


def _initial_state(spec: StateSpec, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the initial value of a state tensor."""
    if spec.parameter == LOSS_SCALE_OWNER:
        return np.full(spec.shape, spec.init, np.float32)
    array = arrays[spec.parameter]
    if spec.slot in ("ema", ANCHOR):
        return np.array(array)
    dtype = array.dtype if spec.dtype == array.dtype.name else spec.dtype
    # np.zeros allocates no pages until they are written, np.full does.
    return np.full(spec.shape, spec.init, dtype) if spec.init else np.zeros(spec.shape, dtype)


def _check_epsilon(optimizer: Optimizer, arrays: Mapping[str, np.ndarray]) -> None:
    """Raise PrepareError if the optimizer would divide 0 by 0: its eps is 0 in half precision."""
    epsilon = getattr(optimizer, "eps", None)
    half = [n for n, a in arrays.items() if a.dtype == np.float16]
    if not half or not isinstance(epsilon, float) or np.float16(epsilon) > 0:
        return
    name = type(optimizer).__name__
    raise PrepareError(
        f"{name}(eps={epsilon:g}) is 0 in float16, the type of {half[0]!r}: a gradient of 0 "
        "becomes NaN\nhint: "
        + by_caller(
            f"optimizer={name}(eps=1e-4); or precision='float32', which trains in float32 and "
            "exports 16 bits",
            f"--optimizer {name.lower()}:eps=1e-4; or --precision float32, which trains in float32 "
            "and exports 16 bits",
        )
    )


def _check_names(
    parameters: Sequence[str], buffers: Sequence[str], state: Sequence[StateSpec]
) -> None:
    """Raise PrepareError if inputs and outputs of the graphs would have the same name."""
    names = [*parameters, *buffers, *(s.name for s in state)]
    counts = collections.Counter([*names, *(f"{n}.out" for n in names)])
    duplicates = sorted(n for n, count in counts.items() if count > 1)
    if duplicates:
        raise PrepareError(
            "initializers have names that optimizer state or new values need: "
            f"{', '.join(duplicates)}\nhint: rename these initializers in the model"
        )


def check_inputs(model: ir.Model) -> None:
    """Raise PrepareError for inputs that are not numeric tensors, naming all of them."""
    unsupported = [x for x in model.graph.inputs if not _is_numeric(x)]
    if unsupported:
        listing = ", ".join(f"{x.name!r} ({_type_name(x)})" for x in unsupported)
        raise PrepareError(
            f"inputs that are not numeric tensors: {listing}\n"
            "hint: cut the model after them, for example with onnx.utils.extract_model, "
            "and train the rest"
        )


def _is_numeric(x: ir.Value) -> bool:
    return isinstance(x.type, ir.TensorType) and x.dtype != ir.DataType.STRING


def _type_name(x: ir.Value) -> str:
    return "string" if x.dtype == ir.DataType.STRING else type(x.type).__name__


_NO_KERNEL = ("NOT_IMPLEMENTED", "Could not find an implementation")
_CHECKED_ROLES = ("eval", "step")


def check_sessions(artifacts: Artifacts, target: Target) -> None:
    """Create a session of the file and of each kind of model, if onnxruntime is installed.

    Raises:
        LoadError: onnxruntime cannot load the file.
        DefectError: onnxruntime loads the file but not a model built from it; the model is saved.
    """
    try:
        runtime.import_onnxruntime()
    except MissingExtraError:
        return
    specs = {m.role: m for m in artifacts.manifest.models if m.steps_per_call == 1}
    if "infer" not in specs or _has_custom_operators(artifacts, specs["infer"]):
        return
    file_error = _session_error(artifacts, specs["infer"], optimize=False)
    if file_error and not _is_missing_kernel(file_error):
        raise _load_error(file_error)
    for spec in (specs[role] for role in _CHECKED_ROLES if role in specs):
        error = _session_error(artifacts, spec, optimize=False)
        if error is not None and _is_missing_kernel(error):  # optimizing may remove the node
            error = _session_error(artifacts, spec)
        # GPU kernels are missing on this CPU: sessions are created without a device.
        if error is None or (_is_missing_kernel(error) and target.gpu):
            continue
        raise _load_error(file_error) if file_error else _defect_error(artifacts, spec, error)


def _has_custom_operators(artifacts: Artifacts, spec: ModelSpec) -> bool:
    """Return whether a model has operators that onnxruntime does not have."""
    model = artifacts.models[spec.role]
    local = {f.domain for f in model.functions}
    domains = {o.domain for o in model.opset_import} | {n.domain for n in model.graph.node}
    return bool(domains - STANDARD_DOMAINS - local)


def _session_error(artifacts: Artifacts, spec: ModelSpec, *, optimize: bool = True) -> str | None:
    """Return why onnxruntime cannot load a model, or ``None`` if it can."""
    options = _session_options(optimize=optimize and artifacts.shared is None)
    try:
        runtime.create(artifacts.source_of(spec), options=options)
    except OnnxTrainError as error:
        return str(error).removeprefix("onnxruntime refuses the model: ")
    return None


def _session_options(*, optimize: bool) -> Any:
    options = runtime.session_options(1)
    if not optimize:
        levels = runtime.import_onnxruntime().GraphOptimizationLevel
        options.graph_optimization_level = levels.ORT_DISABLE_ALL
        # The session never runs: prepacking would only copy the weights.
        options.add_session_config_entry("session.disable_prepacking", "1")
    return options


def _is_missing_kernel(error: str) -> bool:
    return any(text in error for text in _NO_KERNEL)


def _load_error(reason: str) -> LoadError:
    return LoadError(
        f"onnxruntime cannot load this file: {reason}\n"
        "hint: repair the file or export it again; check=False builds without this check"
    )


def _defect_error(artifacts: Artifacts, spec: ModelSpec, reason: str) -> DefectError:
    path = Path(tempfile.mkdtemp(prefix="onnxtrain-report-")) / spec.file
    source = artifacts.source_of(spec)
    assert isinstance(source, bytes)
    path.write_bytes(source)
    return DefectError(
        f"onnxruntime cannot load the {spec.role} model that was built: {reason}\n"
        f"  the model was saved for a report: {path}\n"
        "hint: this is a defect of onnxtrain, please report it with the saved model; "
        "check=False builds without this check"
    )


def merge_targets(first: Artifacts, second: Artifacts) -> Artifacts:
    """Return artifacts with the models of both targets; they share parameters and state.

    A model of ``second`` with the same bytes as the one of ``first`` shares its file. Other files
    get the target as suffix: ``step_model.webgpu.onnx``.
    """
    a, b = first.manifest, second.manifest
    assert (a.parameters, a.buffers, a.state) == (b.parameters, b.buffers, b.state)
    models = dict(first.models)
    specs = list(a.models)
    for spec in b.models:
        if spec.role == "infer":
            continue
        same = next((m for m in a.models if model_key(m) == model_key(spec)), None)
        proto = second.models[model_key(spec)]
        if same is not None and _bytes_of(proto) == _bytes_of(first.models[model_key(same)]):
            specs.append(dataclasses.replace(spec, file=same.file))
            continue
        file = f"{spec.file.removesuffix('.onnx')}.{spec.target}.onnx"
        renamed = dataclasses.replace(spec, file=file)
        models[model_key(renamed)] = proto
        specs.append(renamed)
    manifest = dataclasses.replace(a, models=tuple(specs))
    return dataclasses.replace(first, manifest=manifest, models=models)


def _bytes_of(proto: onnx.ModelProto) -> bytes:
    return proto.SerializeToString(deterministic=True)
