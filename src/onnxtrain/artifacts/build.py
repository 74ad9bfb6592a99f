"""From a forward-only model to everything that training needs."""

from __future__ import annotations

import collections
import dataclasses
import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.artifacts.at_opset import at_opset
from onnxtrain.artifacts.directory import Artifacts
from onnxtrain.artifacts.graphs import (
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
from onnxtrain.artifacts.signature import dtype_name, key_of
from onnxtrain.artifacts.update.in_place import with_in_place
from onnxtrain.artifacts.update.vector_models import vector_models
from onnxtrain.autodiff.load_normalized import load_normalized
from onnxtrain.autodiff.recompute_blocks import copy_scopes
from onnxtrain.autodiff.selection import batch_statistics, match, trainable
from onnxtrain.errors import PrepareError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.io import Source, load
from onnxtrain.graph.modes import separate_statistics
from onnxtrain.graph.prepare import constant_names, repairs_of
from onnxtrain.graph.shapes.specialise import specialise
from onnxtrain.losses import LossLike, MetricLike
from onnxtrain.manifest import Manifest, StateSpec, WeightSpec
from onnxtrain.optim import Optimizer
from onnxtrain.optim import resolve as resolve_optimizer
from onnxtrain.optim.clip import Clip
from onnxtrain.options import from_arguments, recorded
from onnxtrain.targets import BUNDLES, Target, find

_LARGEST = (1 << 31) - (1 << 24)  # bytes of weights that fit into one protobuf, graph included


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
    straight_through: bool = False,
    randomness: str = "portable",
    steps_per_call: int | None = None,
    opset: int | None = None,
) -> Artifacts:
    """Return training, evaluation, optimizer, step and inference models with their manifest.

    Args:
        model: a path, bytes, ``ModelProto`` or ``ir.Model``; it is not changed.
        loss: a name (``"cross_entropy"``), a loss object, the name of a scalar output, a function
            over the builder, another model, or a list of weighted losses.
        optimizer: a name (``"adamw"``) or an optimizer object.
        train: names or globs of the parameters to train; ``None`` stands for every float
            initializer that reaches the loss, running statistics excluded.
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
        recompute: what to compute again in the backward pass instead of keeping it: ``"auto"``,
            or globs of scopes (``"layers.*"``), nodes, or values that blocks end with.
        target: which spelling to choose: ``cpu``, ``cuda``, ``wasm``, ``webgpu`` or ``portable``;
            ``web`` gives the forms for wasm and WebGPU together.
        dims: sizes to fix, by the name of the symbolic dimension.
        straight_through: train through quantisers as if they did not round: gradients pass inside
            the range of the integers, and nothing outside. Without it such models are refused.
        randomness: ``"portable"`` masks are a function of seed, step and place, the same on every
            runtime; ``"native"`` uses the runtime's own random operators.
        steps_per_call: with more than one, there is also a step model that trains so many batches
            in one call. ``None`` is 8 for small models on wasm, else 1.
        opset: of all models, where a runtime wants an older one; each then goes through
            :func:`onnxtrain.lower` and is compared with what it came from.
    """
    asked = from_arguments(BuildRequest, locals())
    first, *rest = BUNDLES.get(target, (target,))
    artifacts = _build_one(model, dataclasses.replace(asked, target=first))
    for name in rest:
        one = dataclasses.replace(asked, target=name)
        if not find(name).prefers("several-steps"):
            one = dataclasses.replace(one, steps_per_call=1)
        artifacts = merge_targets(artifacts, _build_one(model, one))
    return artifacts


