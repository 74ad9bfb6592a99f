"""``GradientGraphBuilder`` and ``OrtModuleGraphBuilder``: build gradient models.

The first writes one model of outputs and gradients. The second splits forward and backward pass,
for a ``TrainingAgent``.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import onnx
import onnx_ir as ir

from onnxtrain.autodiff.gradients import grad, lift, vjp
from onnxtrain.autodiff.split import Split, split
from onnxtrain.compat.ort.errors import OrtError, as_ort_errors
from onnxtrain.errors import expected_one_of
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.io import load, save
from onnxtrain.graph.io.writer import finalize
from onnxtrain.graph.simplify import simplify

_KEY = "onnxtrain.agent"
_CONTRIB = "com.microsoft"


@dataclasses.dataclass
class TrainingGraphTransformerConfiguration:
    """Options of onnxruntime-training's graph transformers; they have no effect."""

    enable_gelu_approximation: bool = False
    attn_dropout_recompute: bool = False
    gelu_recompute: bool = False
    transformer_layer_recompute: bool = False
    number_recompute_layers: int = 0
    allow_layer_norm_mod_precision: bool = False
    propagate_cast_ops_config: Any = None


@dataclasses.dataclass
class OrtModuleGraphBuilderConfiguration:
    """The values to differentiate with respect to; other options are accepted without effect."""

    initializer_names: Sequence[str] = ()
    """Initializers that become inputs, after the model's own."""
    initializer_names_to_train: Sequence[str] = ()
    """The ones that get a gradient."""
    input_names_require_grad: Sequence[str] = ()
    build_gradient_graph: bool = True
    use_memory_efficient_gradient: bool = False
    graph_transformer_config: Any = dataclasses.field(
        default_factory=TrainingGraphTransformerConfiguration
    )
    enable_caching: bool = False
    loglevel: Any = None


@dataclasses.dataclass
class GraphInfo:
    """Names of what goes into the two passes and comes out of them."""

    user_input_names: list[str]
    user_input_grad_names: dict[str, str]
    user_output_names: list[str]
    initializer_names: list[str]
    initializer_names_to_train: list[str]
    initializer_grad_names_to_train: list[str]
    module_output_gradient_name: list[str]
    """What a backward pass is given, in order."""
    output_grad_indices_non_differentiable: list[int]
    output_grad_indices_require_full_shape: list[int] = dataclasses.field(default_factory=list)
    module_output_indices_requires_save_for_backward: list[int] = dataclasses.field(
        default_factory=list
    )
    frontier_node_arg_map: dict[str, str] = dataclasses.field(default_factory=dict)
    cached_node_arg_names: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Parts:
    """The two models inside a gradient model, and their names."""

    forward: bytes
    backward: bytes
    inputs: list[str]
    outputs: list[str]
    saved: list[str]
    passed: list[str]
    cotangents: list[str]
    gradients: list[str]
    differentiable: list[str]
    """The outputs that ``cotangents`` belong to."""
    wrt: list[str]
    """The inputs that ``gradients`` belong to."""

    def to_text(self) -> str:
        """Return all of it as text, for the properties of a model."""
        fields = dataclasses.asdict(self)
        for name in ("forward", "backward"):
            fields[name] = base64.b64encode(zlib.compress(fields[name])).decode()
        return json.dumps(fields)

    @classmethod
    def of(cls, properties: Mapping[str, str]) -> Parts:
        """Read the parts from the properties of a model."""
        if _KEY not in properties:
            raise OrtError(
                "the session's model has no backward pass\n"
                "hint: create it with OrtModuleGraphBuilder.get_gradient_model()"
            )
        fields = json.loads(properties[_KEY])
        for name in ("forward", "backward"):
            fields[name] = zlib.decompress(base64.b64decode(fields[name]))
        return cls(**fields)


