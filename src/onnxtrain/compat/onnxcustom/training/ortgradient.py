"""Forward and backward passes of a model, as a function of features and weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.compat.onnxcustom.training.base_estimator import LOGGER
from onnxtrain.compat.onnxcustom.utils.onnx_helper import (
    float_initializers,
    save_onnx_graph,
    weights_as_inputs,
)
from onnxtrain.compat.onnxcustom.utils.onnxruntime_helper import (
    create_session,
    device_to_providers,
    numpy_to_ort_value,
    ort_device_to_string,
    to_numpy,
    vector_of,
)
from onnxtrain.compat.ort.agent import OrtValueCache, PartialGraphExecutionState, TrainingAgent
from onnxtrain.compat.ort.graph_builder import (
    OrtModuleGraphBuilder,
    OrtModuleGraphBuilderConfiguration,
)
from onnxtrain.errors import CompatError, expected_one_of
from onnxtrain.runtime import devices
from onnxtrain.runtime import session as runtime

_PROVIDERS = {"CPUExecutionProvider": "cpu", "CUDAExecutionProvider": "cuda"}


class OrtGradientForwardBackward:
    """Builds the graphs of a model's forward and backward pass.

    Args:
        onnx_model: a model; it is not changed.
        weights_to_train: names of initializers, in their order, which must be alphabetical (see
            ``onnx_rename_weights``); all floats unless given.
        input_names: of the model, unless given.
        output_names: which outputs to look at; all unless given.
        class_name: of the class of functions.
        sess_options: taken for old programs; sessions have the options that training wants.
        providers: CPU or CUDA; also ``"cpu"`` or ``"cuda"``.
        provider_options: as ``sess_options``.
        run_options: as ``sess_options``.
        graph_builder_config: as ``sess_options``.
        device_index: of the GPU.
        enable_logging: log what is built and run under the name ``onnxcustom``.
        debug: as ``sess_options``.
    """

    def __init__(
        self,
        onnx_model: onnx.ModelProto,
        weights_to_train: Sequence[str] | None = None,
        input_names: Sequence[str] | None = None,
        output_names: Sequence[str] | None = None,
        class_name: str | None = None,
        sess_options: Any = None,
        providers: Sequence[str] | str | None = None,
        provider_options: Any = None,
        run_options: Any = None,
        graph_builder_config: Any = None,
        device_index: int = 0,
        enable_logging: bool = False,
        debug: bool = False,
    ) -> None:
        known = float_initializers(onnx_model)
        weights = known if weights_to_train is None else list(weights_to_train)
        if len(set(weights)) != len(weights):
            raise ValueError(f"duplicate name in weights_to_train: {weights}")
        absent = [n for n in weights if n not in known]
        if absent:
            raise ValueError(f"unknown float initializer: {absent} (expected one of {known})")
        if weights != sorted(weights) or weights != [n for n in known if n in weights]:
            raise ValueError(
                f"weights_to_train must be in alphabetical order and in that of the initializers, "
                f"got {weights}; the initializers are {known}\n"
                "hint: rename them with onnx_rename_weights(onnx_model)"
            )
        if isinstance(providers, str):
            providers = device_to_providers(providers)
        for provider in providers or ():
            if provider not in _PROVIDERS:
                expected = expected_one_of(provider, _PROVIDERS)
                raise ValueError(f"unknown provider: {provider!r} {expected}")
        self.onnx_model, self.weights_to_train = onnx_model, weights
        initial = {t.name for t in onnx_model.graph.initializer}
        own = [x.name for x in onnx_model.graph.input if x.name not in initial]
        self.input_names = own if input_names is None else list(input_names)
        outputs = [y.name for y in onnx_model.graph.output]
        self.output_names = outputs if output_names is None else list(output_names)
        self.class_name = class_name or f"OrtGradientForwardBackwardFunction_{id(self)}"
        self.sess_options, self.run_options = sess_options, run_options
        self.providers = list(providers or ["CPUExecutionProvider"])
        self.provider_options, self.graph_builder_config = provider_options, graph_builder_config
        self.device_index = device_index
        self.enable_logging, self.debug = enable_logging, debug
        self._build()

    def _log(self, text: str, *arguments: Any) -> None:
        if self.enable_logging:
            LOGGER.info(f"[OrtGradientForwardBackward] {text}", *arguments)

    def _build(self) -> None:
        self._log("input_names=%r", self.input_names)
        self._log("output_names=%r", self.output_names)
        self._log("weights_to_train=%r", self.weights_to_train)
        self._log("providers=%r", self.providers)
        device = _PROVIDERS[self.providers[0]]
        devices.check(device)
        model = onnx.ModelProto()
        model.CopyFrom(self.onnx_model)
        outputs = {y.name: y for y in self.onnx_model.graph.output}
        del model.graph.output[:]
        model.graph.output.extend(outputs[n] for n in self.output_names)
        forward = weights_as_inputs(model, self.weights_to_train)
        config = OrtModuleGraphBuilderConfiguration()
        config.initializer_names = config.initializer_names_to_train = self.weights_to_train
        config.input_names_require_grad = self.input_names
        builder = OrtModuleGraphBuilder()
        builder.initialize(model, config)
        builder.build()
        gradient, info = builder.get_gradient_model(), builder.get_graph_info()
        session = create_session(onnx.load_from_string(gradient), device)
        names = [*self.input_names, *self.weights_to_train]
        gradient_values = dict(info.user_input_grad_names)
        gradient_values |= dict(
            zip(self.weights_to_train, info.initializer_grad_names_to_train, strict=True)
        )
        wanted = [gradient_values[n] for n in names if n in gradient_values]
        self.cls_type_ = type(
            self.class_name,
            (OrtGradientForwardBackwardFunction,),
            {
                "_device": device,
                "_optimized_pre_grad_model": forward,
                "_trained_onnx": onnx.load_from_string(gradient),
                "_sess": session,
                "_sess_eval": create_session(forward, device),
                "_training_agent": TrainingAgent(session, names, bw_fetches_names=wanted),
                "_cache": OrtValueCache(),
                "_graph_info": info,
                "_graph_builder": builder,
                "_input_names": self.input_names,
                "_output_names": self.output_names,
                "_weights_to_train": self.weights_to_train,
                "_grad_input_names": names,
                "_onx_inp": names,
                "_onx_out": [gradient_values.get(n, f"{n}_grad") for n in names],
                "_bw_fetches_names": wanted,
                "_gradient_names": gradient_values,
                "_log": self._log,
            },
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}(...)"

    def __getstate__(self) -> dict[str, Any]:
        state = {k: v for k, v in vars(self).items() if k != "cls_type_"}
        return {**state, "onnx_model": self.onnx_model.SerializeToString()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.onnx_model = onnx.load_from_string(state["onnx_model"])
        self._build()

    def get_initializer(self, name: str, exc: bool = True) -> np.ndarray | None:
        """Return the value of an initializer; without ``exc``, ``None`` if there is none."""
        for tensor in self.onnx_model.graph.initializer:
            if tensor.name == name:
                return np.array(ir.from_proto(tensor).numpy())
        if exc:
            known = [t.name for t in self.onnx_model.graph.initializer]
            raise RuntimeError(f"unknown initializer: {name!r} (expected one of {known})")
        return None

    def new_instance(self) -> OrtGradientForwardBackwardFunction:
        """Return a new function with its own saved values."""
        return self.cls_type_()

    def save_onnx_graph(
        self, folder: Any, prefix: str | None = None, suffix: str | None = None
    ) -> dict[str, Any]:
        """Write the model, its forward and its gradient graph."""
        files = save_onnx_graph(self, folder, prefix, suffix)
        inner = f"{type(self).__name__}.cls_type_." if prefix is None else f"{prefix}cls_type_."
        files["cls_type_"] = self.new_instance().save_onnx_graph(folder, inner, suffix)
        return files


class OrtGradientForwardBackwardFunction:
    """A function with a gradient; several forward passes may come before their backward passes."""

    _device: ClassVar[str]
    _optimized_pre_grad_model: ClassVar[onnx.ModelProto]
    _trained_onnx: ClassVar[onnx.ModelProto]
    _sess_eval: ClassVar[Any]
    _training_agent: ClassVar[TrainingAgent]
    _cache: ClassVar[OrtValueCache]
    _grad_input_names: ClassVar[list[str]]
    _bw_fetches_names: ClassVar[list[str]]
    _output_names: ClassVar[list[str]]
    _gradient_names: ClassVar[dict[str, str]]
    _log: ClassVar[Callable[..., None]]

    def __init__(self) -> None:
        self.states_: list[PartialGraphExecutionState] = []
        self.saved_tensors_: tuple[Any, ...] | None = None

    @property
    def input_names(self) -> list[str]:
        """Names of features and weights."""
        return self._grad_input_names

    @property
    def output_names(self) -> list[str]:
        """Names of the gradients."""
        return self._bw_fetches_names

    @staticmethod
    def input_to_ort(tensors: Iterable[Any], devices: Any = None, debug: bool = False) -> Any:
        """Return an ``OrtValueVector``."""
        del devices, debug
        return vector_of(numpy_to_ort_value(array) for array in _arrays(tensors))

    @staticmethod
    def device_name(device: Any) -> str:
        """Return ``"Cpu"`` or ``"Gpu"``."""
        return "Cpu" if ort_device_to_string(device) == "cpu" else "Gpu"

    def save_for_backward(self, inputs: Iterable[Any]) -> None:
        """Save values for the backward pass."""
        self.saved_tensors_ = tuple(inputs)

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        """The values saved last."""
        if self.saved_tensors_ is None:
            raise RuntimeError("nothing was saved\nhint: call forward with training=True first")
        return self.saved_tensors_

    def forward(
        self, inputs: Iterable[Any], training: bool = False, forward_outputs_cache: Any = None
    ) -> Any:
        """Return the outputs for features and weights, as ``OrtValueVector``.

        Args:
            inputs: features, then weights: arrays or values of onnxruntime.
            training: whether a backward pass will follow.
            forward_outputs_cache: a vector from an earlier pass with the same shapes, to overwrite.
        """
        arrays = _arrays(inputs)
        names = self._grad_input_names
        if len(arrays) != len(names):
            raise CompatError(f"{len(arrays)} inputs given, the function takes {', '.join(names)}")
        self._log("forward with shapes %r", [a.shape for a in arrays])
        if training:
            state = PartialGraphExecutionState()
            cached = forward_outputs_cache is not None
            outputs = forward_outputs_cache if cached else vector_of(())
            self._training_agent.run_forward(arrays, outputs, state, self._cache)
            self.save_for_backward(arrays)
            self.states_.append(state)
            return outputs
        feeds = dict(zip(names, arrays, strict=True))
        outputs = runtime.run(self._sess_eval, self._output_names, feeds)
        return vector_of(numpy_to_ort_value(a) for a in outputs)

    def backward(self, grad_outputs: Iterable[Any], backward_outputs_cache: Any = None) -> Any:
        """Return the gradient of every input and weight, from the gradients of the outputs.

        The last forward pass that had no backward pass yet is taken. The result is an
        ``OrtValueVector``; a list if an input is not a float, which has a gradient of ``None``.
        """
        if not self.states_:
            raise RuntimeError("no forward pass is left\nhint: call forward with training=True")
        given = _arrays(grad_outputs)
        self._log("backward with shapes %r", [a.shape for a in given])
        cached = backward_outputs_cache is not None
        gradients = backward_outputs_cache if cached else vector_of(())
        self._training_agent.run_backward(given, gradients, self.states_.pop())
        if len(self._bw_fetches_names) == len(self._grad_input_names):
            return gradients
        by_name = {n: gradients[i] for i, n in enumerate(self._bw_fetches_names)}
        return [by_name.get(self._gradient_names.get(n, "")) for n in self._grad_input_names]

    def save_onnx_graph(
        self, folder: Any, prefix: str | None = None, suffix: str | None = None
    ) -> dict[str, Any]:
        """Write the forward and the gradient graph."""
        holder = _Graphs()
        holder.optimized_pre_grad_model = self._optimized_pre_grad_model
        holder.trained_onnx = self._trained_onnx
        return save_onnx_graph(holder, folder, prefix or "", suffix)


class _Graphs:
    optimized_pre_grad_model: onnx.ModelProto
    trained_onnx: onnx.ModelProto


def _arrays(values: Iterable[Any]) -> list[np.ndarray]:
    if hasattr(values, "__getitem__") and hasattr(values, "__len__"):
        items: Any = values  # onnxruntime's vectors support indexing, but not iteration
        return [to_numpy(items[i]) for i in range(len(items))]
    return [to_numpy(v) for v in values]
