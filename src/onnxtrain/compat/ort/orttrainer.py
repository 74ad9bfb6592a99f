"""``ORTTrainer``: train a torch module or an ONNX model, with the arguments of both old versions.

The file has the model descriptions (names, shapes, which output is the loss), ``ORTTrainerOptions``
(nested options, validated on construction), ``Settings`` (the arguments of either version) and the
trainer itself.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from torch import nn

from onnxtrain.artifacts.build import build
from onnxtrain.checkpoint import save_checkpoint as write_checkpoint
from onnxtrain.checkpoint import state_key
from onnxtrain.compat.ort.amp import LossScaler
from onnxtrain.compat.ort.optim import ConfigFromAttributes, LRSchedulerBase, TrainStepInfo
from onnxtrain.errors import CompatError, expected_one_of
from onnxtrain.graph.io import load
from onnxtrain.runtime.feeds import to_array
from onnxtrain.torch import from_torch, last_report
from onnxtrain.torch.export import rename_initializers
from onnxtrain.torch.exporters import ExportError
from onnxtrain.training import Trainer

logger = logging.getLogger(__name__)
Shape = Sequence[int | str]


class IODescription:
    """Name and shape of an input or output; a shape has integers and names of symbolic sizes."""

    def __init__(
        self, name: str, shape: Shape, dtype: Any = None, num_classes: int | None = None
    ) -> None:
        self.name_ = name
        self.shape_ = shape
        self.dtype_ = dtype
        self.num_classes_ = num_classes


class ModelDescription:
    """The inputs of a model, including labels, and its outputs, with the loss first."""

    def __init__(self, inputs: Sequence[IODescription], outputs: Sequence[IODescription]) -> None:
        self.inputs_ = list(inputs)
        self.outputs_ = list(outputs)


@dataclasses.dataclass(frozen=True)
class Signature:
    """The model description of either version."""

    inputs: tuple[tuple[str, tuple[int | str, ...]], ...]
    outputs: tuple[str, ...]
    loss: str

    @classmethod
    def of(cls, description: ModelDescription | Mapping[str, Any]) -> Signature:
        """Read a description.

        Raises:
            ValueError: if it is not one, or has not exactly one loss.
        """
        if isinstance(description, ModelDescription):
            inputs = tuple((i.name_, tuple(i.shape_)) for i in description.inputs_)
            outputs = tuple(o.name_ for o in description.outputs_)
            if not outputs:
                raise ValueError("the description has no output")
            return cls(inputs, outputs, outputs[0])
        if set(description) != {"inputs", "outputs"}:
            raise ValueError("a description must have exactly the keys 'inputs' and 'outputs'")
        inputs = tuple((i[0], _shape(i[1])) for i in description["inputs"])
        outputs = tuple(o[0] for o in description["outputs"])
        marked = [o[0] for o in description["outputs"] if len(o) > 2 and o[2]]
        if len(marked) != 1:
            raise ValueError(f"exactly one output must be marked as the loss, got {len(marked)}")
        return cls(inputs, outputs, marked[0])

    @property
    def axes(self) -> list[dict[int, str]]:
        """The symbolic axes of the inputs."""
        return [{i: d for i, d in enumerate(s) if isinstance(d, str)} for _, s in self.inputs]


def _shape(shape: Any) -> tuple[int | str, ...]:
    if not isinstance(shape, list | tuple) or not all(isinstance(d, int | str) for d in shape):
        raise ValueError(f"a shape must be a list of integers and names, got {shape!r}")
    return tuple(shape)


_DEFAULTS: dict[str, Any] = {
    "batch": {"gradient_accumulation_steps": 1},
    "device": {"id": "cpu", "mem_limit": 0},
    "distributed": {
        "world_rank": 0,
        "world_size": 1,
        "local_rank": 0,
        "data_parallel_size": 1,
        "horizontal_parallel_size": 1,
        "pipeline_parallel": {},
        "allreduce_post_accumulation": False,
        "deepspeed_zero_optimization": {"stage": 0},
        "enable_adasum": False,
    },
    "lr_scheduler": None,
    "mixed_precision": {"enabled": False, "loss_scaler": None},
    "graph_transformer": {
        "attn_dropout_recompute": False,
        "gelu_recompute": False,
        "transformer_layer_recompute": False,
        "number_recompute_layers": 0,
        "propagate_cast_ops_config": {},
        "allow_layer_norm_mod_precision": False,
    },
    "utils": {
        "frozen_weights": [],
        "grad_norm_clip": True,
        "invertible_layer_norm_gradient": False,
        "run_symbolic_shape_infer": False,
    },
    "debug": {"deterministic_compute": False, "check_model_export": False, "graph_save_paths": {}},
    "_internal_use": {
        "enable_internal_postprocess": True,
        "extra_postprocess": None,
        "onnx_opset_version": 12,
        "enable_onnx_contrib_ops": True,
    },
    "provider_options": {},
    "session_options": None,
}
_FREE = ("pipeline_parallel", "propagate_cast_ops_config", "graph_save_paths", "provider_options")


class ORTTrainerOptions:
    """Nested options, read as ``options.batch.gradient_accumulation_steps``.

    Raises:
        ValueError: for an unknown option or an invalid value.
    """

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self._given = dict(options or {})
        merged = _merge(_DEFAULTS, self._given, "")
        _check(merged)
        self._values = merged
        for key, value in merged.items():
            setattr(self, key, _Group(value) if isinstance(value, dict) else value)

    def __repr__(self) -> str:
        return repr(self._values)


class _Group:
    def __init__(self, values: Mapping[str, Any]) -> None:
        for key, value in values.items():
            setattr(self, key, _Group(value) if isinstance(value, dict) else value)


def _merge(defaults: Mapping[str, Any], requested: Mapping[str, Any], path: str) -> dict[str, Any]:
    unknown = sorted(set(requested) - set(defaults))
    if unknown:
        raise ValueError(
            f"Invalid options: unknown option: {path}{unknown[0]} "
            f"{expected_one_of(unknown[0], defaults)}"
        )
    merged = {}
    for key, default in defaults.items():
        value = requested.get(key, default)
        if isinstance(default, dict) and key not in _FREE:
            if not isinstance(value, Mapping):
                raise ValueError(f"Invalid options: {path}{key} must be a dict")
            merged[key] = (
                _merge(default, value, f"{path}{key}.") if key in requested else dict(default)
            )
        else:
            merged[key] = value if value is not default else copy.copy(default)
    return merged


def _check(values: Mapping[str, Any]) -> None:
    steps = values["batch"]["gradient_accumulation_steps"]
    scaler, schedule = values["mixed_precision"]["loss_scaler"], values["lr_scheduler"]
    wrong = None
    if not isinstance(steps, int) or steps < 1:
        wrong = f"batch.gradient_accumulation_steps must be a number from 1, got {steps!r}"
    elif scaler is not None and not isinstance(scaler, LossScaler):
        wrong = "mixed_precision.loss_scaler must be a LossScaler"
    elif schedule is not None and not isinstance(schedule, LRSchedulerBase):
        wrong = "lr_scheduler must be one of optim.lr_scheduler"
    if wrong:
        raise ValueError(f"Invalid options: {wrong}")


Loss = Callable[..., Any] | None


@dataclasses.dataclass
class Settings:
    """The options of a training run, from the arguments of either version."""

    signature: Signature
    config: Any
    device: str
    accumulate: int = 1
    clip: bool = True
    frozen: Sequence[str] = ()
    schedule: Any = None
    mixed: bool = False
    scaler: LossScaler | None = None
    rate_input: bool = False
    """The learning rate is the last argument of ``train_step``."""
    get_lr: Callable[[int], float] | None = None


def settings_from_options(
    model_desc: Mapping[str, Any],
    optim_config: Any = None,
    loss_fn: Loss = None,
    options: ORTTrainerOptions | None = None,
) -> tuple[Loss, Settings]:
    """Read ``(model_desc, optim_config, loss_fn, options)``."""
    o: Any = options if options is not None else ORTTrainerOptions()
    if o.distributed.world_size != 1:
        raise CompatError(
            "ORTTrainer supports one process only\n"
            "hint: use onnxtrain.torch.TrainableModule with DistributedDataParallel"
        )
    return loss_fn, Settings(
        Signature.of(model_desc),
        optim_config,
        _device(o.device.id),
        accumulate=o.batch.gradient_accumulation_steps,
        clip=o.utils.grad_norm_clip,
        frozen=o.utils.frozen_weights,
        schedule=o.lr_scheduler,
        mixed=o.mixed_precision.enabled,
        scaler=o.mixed_precision.loss_scaler,
    )


def settings_from_keywords(
    loss_fn: Loss,
    model_desc: ModelDescription,
    training_optimizer_name: str,
    map_optimizer_attributes: Callable[[str], Mapping[str, Any]] | None = None,
    learning_rate_description: IODescription | None = None,
    device: Any = "cpu",
    gradient_accumulation_steps: int = 1,
    world_rank: int = 0,
    world_size: int = 1,
    use_mixed_precision: bool = False,
    allreduce_post_accumulation: bool = False,
    global_step: int = 0,
    get_lr_this_step: Callable[[int], float] | None = None,
    loss_scaler: LossScaler | None = None,
    deepspeed_zero_stage: int = 0,
    enable_grad_norm_clip: bool = True,
    frozen_weights: Sequence[str] = (),
    **without_effect: Any,
) -> tuple[Loss, Settings]:
    """Read the arguments of the older version; options for memory and speed have no effect."""
    if world_size != 1:
        raise CompatError(
            "ORTTrainer supports one process only\n"
            "hint: use onnxtrain.torch.TrainableModule with DistributedDataParallel"
        )
    return loss_fn, Settings(
        Signature.of(model_desc),
        ConfigFromAttributes(training_optimizer_name, map_optimizer_attributes),
        _device(device),
        accumulate=gradient_accumulation_steps,
        clip=enable_grad_norm_clip,
        frozen=frozen_weights,
        mixed=use_mixed_precision,
        scaler=loss_scaler,
        rate_input=get_lr_this_step is None,
        get_lr=get_lr_this_step,
    )


def _device(device: Any) -> str:
    return str(device).split(":")[0]


class _WithLoss(nn.Module):
    """A module with its loss function: the last input is the label, the first output the loss."""

    def __init__(self, model: nn.Module, loss_fn: Callable[..., torch.Tensor] | None) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn

    def forward(self, *inputs: torch.Tensor) -> Any:
        if self.loss_fn is None:
            return self.model(*inputs)
        output = self.model(*inputs[:-1])
        first = output[0] if isinstance(output, list | tuple) else output
        rest = tuple(output) if isinstance(output, list | tuple) else (output,)
        return (self.loss_fn(first, inputs[-1]), *rest)


class ORTTrainer:
    """Train a model, one step per call.

    Either ``ORTTrainer(model, loss_fn, model_desc, "AdamOptimizer", map_optimizer_attributes,
    learning_rate_description, device, ...)`` or ``ORTTrainer(model, model_desc, optim_config,
    loss_fn=None, options=None)``. The first step exports the model. Named sizes of the description
    are symbolic; a module that cannot be exported so is exported again for each new size, and its
    state moves along. It computes in float32, even with mixed precision enabled. For parallel
    training, use torch.distributed with :class:`onnxtrain.torch.TrainableModule`.
    """

    def __init__(self, model: nn.Module | onnx.ModelProto, *args: Any, **kwargs: Any) -> None:
        new_api = "optim_config" in kwargs or (args and isinstance(args[0], Mapping))
        self._model = model
        self._loss_fn, self._settings = (
            settings_from_options(*args, **kwargs)
            if new_api
            else settings_from_keywords(*args, **kwargs)
        )
        self._trainer: Trainer | None = None
        self._others: list[Trainer] = []
        """Exports for other sizes; :attr:`_trainer` has the current state."""
        self._axes = self._settings.signature.axes
        self._names: dict[str, str] = {}
        self._pending: dict[str, Any] = {}
        self._strict = False
        self.is_train = True
        self._train_step_info = TrainStepInfo(self._settings.config)
        if self._settings.mixed:
            warnings.warn(
                "mixed precision has no effect: ORTTrainer computes in float32", stacklevel=2
            )

    def train(self) -> None:
        """Set training mode."""
        self.is_train = True

    def eval(self) -> None:
        """Set evaluation mode."""
        self.is_train = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Train or evaluate on one batch, depending on the mode."""
        return (self.train_step if self.is_train else self.eval_step)(*args, **kwargs)

    def train_step(self, *args: Any, fetches: Sequence[str] | None = None, **kwargs: Any) -> Any:
        """Train on one batch; return the outputs in the order of the description."""
        s, info = self._settings, self._train_step_info
        values, rest = self._batch(args, kwargs)
        trainer = self._exported_trainer(values)
        info.step += 1
        trainer.lr = self._rate(rest, kwargs)
        outputs = trainer.compute(self._feeds(values))
        norm = outputs.get("grad_norm")
        info.all_finite = norm is None or bool(np.isfinite(norm).all())
        if info.all_finite or not s.mixed:
            result = trainer.commit(outputs)
            info.optimization_step += int(result.updated)
        if s.mixed and s.scaler is not None:
            s.scaler.update(info)
        results = self._fetch(outputs, fetches)
        if s.mixed and s.scaler is None:
            results = [*results, torch.tensor([info.all_finite])]
        return results[0] if len(results) == 1 else results

    def eval_step(self, *args: Any, fetches: Sequence[str] | None = None, **kwargs: Any) -> Any:
        """Evaluate one batch; return the outputs in the order of the description."""
        values, _ = self._batch(args, kwargs)
        trainer = self._exported_trainer(values)
        result = trainer.evaluate_batch(**self._feeds(values))
        outputs = {"loss": np.float32(result.loss), **result.outputs}
        results = self._fetch(outputs, fetches)
        return results[0] if len(results) == 1 else results

    def _batch(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
        names = [n for n, _ in self._settings.signature.inputs]
        values = dict(zip(names, args, strict=False))
        values |= {n: v for n, v in kwargs.items() if n in names}
        missing = [n for n in names if n not in values]
        if missing:
            raise CompatError(f"missing inputs: {', '.join(missing)}")
        return [values[n] for n in names], list(args[len(names) :])

    def _feeds(self, values: Sequence[Any]) -> dict[str, np.ndarray]:
        assert self._trainer is not None
        names = [n for n, _ in self._settings.signature.inputs]
        known = set(self._trainer.inputs)
        return {n: to_array(v) for n, v in zip(names, values, strict=True) if n in known}

    def _rate(self, rest: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
        s, info = self._settings, self._train_step_info
        if s.get_lr is not None:
            return float(s.get_lr(info.optimization_step))
        if s.rate_input:
            requested = rest[0] if rest else kwargs.get("learning_rate", kwargs.get("lr"))
            if requested is None:
                raise CompatError(
                    "the learning rate is missing\nhint: pass it as the last argument of train_step"
                )
            return float(np.asarray(to_array(requested)).reshape(-1)[0])
        if s.schedule is not None:
            s.schedule._step(info)
            return float(s.schedule.get_last_lr()[0])
        return float(s.config.lr)

    def _fetch(
        self, outputs: Mapping[str, Any], fetches: Sequence[str] | None
    ) -> list[torch.Tensor]:
        signature = self._settings.signature
        results = []
        for name in fetches or signature.outputs:
            at = "loss" if name == signature.loss else name
            if at not in outputs:
                raise CompatError(
                    f"unknown output: {name!r} {expected_one_of(name, signature.outputs)}"
                )
            results.append(torch.from_numpy(np.array(outputs[at])).to(self._settings.device))
        return results

    def _exported_trainer(self, values: Sequence[Any]) -> Trainer:
        """Return the trainer for these sizes, with the current state; export if needed."""
        current = self._trainer
        if current is None:
            self._trainer = self._built(values)
            if self._pending:
                self.load_state_dict(self._pending, strict=self._strict)
            return self._trainer
        if not isinstance(self._model, nn.Module) or _fits(current, self._feeds(values)):
            return current
        if current.accumulating:
            raise CompatError(
                f"this batch has other sizes than the ones accumulated before: {_sizes(values)}\n"
                "hint: leave out the last batch if it is shorter, or use "
                "gradient_accumulation_steps=1"
            )
        trainer = next((t for t in self._others if _fits(t, self._feeds(values))), None)
        if trainer is None:
            logger.info("exporting the model again, for inputs of the sizes %s", _sizes(values))
            trainer = self._built(values)
        else:
            self._others.remove(trainer)
        trainer.load_state_dict(current.state_dict())
        trainer.global_step = current.global_step
        self._others.append(current)
        self._trainer = trainer
        return trainer

    def _built(self, values: Sequence[Any]) -> Trainer:
        """Return a trainer of the model, exported with these inputs."""
        s = self._settings
        model = self._exported(values)
        others = [n for n in s.signature.outputs if n != s.signature.loss]
        artifacts = build(
            model,
            loss=s.signature.loss,
            optimizer=s.config.optimizer_for(list(model.graph.initializers)),
            freeze=[self._names.get(n, n) for n in s.frozen] or None,
            outputs=others,
            mode="as-is",
            metrics=["grad_norm"] if s.mixed else (),
            clip=s.config.clip if s.clip and s.config.clip else None,
            accumulate=s.accumulate,
        )
        return Trainer(artifacts, device=s.device)

    def _exported(self, values: Sequence[Any]) -> ir.Model:
        signature = self._settings.signature
        if not isinstance(self._model, nn.Module):
            return load(self._model)
        names = [n for n, _ in signature.inputs]
        # The module may be on the CPU while the batches are on a GPU.
        device = next((p.device for p in self._model.parameters()), None)
        tensors = tuple(torch.as_tensor(v, device=device) for v in values)
        module = _WithLoss(self._model, self._loss_fn)
        try:
            model = from_torch(module, tensors, names=names, dynamic_shapes=self._axes)
        except ExportError as error:
            if not any(self._axes):
                raise
            logger.info("exporting the model with fixed sizes: %s", error)
            self._axes = [{} for _ in names]
            model = from_torch(module, tensors, names=names, dynamic_shapes=self._axes)
        for name, at in last_report(model).names.items():
            self._names.setdefault(name.removeprefix("model."), at.removeprefix("model."))
        _rename(model, signature)
        return model

    def state_dict(self, pytorch_format: bool = False) -> dict[str, torch.Tensor]:
        """Return the weights under their names in the module."""
        if self._trainer is None:
            if self._pending:
                return dict(self._pending)
            return dict(self._model.state_dict()) if isinstance(self._model, nn.Module) else {}
        known = {**_frozen(self._trainer), **_weights(self._trainer)}
        names = self._names or {n: n for n in known}
        weights = {n: torch.from_numpy(known[at]) for n, at in names.items() if at in known}
        weights |= {
            n: torch.from_numpy(v) for n, v in known.items() if n not in self._names.values()
        }
        return weights

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = False) -> None:
        """Set the weights; before the first step, they are set after the export."""
        if self._trainer is None:
            # Clone: the tensors of a torch state_dict share memory with the module.
            self._pending = {n: torch.as_tensor(v).clone() for n, v in state_dict.items()}
            self._strict = strict
            return
        known = set(_weights(self._trainer))
        arrays = {self._names.get(n, n): v for n, v in state_dict.items()}
        missing = sorted(known - set(arrays))
        if strict and missing:
            raise CompatError(f"missing parameters in state_dict: {', '.join(missing[:5])}")
        self._trainer.load_weights({n: v for n, v in arrays.items() if n in known}, strict=False)
        self._pending = {}

    def save_as_onnx(self, path: str | os.PathLike[str]) -> None:
        """Write the model with the current weights and its loss, in evaluation mode."""
        self._require_trainer("save_as_onnx").export(path)

    def save_checkpoint(
        self,
        path: str | os.PathLike[str],
        user_dict: Mapping[str, Any] | None = None,
        include_optimizer_states: bool = True,
    ) -> None:
        """Write weights, progress and by default the optimizer state to a safetensors file."""
        trainer = self._require_trainer("save_checkpoint")
        info = {"step": self._train_step_info.step, "user_dict": dict(user_dict or {})}
        if include_optimizer_states:
            trainer.save(path, {"orttrainer": info})
            return
        tensors = trainer.state_dict()
        for spec in trainer.manifest.state:
            tensors[state_key(spec.parameter, spec.slot)] = trainer.artifacts.state[spec.name]
        write_checkpoint(path, tensors, {**trainer.progress(), "step": 0, "orttrainer": info})

    def load_checkpoint(
        self, *paths: str | os.PathLike[str], strict: bool = True
    ) -> dict[str, Any]:
        """Resume from a checkpoint; return the ``user_dict`` saved with it."""
        if len(paths) != 1:
            raise CompatError("load_checkpoint reads one file\nhint: pass one path")
        trainer = self._require_trainer("load_checkpoint")
        meta = trainer.load(paths[0])
        saved = meta.get("orttrainer", {})
        self._train_step_info.step = int(saved.get("step", trainer.global_step))
        self._train_step_info.optimization_step = trainer.global_step
        return dict(saved.get("user_dict", {}))

    def _require_trainer(self, what: str) -> Trainer:
        if self._trainer is None:
            raise CompatError(
                f"{what} needs the exported model\nhint: call train_step or eval_step first"
            )
        return self._trainer


def _fits(trainer: Trainer, feeds: Mapping[str, np.ndarray]) -> bool:
    """Return whether arrays have the fixed and symbolic sizes of a trainer's inputs."""
    sizes: dict[str, int] = {}
    for spec in trainer.batch_specs:
        actual = feeds[spec.name].shape
        if len(actual) != len(spec.shape):
            return True  # the trainer reports it
        for size, dim in zip(actual, spec.shape, strict=True):
            if size != (dim if isinstance(dim, int) else sizes.setdefault(dim, size)):
                return False
    return True


def _sizes(values: Sequence[Any]) -> list[list[int]]:
    return [list(np.shape(v)) for v in values]


def _weights(trainer: Trainer) -> dict[str, np.ndarray]:
    specs = (*trainer.manifest.parameters, *trainer.manifest.buffers)
    state = trainer.state_dict()
    return {w.name: state[w.name] for w in specs}


def _frozen(trainer: Trainer) -> dict[str, np.ndarray]:
    """Return the float initializers that are not trained."""
    model = load(trainer.artifacts.models["infer"])
    return {
        n: np.array(x.const_value.numpy())
        for n, x in model.graph.initializers.items()
        if x.const_value is not None
    }


def _rename(model: ir.Model, signature: Signature) -> None:
    graph = model.graph
    if len(graph.outputs) < len(signature.outputs):
        raise CompatError(
            f"the description has {len(signature.outputs)} outputs, the model {len(graph.outputs)}"
        )
    rename_initializers(model, lambda name: name.removeprefix("model."))
    new_names = dict(zip(graph.outputs, signature.outputs, strict=False))
    for node in graph.all_nodes():
        for y in node.outputs:
            if y.name in new_names.values() and y not in new_names:
                y.name = f"{y.name}.inner"
    for y, name in new_names.items():
        y.name = name


def save_checkpoint(
    model: ORTTrainer,
    checkpoint_dir: str | os.PathLike[str],
    checkpoint_prefix: str = "ORT_checkpoint",
    checkpoint_state_dict: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint of a trainer into a directory."""
    os.makedirs(checkpoint_dir, exist_ok=True)
    path = os.path.join(checkpoint_dir, f"{checkpoint_prefix}.safetensors")
    model.save_checkpoint(path, checkpoint_state_dict)


def load_checkpoint(
    model: ORTTrainer,
    checkpoint_dir: str | os.PathLike[str],
    checkpoint_prefix: str = "ORT_checkpoint",
    strict: bool = False,
) -> dict[str, Any]:
    """Let a trainer continue from a checkpoint in a directory; return what was saved beside it."""
    path = os.path.join(checkpoint_dir, f"{checkpoint_prefix}.safetensors")
    return model.load_checkpoint(path, strict=strict)
