"""``TrainingSession``: the first training API, in which every run is one training step.

>>> parameters = TrainingParameters()
>>> parameters.loss_output_name = "loss"
>>> parameters.training_optimizer_name = "SGDOptimizer"
>>> session = TrainingSession(model, parameters)  # doctest: +SKIP
>>> session.run(None, {"X": x, "label": y, "Learning_Rate": rate})  # doctest: +SKIP

The model computes its own loss. None of this needs torch.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.artifacts.build import build
from onnxtrain.checkpoint import state_key
from onnxtrain.compat.ort.errors import OrtError, OrtTypeError, as_ort_errors
from onnxtrain.compat.ort.optim import ConfigFromAttributes, literal
from onnxtrain.compat.ort.state import as_value
from onnxtrain.errors import expected_one_of
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.io import load
from onnxtrain.training import Trainer

_MOMENTS = {"exp_avg": "Moment_1", "exp_avg_sq": "Moment_2"}


@dataclasses.dataclass
class TrainingParameters:
    """What to train, and how; options for memory and speed are accepted without effect."""

    loss_output_name: str = ""
    weights_to_train: Collection[str] = ()
    """All parameters that affect the loss by default."""
    weights_not_to_train: Collection[str] = ()
    immutable_weights: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    training_optimizer_name: str = ""
    """``SGDOptimizer``, ``AdamOptimizer`` or ``LambOptimizer``."""
    lr_params_feed_name: str = "Learning_Rate"
    optimizer_attributes_map: Mapping[str, Mapping[str, float]] = dataclasses.field(
        default_factory=dict
    )
    optimizer_int_attributes_map: Mapping[str, Mapping[str, int]] = dataclasses.field(
        default_factory=dict
    )
    enable_grad_norm_clip: bool = True
    gradient_accumulation_steps: int = 1
    use_mixed_precision: bool = False
    use_fp16_moments: bool = False
    allreduce_post_accumulation: bool = False
    loss_scale: float = 0.0
    world_rank: int = 0
    world_size: int = 1
    data_parallel_size: int = 1
    horizontal_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    num_pipeline_micro_batches: int = 1
    pipeline_cut_info_string: str = ""
    deepspeed_zero_stage: int = 0
    enable_adasum: bool = False
    set_gradients_as_graph_outputs: bool = False
    use_memory_efficient_gradient: bool = False
    attn_dropout_recompute: bool = False
    gelu_recompute: bool = False
    transformer_layer_recompute: bool = False
    number_recompute_layers: int = 0
    propagate_cast_ops_level: int = 1
    propagate_cast_ops_allow: Sequence[str] = ()
    allow_layer_norm_mod_precision: bool = False
    sliced_schema: Any = None
    sliced_axes: Any = None
    sliced_tensor_names: Any = None
    model_after_graph_transforms_path: str = ""
    model_with_gradient_graph_path: str = ""
    model_with_training_graph_path: str = ""


@dataclasses.dataclass(frozen=True)
class NodeArg:
    """Name, type and shape of an input or an output."""

    name: str
    type: str
    shape: list[int | str | None]


class TrainingSession:
    """Train a model that computes its loss; each run is a step and is fed the learning rate.

    Args:
        path_or_bytes: the model.
        parameters: what to train, and how.
        sess_options: only ``intra_op_num_threads`` has an effect.
        providers: trains on CUDA if it is among them.
        provider_options: accepted for compatibility.

    Raises:
        CompatError: for unsupported options, or a model without this loss.
    """

    def __init__(
        self,
        path_or_bytes: bytes | str | os.PathLike[str],
        parameters: TrainingParameters,
        sess_options: Any = None,
        providers: Sequence[Any] | None = None,
        provider_options: Any = None,
    ) -> None:
        del provider_options
        if not isinstance(path_or_bytes, bytes | str | os.PathLike):
            raise OrtTypeError(f"Unable to load from type '{type(path_or_bytes)}'")
        _check_supported(parameters)
        self._rate = parameters.lr_params_feed_name
        with as_ort_errors():
            model = load(path_or_bytes)
            names = [y.name or "" for y in model.graph.outputs]
            self._loss = parameters.loss_output_name
            self._inputs = [_describe(x) for x in model.graph.inputs]
            self._outputs = [_describe(y) for y in model.graph.outputs]
            self._shape = _to_scalar(model, self._loss)
            _check_weights(model, parameters)
            fixed = {*parameters.weights_not_to_train, *parameters.immutable_weights}
            config = ConfigFromAttributes(
                parameters.training_optimizer_name, lambda name: _attributes(parameters, name)
            )
            named = parameters.weights_to_train or parameters.optimizer_attributes_map
            clip = config.clip if parameters.enable_grad_norm_clip else None
            artifacts = build(
                model,
                loss=self._loss,
                optimizer=config.optimizer_for(sorted(named)),
                train=[literal(n) for n in parameters.weights_to_train] or None,
                freeze=[literal(n) for n in fixed] or None,
                outputs=[n for n in names if n != self._loss],
                mode="as-is",
                clip=clip or None,
                accumulate=parameters.gradient_accumulation_steps,
            )
            threads = None if sess_options is None else sess_options.intra_op_num_threads or None
            kinds = [p if isinstance(p, str) else p[0] for p in providers or ()]
            device = "cuda" if "CUDAExecutionProvider" in kinds else "cpu"
            self._trainer = Trainer(artifacts, device=device, threads=threads)
        self.loss_scale_input_name = None

    def get_inputs(self) -> list[NodeArg]:
        """Return the inputs of a run: the model's inputs, then the learning rate."""
        return [*self._inputs, NodeArg(self._rate, "tensor(float)", [1])]

    def get_outputs(self) -> list[NodeArg]:
        """Return the outputs of the model."""
        return list(self._outputs)

    def run(
        self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any], options: Any = None
    ) -> list[np.ndarray]:
        """Run one training step; return outputs of the model before the update."""
        del options
        known = [y.name for y in self._outputs]
        names_to_fetch = list(output_names or known)
        unknown = [n for n in names_to_fetch if n not in known]
        if unknown:
            expected = expected_one_of(unknown[0], known)
            raise OrtError(f"unknown output: {', '.join(unknown)} {expected}")
        feeds = {n: as_value(v, "cpu").numpy() for n, v in input_feed.items()}
        missing = [x.name for x in self.get_inputs() if x.name not in feeds]
        if missing:
            raise OrtError(f"missing inputs: {', '.join(missing)}")
        inputs = [x.name for x in self.get_inputs()]
        unknown = [n for n in feeds if n not in inputs]
        if unknown:
            expected = expected_one_of(unknown[0], inputs)
            raise OrtError(f"unknown input: {', '.join(unknown)} {expected}")
        kinds = {x.name: x.type for x in self._inputs}
        for name, kind in kinds.items():
            actual = as_value(feeds[name], "cpu").data_type()
            if actual != kind:
                raise OrtError(f"{name!r} is {actual}\nhint: the model expects {kind}")
        self._trainer.lr = float(feeds.pop(self._rate).reshape(-1)[0])
        taken = set(self._trainer.inputs)
        with as_ort_errors():
            result = self._trainer.step(**{n: v for n, v in feeds.items() if n in taken})
        outputs = {**result.outputs, self._loss: np.full(self._shape, result.loss, np.float32)}
        return [np.array(outputs[n]) for n in names_to_fetch]

    def get_state(self) -> dict[str, np.ndarray]:
        """Return copies of weights and optimizer state, under onnxruntime-training's names."""
        tensors, keys = self._trainer.state_dict(), self._state_keys()
        state = {name: np.array(tensors[at]) for name, at in keys.items()}
        count = np.array([self._trainer.global_step + 1])
        moments = [s for s in self._trainer.manifest.state if s.slot in _MOMENTS]
        return {**state, **{f"Update_Count_{s.parameter}": count for s in moments}}

    def load_state(self, state: Mapping[str, Any], strict: bool = False) -> None:
        """Set weights and optimizer state from a dict of :meth:`get_state`.

        Raises:
            CompatError: if a shape is wrong; with ``strict``, if a name is missing or unknown.
        """
        trainer, keys = self._trainer, self._state_keys()
        unmatched = sorted(set(self.get_state()) ^ set(state))
        if strict and unmatched:
            raise OrtError(f"missing or unknown names in the state: {', '.join(unmatched[:5])}")
        tensors = trainer.state_dict()
        for name, value in state.items():
            array = as_value(value, "cpu").numpy()
            if name.startswith("Update_Count_"):
                trainer.global_step = int(array.reshape(-1)[0]) - 1
            elif name in keys:
                tensors[keys[name]] = array
        with as_ort_errors():
            trainer.load_state_dict(tensors)

    def _state_keys(self) -> dict[str, str]:
        """Return onnxruntime-training's name -> key in the trainer's state."""
        keys = {p.name: p.name for p in self._trainer.manifest.parameters}
        for spec in self._trainer.manifest.state:
            if spec.slot in _MOMENTS:
                label = f"{_MOMENTS[spec.slot]}_{spec.parameter}"
                keys[label] = state_key(spec.parameter, spec.slot)
        return keys

    def is_output_fp32_node(self, output_name: str) -> bool:
        """Return whether an output is float32."""
        return any(y.name == output_name and y.type == "tensor(float)" for y in self._outputs)