class GradientGraphBuilder:
    """Add gradients of a scalar output to a model, as outputs ``<name>_grad``.

    Args:
        serialized_model: the model.
        y_node_arg_names: the outputs to differentiate; only the loss is supported.
        x_node_arg_names: inputs and initializers to differentiate with respect to.
        loss_node_arg_name: the loss.
        options: accepted without effect.
    """

    def __init__(
        self,
        serialized_model: bytes | onnx.ModelProto,
        y_node_arg_names: Collection[str],
        x_node_arg_names: Collection[str],
        loss_node_arg_name: str,
        options: Any = None,
    ) -> None:
        del options
        if set(y_node_arg_names) != {loss_node_arg_name}:
            raise OrtError(
                f"y_node_arg_names must be {{{loss_node_arg_name!r}}}, "
                f"got {sorted(y_node_arg_names)}\n"
                "hint: differentiate several outputs with onnxtrain.vjp"
            )
        with as_ort_errors():
            self._model = load(serialized_model)
        known = [x.name or "" for x in self._model.graph.inputs]
        known += self._model.graph.initializers
        unknown = sorted(set(x_node_arg_names) - set(known))
        if unknown:
            expected = expected_one_of(unknown[0], known)
            raise OrtError(f"unknown input or initializer: {', '.join(unknown)} {expected}")
        self._wrt = [n for n in dict.fromkeys(known) if n in set(x_node_arg_names)]
        self._loss = loss_node_arg_name
        self._built: onnx.ModelProto | None = None

    def build(self) -> None:
        """Build the gradient graph."""
        with as_ort_errors():
            self._built = grad(self._model, self._wrt, self._loss)

    def get_model(self) -> bytes:
        """Return the model: without gradients before :meth:`build`, with them after."""
        proto = finalize(load(self._model)) if self._built is None else self._built
        return proto.SerializeToString()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model of :meth:`get_model`."""
        with as_ort_errors():
            save(load(self.get_model()), path)


class OrtModuleGraphBuilder:
    """Build the gradient of a model: ``initialize``, ``build``, then the ``get_...`` methods."""

    def __init__(self) -> None:
        self._model: ir.Model | None = None
        self._config = OrtModuleGraphBuilderConfiguration()
        self._cut: Split | None = None
        self._parts: Parts | None = None
        self._inputs: list[str] = []
        self._weights: list[str] = []

    def initialize(
        self, serialized_model: bytes | onnx.ModelProto, config: OrtModuleGraphBuilderConfiguration
    ) -> None:
        """Set the model and the values to differentiate with respect to."""
        with as_ort_errors():
            model = load(serialized_model)
        graph = model.graph
        known = list(graph.initializers)
        weights = list(config.initializer_names)
        unknown = [n for n in weights if n not in graph.initializers]
        if unknown:
            expected = expected_one_of(unknown[0], known)
            raise OrtError(f"unknown initializer: {', '.join(unknown)} {expected}")
        unknown = [n for n in config.initializer_names_to_train if n not in weights]
        if unknown:
            raise OrtError(
                f"initializer_names_to_train has {', '.join(unknown)}, which initializer_names "
                "lacks"
            )
        inputs = [x.name or "" for x in graph.inputs]
        unknown = [n for n in config.input_names_require_grad if n not in inputs]
        if unknown:
            expected = expected_one_of(unknown[0], inputs)
            raise OrtError(f"unknown input: {', '.join(unknown)} {expected}")
        lift(graph, [graph.initializers[n] for n in weights])
        self._model, self._config = model, config
        self._inputs, self._weights = inputs, weights
        self._cut = self._parts = None

    def build(self, *without_effect: Any) -> None:
        """Build the graphs; arguments of onnxruntime-training are accepted without effect."""
        del without_effect
        model = self._initialized()
        if not self._config.build_gradient_graph:
            return
        by_name = {x.name: x for x in model.graph.inputs}
        inputs_to_train = [
            n for n in self._config.input_names_require_grad if S.is_float(by_name[n])
        ]
        wrt = [*inputs_to_train, *self._config.initializer_names_to_train]
        with as_ort_errors():
            cut = self._cut = split(model, wrt)
        count = len(cut.outputs)
        names = [x.name for x in cut.backward.graph.input]
        self._parts = Parts(
            cut.forward.SerializeToString(),
            cut.backward.SerializeToString(),
            [*self._inputs, *self._weights],
            [y.name or "" for y in model.graph.outputs],
            list(cut.saved),
            list(cut.passed),
            names[len(names) - count :],
            [y.name for y in cut.backward.graph.output],
            list(cut.outputs),
            wrt,
        )

    def get_gradient_model(self) -> bytes:
        """Return a model from features and weights to gradients, for a ``TrainingAgent``.

        As in onnxruntime-training, one node ``YieldOp`` stands where outputs leave the graph and
        their gradients enter it. Here it is a function of the model that returns ones: on stock
        onnxruntime the model computes the gradients of the sum of all outputs. Its metadata has
        the forward and backward models that the agent runs.
        """
        parts, cut = self._built()
        model = ir.from_proto(finalize(simplify(load(vjp(self._initialized(), cut.wrt)))))
        graph = model.graph
        cotangents = list(graph.inputs)[len(parts.inputs) :]
        by_name = {y.name: y for y in graph.outputs}
        outputs = [by_name[n] for n in cut.outputs]
        node = ir.node("YieldOp", outputs, domain=_CONTRIB, num_outputs=len(outputs))
        graph.append(node)
        for x, y in zip(cotangents, node.outputs, strict=True):
            x.replace_all_uses_with(y)
            graph.inputs.remove(x)
            y.name, y.type, y.shape = x.name, x.type, x.shape
        del graph.outputs[: len(parts.outputs)]
        graph.sort()
        model.opset_imports.setdefault(_CONTRIB, 1)
        function = _ones_for(outputs, model.opset_imports[""])
        model.functions[function.identifier()] = function
        model.metadata_props[_KEY] = parts.to_text()
        return ir.to_proto(model).SerializeToString()

    def get_forward_model(self) -> bytes:
        """Return the forward model, with the weights as inputs."""
        return finalize(load(self._initialized())).SerializeToString()

    get_model = get_gradient_model
    get_inference_optimized_model = get_forward_model

    def get_graph_info(self) -> GraphInfo:
        """Return the names of inputs, weights, gradients and outputs."""
        parts, cut = self._built()
        gradient_of = dict(zip(cut.wrt, parts.gradients, strict=True))
        trained = list(self._config.initializer_names_to_train)
        return GraphInfo(
            list(self._inputs),
            {n: gradient_of[n] for n in self._inputs if n in gradient_of},
            list(parts.outputs),
            list(self._weights),
            trained,
            [gradient_of[n] for n in trained],
            list(parts.cotangents),
            [i for i, n in enumerate(parts.outputs) if n not in cut.outputs],
        )

    def _initialized(self) -> ir.Model:
        if self._model is None:
            raise OrtError("the builder has no model\nhint: call initialize(model, config) first")
        return self._model

    def _built(self) -> tuple[Parts, Split]:
        if self._parts is None or self._cut is None:
            raise OrtError(
                "no gradient graph is built\n"
                "hint: call build() first, with build_gradient_graph=True in the configuration"
            )
        return self._parts, self._cut


def _ones_for(outputs: Sequence[ir.Value], opset: int) -> ir.Function:
    """Return the function ``YieldOp``: ones with the types and shapes of these values."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": opset}, name="YieldOp")
    op = OpBuilder(graph, "")
    for y in outputs:
        assert y.dtype is not None
        x = op.input(f"{y.name}", y.dtype, S.dims_of(y))
        one = ir.tensor([1.0], y.dtype)  # functions have no initializers
        graph.outputs.append(op.ConstantOfShape(op.Shape(x), value=one))
    return ir.Function(_CONTRIB, "YieldOp", graph=graph, attributes=[])
