"""The first old API: ``TrainingSession``, in which every run is a training step.

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
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.io import load
from onnxtrain.training import Trainer

_MOMENTS = {"exp_avg": "Moment_1", "exp_avg_sq": "Moment_2"}


@dataclasses.dataclass
class TrainingParameters:
    """What to train, and how; settings of memory and speed of the old engine have no effect."""

    loss_output_name: str = ""
    weights_to_train: Collection[str] = ()
    """All that reach the loss, unless given."""
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
    """Trains a model that computes its loss: each run is a step, with the rate that it is given.

    Args:
        path_or_bytes: the model.
        parameters: what to train.
        sess_options: ``intra_op_num_threads`` of it is taken.
        providers: CUDA among them trains there.
        provider_options: taken for old programs.

    Raises:
        CompatError: for settings that have no equal here, and for a model without such a loss.
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
        _refuse(parameters)
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
        """Return what a run is fed: the model's inputs, then the learning rate."""
        return [*self._inputs, NodeArg(self._rate, "tensor(float)", [1])]

    def get_outputs(self) -> list[NodeArg]:
        """Return what a run can give: the model's outputs."""
        return list(self._outputs)

    def run(
        self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any], options: Any = None
    ) -> list[np.ndarray]:
        """Take one training step; return outputs of the model, as they were before the update."""
        del options
        known = [y.name for y in self._outputs]
        wanted = list(output_names or known)
        strange = [n for n in wanted if n not in known]
        if strange:
            raise OrtError(f"no such output: {', '.join(strange)}\nhint: {', '.join(known)}")
        feeds = {n: as_value(v, "cpu").numpy() for n, v in input_feed.items()}
        missing = [x.name for x in self.get_inputs() if x.name not in feeds]
        if missing:
            raise OrtError(f"inputs are missing: {', '.join(missing)}")
        strange = [n for n in feeds if n not in {x.name for x in self.get_inputs()}]
        if strange:
            raise OrtError(f"no such input: {', '.join(strange)}")
        kinds = {x.name: x.type for x in self._inputs}
        for name, kind in kinds.items():
            given = as_value(feeds[name], "cpu").data_type()
            if given != kind:
                raise OrtError(f"{name!r} is {given}\nhint: the model takes {kind}")
        self._trainer.lr = float(feeds.pop(self._rate).reshape(-1)[0])
        taken = set(self._trainer.inputs)
        with as_ort_errors():
            result = self._trainer.step(**{n: v for n, v in feeds.items() if n in taken})
        outputs = {**result.outputs, self._loss: np.full(self._shape, result.loss, np.float32)}
        return [np.array(outputs[n]) for n in wanted]

    def get_state(self) -> dict[str, np.ndarray]:
        """Return weights and the optimizer's state, copied, by their old names."""
        tensors, places = self._trainer.state_dict(), self._places()
        state = {name: np.array(tensors[at]) for name, at in places.items()}
        count = np.array([self._trainer.global_step + 1])
        moments = [s for s in self._trainer.manifest.state if s.slot in _MOMENTS]
        return {**state, **{f"Update_Count_{s.parameter}": count for s in moments}}

    def load_state(self, state: Mapping[str, Any], strict: bool = False) -> None:
        """Set weights and the optimizer's state, from what :meth:`get_state` gave.

        Raises:
            CompatError: with ``strict``, if a name is missing or not known; if a shape is wrong.
        """
        trainer, places = self._trainer, self._places()
        wrong = sorted(set(self.get_state()) ^ set(state))
        if strict and wrong:
            raise OrtError(f"the state does not fit: {', '.join(wrong[:5])}")
        tensors = trainer.state_dict()
        for name, value in state.items():
            array = as_value(value, "cpu").numpy()
            if name.startswith("Update_Count_"):
                trainer.global_step = int(array.reshape(-1)[0]) - 1
            elif name in places:
                tensors[places[name]] = array
        with as_ort_errors():
            trainer.load_state_dict(tensors)

    def _places(self) -> dict[str, str]:
        """Return for each old name the key in the trainer's state."""
        places = {p.name: p.name for p in self._trainer.manifest.parameters}
        for spec in self._trainer.manifest.state:
            if spec.slot in _MOMENTS:
                label = f"{_MOMENTS[spec.slot]}_{spec.parameter}"
                places[label] = state_key(spec.parameter, spec.slot)
        return places

    def is_output_fp32_node(self, output_name: str) -> bool:
        """Return whether an output is of float32."""
        return any(y.name == output_name and y.type == "tensor(float)" for y in self._outputs)


def _refuse(parameters: TrainingParameters) -> None:
    sizes = ("world_size", "data_parallel_size", "horizontal_parallel_size")
    several = [n for n in (*sizes, "pipeline_parallel_size") if getattr(parameters, n) > 1]
    if several or parameters.deepspeed_zero_stage:
        raise OrtError(
            f"a TrainingSession trains in one process here: {', '.join(several) or 'ZeRO'}\n"
            "hint: onnxtrain.torch.TrainableModule in DistributedDataParallel"
        )
    if parameters.use_mixed_precision:
        raise OrtError(
            "a TrainingSession trains in float32\nhint: onnxtrain.build(precision='fp16-mixed')"
        )
    if not parameters.training_optimizer_name:
        raise OrtError("training_optimizer_name is empty\nhint: SGDOptimizer, say")
    if parameters.set_gradients_as_graph_outputs:
        raise OrtError(
            "a TrainingSession gives no gradients\nhint: onnxtrain.grad or compat.ort.agent do"
        )


def _to_scalar(model: ir.Model, name: str) -> list[int]:
    """Let the loss be a scalar, which training wants; return the shape that it had."""
    graph = model.graph
    at = next((i for i, y in enumerate(graph.outputs) if y.name == name), None)
    if at is None:
        known = ", ".join(y.name or "" for y in graph.outputs)
        raise OrtError(f"no such output: loss_output_name={name!r}\nhint: the model has {known}")
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
    strange = sorted({*parameters.weights_to_train, *parameters.weights_not_to_train} - set(known))
    if strange:
        raise OrtError(f"no such weight: {', '.join(strange)}\nhint: {', '.join(known)}")


def _attributes(parameters: TrainingParameters, name: str) -> dict[str, Any]:
    given = dict(parameters.optimizer_attributes_map.get(name, {}))
    return {**given, **parameters.optimizer_int_attributes_map.get(name, {})}


def _describe(x: ir.Value) -> NodeArg:
    kind = onnx.TensorProto.DataType.Name(int(x.dtype or 1)).lower()
    dims = [d if isinstance(d, int) else str(d) for d in S.dims_of(x) or ()]
    return NodeArg(x.name or "", f"tensor({kind})", list(dims))


__all__ = ["NodeArg", "TrainingParameters", "TrainingSession"]
