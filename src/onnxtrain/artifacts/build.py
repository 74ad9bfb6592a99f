"""From a forward-only model to everything that training needs."""

from __future__ import annotations

import collections
import dataclasses
import fnmatch
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.artifacts.at_opset import LARGE_AND_LOWERED, at_opset
from onnxtrain.artifacts.candidates import candidates, names_list, why_untrained
from onnxtrain.artifacts.directory import Artifacts
from onnxtrain.artifacts.graphs import (
    Backward,
    Finished,
    backward,
    eval_graph,
    optimizer_graph,
    step_graph,
    training_graph,
)
from onnxtrain.artifacts.inference import inference_model
from onnxtrain.artifacts.merge_targets import merge_targets
from onnxtrain.artifacts.multi_step import multi_step_model, steps_wanted
from onnxtrain.artifacts.options import BuildOptions
from onnxtrain.artifacts.packing import packed
from onnxtrain.artifacts.precision import OWNER, Precision, initial
from onnxtrain.artifacts.precision import resolve as resolve_precision
from onnxtrain.artifacts.pretrained_weights import aliases_of
from onnxtrain.artifacts.request import BuildRequest, Names
from onnxtrain.artifacts.session_check import check_inputs, check_sessions
from onnxtrain.artifacts.signature import dtype_name, key_of
from onnxtrain.artifacts.update.in_place import with_in_place
from onnxtrain.artifacts.update.per_example import per_example
from onnxtrain.artifacts.update.vector_models import vector_models
from onnxtrain.autodiff.load_normalized import load_normalized, own_domains
from onnxtrain.autodiff.recompute_blocks import copy_scopes
from onnxtrain.autodiff.selection import batch_statistics
from onnxtrain.errors import PrepareError
from onnxtrain.graph.io import Source, load
from onnxtrain.graph.io.shared_weights import SharedWeights, copy_with_weights, keep_with
from onnxtrain.graph.memory import symbolic_peaks
from onnxtrain.graph.modes import separate_statistics
from onnxtrain.graph.modes.widen import widen
from onnxtrain.graph.prepare import repairs_of, show_weights
from onnxtrain.graph.roles import ADAPTERS
from onnxtrain.graph.shapes.specialise import specialise
from onnxtrain.losses import LossLike, MetricLike
from onnxtrain.losses.terms import looked_at
from onnxtrain.manifest import Manifest, StateSpec, WeightSpec
from onnxtrain.optim import Optimizer
from onnxtrain.optim import resolve as resolve_optimizer
from onnxtrain.optim.clip import Clip
from onnxtrain.optim.privacy import DP
from onnxtrain.optim.transforms import ANCHOR
from onnxtrain.options import from_arguments, recorded
from onnxtrain.targets import BUNDLES, Target, find
from onnxtrain.way_out import with_freeze


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
    asked = from_arguments(BuildRequest, locals())
    first, *rest = BUNDLES.get(target, (target,))
    shared = SharedWeights()
    with with_freeze():
        one = dataclasses.replace(asked, target=first)
        artifacts = _checked(_build_one(model, one, shared), one)
        for name in rest:
            one = dataclasses.replace(asked, target=name)
            if not find(name).prefers("several-steps"):
                one = dataclasses.replace(one, steps_per_call=1)
            artifacts = merge_targets(artifacts, _checked(_build_one(model, one, shared), one))
    return artifacts


def _build_one(model: Source, asked: BuildRequest, shared: SharedWeights) -> Artifacts:
    """Return the artifacts for a single target."""
    target, accumulate, opset = asked.target, asked.accumulate, asked.opset
    _check_options(asked.mode, accumulate, asked.ema, target, asked.randomness)
    exactness = resolve_precision(asked.precision, target)
    source, shown = show_weights(load(model, allow_domains=own_domains()))
    source = specialise(source, asked.dims or {})
    check_inputs(source)
    large = shared.take(source)
    if large and opset is not None:
        raise PrepareError(LARGE_AND_LOWERED)
    apart = separate_statistics(source)
    base = _normal_form(source, asked)
    options = _resolved(asked, base, exactness)
    untrained = why_untrained(base) if asked.train is None else []
    trained = {*options.candidates, *options.buffers}
    widened = widen(base, trained, target=options.target) if exactness.widens else []
    origin = backward(copy_with_weights(base), options)
    if asked.dp is not None:
        _check_private(asked, exactness)
        origin = per_example(origin, asked.dp, options.target)
    arrays = {n: _array(base, n) for n in origin.parameters}
    values = {n: _array(base, n) for n in origin.buffers}
    weights = _weights(source, arrays)
    state = [*_state(options, arrays), *exactness.state()]
    _check_names(origin.parameters, origin.buffers, state)
    slots = {s.name: _initial(s, arrays) for s in state}
    size = sum(a.nbytes for group in (arrays, values, slots) for a in group.values())
    # Where the rest is large, a call costs little beside it, and a second session much.
    frozen = [x.const_value for x in base.graph.initializers.values() if x.name not in trained]
    size += sum(t.nbytes for t in frozen if t is not None)
    count = steps_wanted(asked.steps_per_call, target, accumulate, size)
    graphs = _graphs(base, origin, options, weights, state, accumulate, count)
    infer, infer_spec = inference_model(source)
    models = {key_of(spec): proto for proto, spec in graphs}
    models["infer"] = infer
    if opset is not None:
        models = at_opset(models, opset)
    manifest = Manifest(
        models=(*(with_in_place(spec, models[key_of(spec)]) for _, spec in graphs), infer_spec),
        parameters=weights,
        buffers=tuple(_weight(n, a) for n, a in values.items()),
        state=tuple(state),
        optimizer=_settings(options.optimizer),
        loss={"output": "loss", "name": _loss_name(asked.loss)},
        accumulate=accumulate,
        options={
            **recorded(asked),
            "loss_scale": exactness.settings(),
            "repairs": [*shown, *apart, *repairs_of(base), *untrained, *widened, *origin.repairs],
            **({"above_one": list(origin.above_one)} if origin.above_one else {}),
            **({"dp": dataclasses.asdict(asked.dp)} if asked.dp else {}),
            **_for_other_runtimes(source, graphs, options.target),
        },
    )
    kept = shared if large else None
    return Artifacts(manifest, models, {**arrays, **values}, slots, shared=kept)


