"""``TrainingSession``: the first training API, in which every run is one training step.

>>> parameters = TrainingParameters()
>>> parameters.loss_output_name = "loss"
>>> parameters.training_optimizer_name = "SGDOptimizer"
>>> session = TrainingSession(model, parameters)  # doctest: +SKIP
>>> session.run(None, {"X": x, "label": y, "Learning_Rate": rate})  # doctest: +SKIP

The model computes its own loss. None of this needs torch. :meth:`TrainingSession.io_binding` gives
a binding of onnxruntime whose inputs may be pointers, and whose outputs a training step computes.
"""

from __future__ import annotations

import dataclasses
import functools
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
from onnxtrain.compat.ort.state import as_value, own_value
from onnxtrain.errors import expected_one_of
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.io import load
from onnxtrain.importer.opset import IR_VERSION, OPSET
from onnxtrain.runtime import session as runtime
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
    """Accepted without effect."""
    model_with_gradient_graph_path: str = ""
    """A file for the model that accumulates gradients."""
    model_with_training_graph_path: str = ""
    """A file for the model of a whole step."""


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
            computed = _to_scalar(model, self._loss)
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
                outputs=[n for n in [*names, computed] if n != self._loss],
                mode="as-is",
                clip=clip or None,
                accumulate=parameters.gradient_accumulation_steps,
            )
            threads = None if sess_options is None else sess_options.intra_op_num_threads or None
            kinds = [p if isinstance(p, str) else p[0] for p in providers or ()]
            device = "cuda" if "CUDAExecutionProvider" in kinds else "cpu"
            self._trainer = Trainer(artifacts, device=device, threads=threads)
        self._computed = computed
        _save_graphs(parameters, artifacts.models)
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
        feeds = {n: as_value(v, "cpu").numpy() for n, v in input_feed.items()}
        return self._step(output_names or [y.name for y in self._outputs], feeds)

    def io_binding(self) -> Any:
        """Return an ``IOBinding`` of onnxruntime for :meth:`run_with_iobinding`."""
        binding = runtime.import_onnxruntime().IOBinding(self._copies)
        binding._iobinding = _binding_type()(self._copies, [x.name for x in self.get_inputs()])
        return binding

    def run_with_iobinding(self, iobinding: Any, run_options: Any = None) -> None:
        """Run one training step on the bound inputs, into the bound outputs."""
        del run_options
        binding = getattr(iobinding, "_iobinding", iobinding)
        binding.write(self._step(list(binding.outputs), binding.read()))

    @property
    def _sess(self) -> TrainingSession:
        """This session: programs run the bindings inside ``IOBinding`` on ``session._sess``."""
        return self

    @functools.cached_property
    def _copies(self) -> Any:
        """A session that copies the inputs of a step."""
        graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name="inputs")
        op = OpBuilder(graph)
        for x in self.get_inputs():
            kind = x.type.removeprefix("tensor(").removesuffix(")").upper()
            graph.outputs.append(op.Identity(op.input(x.name, ir.DataType[kind], None)))
        data = ir.to_proto(ir.Model(graph, ir_version=IR_VERSION)).SerializeToString()
        return runtime.create(data, device=self._trainer.device, threads=1)

    def _step(self, names: Sequence[str], feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
        known = [y.name for y in self._outputs]
        unknown = [n for n in names if n not in known]
        if unknown:
            expected = expected_one_of(unknown[0], known)
            raise OrtError(f"unknown output: {', '.join(unknown)} {expected}")
        inputs = [x.name for x in self.get_inputs()]
        missing = [n for n in inputs if n not in feeds]
        if missing:
            raise OrtError(f"missing inputs: {', '.join(missing)}")
        unknown = [n for n in feeds if n not in inputs]
        if unknown:
            expected = expected_one_of(unknown[0], inputs)
            raise OrtError(f"unknown input: {', '.join(unknown)} {expected}")
        for x in self._inputs:
            actual = as_value(feeds[x.name], "cpu").data_type()
            if actual != x.type:
                raise OrtError(f"{x.name!r} is {actual}\nhint: the model expects {x.type}")
        self._trainer.lr = float(feeds.pop(self._rate).reshape(-1)[0])
        taken = set(self._trainer.inputs)
        with as_ort_errors():
            result = self._trainer.step(**{n: v for n, v in feeds.items() if n in taken})
        outputs = {**result.outputs, self._loss: result.outputs[self._computed]}
        return [np.array(outputs[n]) for n in names]

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


def _save_graphs(parameters: TrainingParameters, models: Mapping[str, onnx.ModelProto]) -> None:
    paths = {
        parameters.model_with_gradient_graph_path: models["train"],
        parameters.model_with_training_graph_path: models.get("step", models["optimizer"]),
    }
    for path, model in paths.items():
        if path:
            onnx.save(model, path)


def _to_scalar(model: ir.Model, name: str) -> str:
    """Reshape the loss to a scalar; return a name for what the model computes.

    Old programs declare a loss as ``[]`` that has two dimensions of 1: its declared shape is not
    used.
    """
    graph = model.graph
    at = next((i for i, y in enumerate(graph.outputs) if y.name == name), None)
    if at is None:
        expected = expected_one_of(name, [y.name or "" for y in graph.outputs])
        raise OrtError(f"unknown output: loss_output_name={name!r} {expected}")
    loss = graph.outputs[at]
    if any(d != 1 for d in S.dims_of(loss) or ()):
        raise OrtError(f"the loss has more than one element: {S.describe_value(loss)}")
    op = OpBuilder(graph, "loss/")
    total = op.Reshape(loss, op.const(np.zeros(0, np.int64)))
    loss.name = op.names.fresh(f"{name}.computed")
    loss.shape = None
    total.name, total.type, total.shape = name, loss.type, ir.Shape([])
    graph.outputs[at] = total
    graph.outputs.append(loss)
    return loss.name


@functools.cache
def _binding_type() -> type[Any]:
    native = runtime.import_onnxruntime().capi._pybind_state
    base = native.SessionIOBinding
    host = native.OrtDevice(native.OrtDevice.cpu(), native.OrtDevice.default_memory(), 0)

    class SessionIOBinding(base):
        """Inputs are bound to a session that copies them; outputs are kept here.

        Args:
            copies: the session.
            names: of its inputs.
        """

        def __init__(self, copies: Any, names: list[str]) -> None:
            super().__init__(copies._sess)
            self._copies, self._names = copies, names
            self._results = native.OrtValueVector()
            self._bound: set[str] = set()
            self.outputs: dict[str, Any] = {}
            """What to fetch: a value to overwrite by name, or ``None``."""

        def bind_input(self, name: str, *arguments: Any) -> None:
            super().bind_input(name, *arguments)
            self._bound.add(name)

        def bind_ortvalue_input(self, name: str, value: Any) -> None:
            super().bind_ortvalue_input(name, value)
            self._bound.add(name)

        def clear_binding_inputs(self) -> None:
            super().clear_binding_inputs()
            self._bound.clear()

        def bind_output(self, name: str, device: Any, *buffer: Any) -> None:
            del device
            if buffer:
                raise OrtError(
                    f"the output {name!r} of a training step cannot go to a pointer\n"
                    "hint: use bind_ortvalue_output(name, value)"
                )
            self.outputs[name] = None

        def bind_ortvalue_output(self, name: str, value: Any) -> None:
            self.outputs[name] = value

        def clear_binding_outputs(self) -> None:
            self.outputs.clear()

        def get_outputs(self) -> Any:
            return self._results

        def copy_outputs_to_cpu(self) -> list[np.ndarray]:
            return [np.array(self._results[i].numpy()) for i in range(len(self._results))]

        def read(self) -> dict[str, np.ndarray]:
            """Return the bound inputs."""
            missing = [n for n in self._names if n not in self._bound]
            if missing:
                raise OrtError(
                    f"missing inputs: {', '.join(missing)}\n"
                    "hint: bind them with bind_ortvalue_input(name, value)"
                )
            for y in self._copies.get_outputs():
                super().bind_output(y.name, host)
            self._copies._sess.run_with_iobinding(self, None)
            values = super().get_outputs()
            return {n: np.array(values[i].numpy()) for i, n in enumerate(self._names)}

        def write(self, results: list[np.ndarray]) -> None:
            """Make these the outputs."""
            self._results = native.OrtValueVector()
            for value, array in zip(self.outputs.values(), results, strict=True):
                if value is not None:
                    value.update_inplace(array)
                self._results.push_back(own_value(array)._ortvalue if value is None else value)

    return SessionIOBinding


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