def _check_supported(parameters: TrainingParameters) -> None:
    sizes = ("world_size", "data_parallel_size", "horizontal_parallel_size")
    parallel = [n for n in (*sizes, "pipeline_parallel_size") if getattr(parameters, n) > 1]
    if parallel or parameters.deepspeed_zero_stage:
        raise OrtError(
            f"TrainingSession supports one process only, got {', '.join(parallel) or 'ZeRO'}\n"
            "hint: use onnxtrain.torch.TrainableModule with DistributedDataParallel"
        )
    if parameters.use_mixed_precision:
        raise OrtError(
            "TrainingSession trains in float32 only\n"
            "hint: use onnxtrain.build(..., precision='fp16-mixed')"
        )
    if not parameters.training_optimizer_name:
        raise OrtError(
            "training_optimizer_name is empty\nhint: set it to 'SGDOptimizer', for example"
        )
    if parameters.set_gradients_as_graph_outputs:
        raise OrtError(
            "TrainingSession does not return gradients\n"
            "hint: use onnxtrain.grad or onnxtrain.compat.ort.agent"
        )


def _to_scalar(model: ir.Model, name: str) -> list[int]:
    """Reshape the loss to a scalar; return its original shape."""
    graph = model.graph
    at = next((i for i, y in enumerate(graph.outputs) if y.name == name), None)
    if at is None:
        expected = expected_one_of(name, [y.name or "" for y in graph.outputs])
        raise OrtError(f"unknown output: loss_output_name={name!r} {expected}")
    loss = graph.outputs[at]
    dims = S.dims_of(loss)
    if dims == ():
        return []
    if dims is None or any(d != 1 for d in dims):
        raise OrtError(f"the loss has more than one element: {S.describe_value(loss)}")
    op = OpBuilder(graph, "loss/")
    total = op.Reshape(loss, op.const(np.zeros(0, np.int64)))
    loss.name = op.names.fresh(f"{name}.inner")
    total.name, total.type, total.shape = name, loss.type, ir.Shape([])
    graph.outputs[at] = total
    return [1] * len(dims)


def _check_weights(model: ir.Model, parameters: TrainingParameters) -> None:
    known = [n for n, x in model.graph.initializers.items() if S.is_float(x)]
    unknown = sorted({*parameters.weights_to_train, *parameters.weights_not_to_train} - set(known))
    if unknown:
        raise OrtError(f"unknown weight: {', '.join(unknown)} {expected_one_of(unknown[0], known)}")


def _attributes(parameters: TrainingParameters, name: str) -> dict[str, Any]:
    given = dict(parameters.optimizer_attributes_map.get(name, {}))
    return {**given, **parameters.optimizer_int_attributes_map.get(name, {})}


def _describe(x: ir.Value) -> NodeArg:
    kind = onnx.TensorProto.DataType.Name(int(x.dtype or 1)).lower()
    dims = [d if isinstance(d, int) else str(d) for d in S.dims_of(x) or ()]
    return NodeArg(x.name or "", f"tensor({kind})", list(dims))


__all__ = ["NodeArg", "TrainingParameters", "TrainingSession"]