def _for_other_runtimes(
    source: ir.Model, graphs: Sequence[Finished], target: Target
) -> dict[str, Any]:
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


def _normal_form(source: ir.Model, asked: BuildRequest) -> ir.Model:
    """Return what the rules can differentiate, with the weights of the source."""
    base = load_normalized(source, asked.target, straight_through=asked.straight_through)
    keep_with(base, source)
    if asked.blocks:
        copy_scopes(source, base)
    return base


def _graphs(
    base: ir.Model,
    origin: Backward,
    options: BuildOptions,
    weights: tuple[WeightSpec, ...],
    state: list[StateSpec],
    accumulate: int,
    steps: int,
) -> list[Finished]:
    """Return all models that training needs; one trains several ``steps`` in a call, if asked."""
    graphs = [
        training_graph(origin, options),
        eval_graph(copy_with_weights(base), options, origin.parameters),
        optimizer_graph(options, weights, state),
        step_graph(origin, options, state),
    ]
    if steps > 1:
        leaner, fewer, packs = packed(origin, options, state)
        lean = step_graph(leaner, options, fewer)
        graphs.append(multi_step_model(lean, steps, graphs[-1][1], packs))
    return [*graphs, *vector_models(origin, options, weights, state, accumulate)]


def _checked(artifacts: Artifacts, asked: BuildRequest) -> Artifacts:
    """Return artifacts that onnxruntime takes, if it is to be asked."""
    if asked.check:
        check_sessions(artifacts, asked.target)
    return artifacts


def _resolved(asked: BuildRequest, base: ir.Model, exactness: Precision) -> BuildOptions:
    """Return what was asked for in terms of the model."""
    return BuildOptions(
        loss=asked.loss,
        optimizer=resolve_optimizer(asked.optimizer),
        metrics=tuple(asked.metrics),
        outputs=_output_names(base, asked.outputs),
        candidates=tuple(
            x.name or ""
            for x in candidates(base, asked.train, asked.freeze, inner=looked_at(asked.loss, base))
        ),
        chosen_by_user=asked.train is not None,
        buffers=_buffer_names(base),
        mode=asked.mode,
        clip=Clip.of(asked.clip),
        ema=asked.ema,
        target=_forms(asked),
        randomness=asked.randomness,
        precision=exactness,
        recompute=asked.blocks,
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


def _check_private(asked: BuildRequest, exactness: Precision) -> None:
    if asked.accumulate > 1:
        raise PrepareError("dp= adds noise to every batch\nhint: leave accumulate at 1")
    if exactness.half is not None or exactness.scaled:
        raise PrepareError("dp= clips in float32\nhint: leave precision at float32")


def _forms(asked: BuildRequest) -> Target:
    """Return the target; at an older opset few operators take sizes that data decide."""
    chosen = find(asked.target)
    if asked.keeps_all:
        chosen = chosen.without("attention-in-parts", "kept-values-again")
    newer = ("attention-operator", "data-dependent-sizes")
    return chosen if asked.opset is None else chosen.without(*newer)


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


def _array(model: ir.Model, name: str) -> np.ndarray:
    tensor = model.graph.initializers[name].const_value
    assert tensor is not None
    return np.array(tensor.numpy())


def _weights(source: ir.Model, arrays: Mapping[str, np.ndarray]) -> tuple[WeightSpec, ...]:
    aliases = aliases_of(source)
    return tuple(
        dataclasses.replace(_weight(n, a), aliases=aliases.get(n, ())) for n, a in arrays.items()
    )


def _weight(name: str, array: np.ndarray) -> WeightSpec:
    return WeightSpec(name, array.dtype.name, tuple(array.shape))


def _state(options: BuildOptions, arrays: Mapping[str, np.ndarray]) -> list[StateSpec]:
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


def _initial(spec: StateSpec, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    if spec.parameter == OWNER:
        return initial(spec)
    array = arrays[spec.parameter]
    if spec.slot in ("ema", ANCHOR):
        return np.array(array)
    kind = array.dtype if spec.dtype == array.dtype.name else spec.dtype
    # Zeros take no memory until somebody writes to them.
    return np.full(spec.shape, spec.init, kind) if spec.init else np.zeros(spec.shape, kind)


def _settings(optimizer: Optimizer) -> dict[str, Any]:
    values = dataclasses.asdict(optimizer)
    values["groups"] = [dataclasses.asdict(g) for g in optimizer.groups]
    if not optimizer.proximal:  # most have none
        del values["proximal"]
    return {"name": type(optimizer).__name__, **values}


__all__ = ["Clip", "build", "candidates"]
