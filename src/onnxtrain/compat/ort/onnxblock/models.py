"""Blocks that make whole models: the forward model, and the training model with its gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx

from onnxtrain.compat.ort.errors import OrtError, OrtLookupError
from onnxtrain.compat.ort.models import Built, Request, build_training, embed, manifest_of
from onnxtrain.compat.ort.onnxblock.blocks import Block
from onnxtrain.compat.ort.onnxblock.model import active, active_library


class ForwardBlock(Block):
    """A block whose result is a model with what ``build`` returns as its outputs."""

    _model: onnx.ModelProto | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Build on the active model, which gets the new outputs; return what ``build`` gives."""
        accessor = active()
        self.base = accessor.model
        output = self.build(*args, **kwargs)
        model = self.infer_shapes_on_base()
        set_outputs(model, [*_names(output), *accessor.updates])
        self._model = model
        accessor.model.CopyFrom(model)
        return output

    def to_model_proto(self) -> onnx.ModelProto:
        """Return the forward model."""
        if self._model is None:
            raise OrtError("Please build the forward models first before trying to retrieve it.")
        return self._model


class Parameters(tuple):
    """The pair (trainable, frozen) of lists of tensors; running statistics ride along."""

    buffers: Sequence[onnx.TensorProto] = ()

    @classmethod
    def of(cls, built: Built) -> Parameters:
        """Return the tensors that became inputs of the training model."""
        pair = cls((built.trainable, built.frozen))
        pair.buffers = built.buffers
        return pair


class TrainingBlock(Block):
    """A block that makes a training model; the first name that ``build`` returns is the loss."""

    built: Built | None = None
    """The models and what describes them, once the block was called."""
    loss_name: str | None = None

    def _wanted(self) -> dict[str, bool]:
        """Return names by whether they require a gradient; there also without ``__init__``."""
        return vars(self).setdefault("_requires_grad", {})

    def requires_grad(self, argument_name: str, value: bool = True) -> None:
        """Ask for the gradient of a parameter or input; ``False`` makes it a frozen parameter."""
        wanted = self._wanted()
        wanted.pop(argument_name, None)
        wanted[argument_name] = value is True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Build on the active model, which turns into the training model."""
        accessor = active()
        self.base = accessor.model
        output = self.build(*args, **kwargs)
        names = _names(output)
        forward = self.infer_shapes_on_base()
        set_outputs(forward, names)
        wanted = self._wanted()
        request = Request(
            trainable=[n for n, wants in wanted.items() if wants],
            frozen=[n for n, wants in wanted.items() if not wants],
            given=accessor.given,
            unreduced=names[0] in accessor.unreduced,
            loss_name=self.loss_name,
            custom_operators=active_library() is not None,
        )
        built = build_training(forward, request)
        manifest = manifest_of(built)
        for model in (built.training, built.evaluation):
            embed(model, manifest)
        self.built = built
        accessor.model.CopyFrom(built.training)
        return output

    def parameters(self) -> Parameters:
        """Return the tensors that became inputs: (trainable, frozen)."""
        if self.built is None:
            raise OrtError(
                "Please build the training model first before trying to retrieve the parameters."
            )
        return Parameters.of(self.built)

    def to_model_proto(self) -> tuple[onnx.ModelProto, onnx.ModelProto]:
        """Return the training model and the evaluation model."""
        if self.built is None:
            raise OrtError(
                "Please build the training and eval models first before trying to retrieve them."
            )
        return self.built.training, self.built.evaluation


def set_outputs(model: onnx.ModelProto, names: Sequence[str]) -> None:
    """Make values the only outputs of a model."""
    graph = model.graph
    known = {v.name: v for values in (graph.value_info, graph.output) for v in values}
    missing = [n for n in names if n not in known]
    if missing:
        raise OrtLookupError(
            f"The provided name {missing[0]} is not a graph value info or a graph output."
        )
    inner = [v for n, v in known.items() if n not in names]
    chosen = [known[n] for n in names]
    del graph.output[:], graph.value_info[:]
    graph.output.extend(chosen)
    graph.value_info.extend(inner)


def _names(output: Any) -> list[str]:
    return [output] if isinstance(output, str) else list(output)