def _build_one(model: Source, asked: BuildRequest) -> Artifacts:
    """Return the artifacts for a single target."""
    target, accumulate, opset = asked.target, asked.accumulate, asked.opset
    _check_options(asked.mode, accumulate, asked.ema, target, asked.randomness)
    exactness = resolve_precision(asked.precision, target)
    source = specialise(load(model), asked.dims or {})
    _check_size(source)
    apart = separate_statistics(source)
    base = load_normalized(source, target, straight_through=asked.straight_through)
    if asked.recompute:
        copy_scopes(source, base)
    options = _resolved(asked, base, exactness)
    origin = backward(base.clone(), options)
    arrays = {n: _array(base, n) for n in origin.parameters}
    values = {n: _array(base, n) for n in origin.buffers}
    aliases = aliases_of(source)
    weights = tuple(
        dataclasses.replace(_weight(n, a), aliases=aliases.get(n, ())) for n, a in arrays.items()
    )
    state = [*_state(options, arrays), *exactness.state()]
    _check_names(origin.parameters, origin.buffers, state)
    specs = [
        training_graph(origin, options),
        eval_graph(base.clone(), options, origin.parameters),
        optimizer_graph(options, weights, state),
        step_graph(origin, options, state),
    ]
    slots = {s.name: _initial(s, arrays) for s in state}
    size = sum(a.nbytes for group in (arrays, values, slots) for a in group.values())
    count = steps_wanted(asked.steps_per_call, target, accumulate, size)
    if count > 1:
        leaner, fewer, packs = packed(origin, options, state)
        lean = step_graph(leaner, options, fewer)
        specs.append(multi_step_model(lean, count, specs[-1][1], packs))
    infer, infer_spec = inference_model(source)
    specs += vector_models(origin, options, weights, state, accumulate)
    models = {key_of(spec): proto for proto, spec in specs}
    models["infer"] = infer
    if opset is not None:
        models = at_opset(models, opset)
    manifest = Manifest(
        models=(*(with_in_place(spec, models[key_of(spec)]) for _, spec in specs), infer_spec),
        parameters=weights,
        buffers=tuple(_weight(n, a) for n, a in values.items()),
        state=tuple(state),
        optimizer=_settings(options.optimizer),
        loss={"output": "loss", "name": _loss_name(asked.loss)},
        accumulate=accumulate,
        options={
            **recorded(asked),
            "loss_scale": exactness.settings(),
            "repairs": [*apart, *repairs_of(base), *origin.repairs],
        },
    )
    return Artifacts(manifest, models, {**arrays, **values}, slots)


def _resolved(asked: BuildRequest, base: ir.Model, exactness: Precision) -> BuildOptions:
    """Return what was asked for in terms of the model."""
    recompute = asked.recompute
    return BuildOptions(
        loss=asked.loss,
        optimizer=resolve_optimizer(asked.optimizer),
        metrics=tuple(asked.metrics),
        outputs=_output_names(base, asked.outputs),
        candidates=tuple(x.name or "" for x in candidates(base, asked.train, asked.freeze)),
        chosen_by_user=asked.train is not None,
        buffers=_buffer_names(base),
        mode=asked.mode,
        clip=Clip.of(asked.clip),
        ema=asked.ema,
        target=_forms(asked.target, asked.opset),
        randomness=asked.randomness,
        precision=exactness,
        recompute=recompute if isinstance(recompute, str) else tuple(recompute),
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


def _forms(target: str, opset: int | None) -> Target:
    """Return the target; at an older opset few operators take sizes that data decide."""
    chosen = find(target)
    return chosen if opset is None else chosen.without("data-dependent-sizes")


def _check_size(model: ir.Model) -> None:
    stored = (x.const_value for x in model.graph.initializers.values())
    size = sum(t.nbytes for t in stored if t is not None)
    if size > _LARGEST:
        raise PrepareError(
            f"weights of {size:,} bytes: artifacts over 2 GiB are not there yet\n"
            "hint: use onnxtrain.vjp, whose parameters are inputs"
        )


def candidates(base: ir.Model, train: Names, freeze: Names) -> list[ir.Value]:
    """Return the initializers that may be trained, in the order of the file."""
    statistics = batch_statistics(base.graph)
    if train is None:
        chosen = trainable(base)
    else:
        hidden = constant_names(base)
        known = {
            n: x for n, x in base.graph.initializers.items() if n not in hidden and S.is_float(x)
        }
        wanted = set(match(_list(train), known, "train", "parameter"))
        chosen = [x for x in known.values() if x in wanted]
    frozen = _list(freeze)
    if frozen:
        known = {x.name or "": x for x in chosen}
        out = set(match(frozen, {**dict(base.graph.initializers), **known}, "freeze", "parameter"))
        chosen = [x for x in chosen if x not in out]
    named = _list(train)
    chosen = [x for x in chosen if x not in statistics or any(n == x.name for n in named)]
    if not chosen:
        raise PrepareError(
            "no parameter is left to train\n"
            "hint: look at `onnxtrain explain`, then at train and freeze"
        )
    return chosen


def _list(names: Names) -> list[str]:
    return [] if names is None else [names] if isinstance(names, str) else list(names)


def _output_names(base: ir.Model, outputs: Names) -> tuple[str, ...]:
    """Return names; patterns stand for outputs, a plain name may be any value of the model."""
    known = [y.name or "" for y in base.graph.outputs]
    names: dict[str, None] = {}
    for name in _list(outputs):
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
    if spec.slot == "ema":
        return np.array(array)
    return np.full(
        spec.shape, spec.init, array.dtype if spec.dtype == array.dtype.name else spec.dtype
    )


def _settings(optimizer: Optimizer) -> dict[str, Any]:
    values = dataclasses.asdict(optimizer)
    values["groups"] = [dataclasses.asdict(g) for g in optimizer.groups]
    return {"name": type(optimizer).__name__, **values}


__all__ = ["Clip", "build", "candidates"]
