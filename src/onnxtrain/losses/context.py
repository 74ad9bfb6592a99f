"""The values of a model that losses and metrics look at, and the inputs they add."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any

import onnx_ir as ir

from onnxtrain.errors import PrepareError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.losses.base import FLOAT, INT64, Loss, TargetSpec
from onnxtrain.losses.classification import CrossEntropy

_LOGITS = "logits"  # what a loss looks at where a model has several outputs and nothing was said
_NARROW = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def label_type(op: OpBuilder) -> ir.DataType:
    """Return the type of class labels: int32 where a runtime lacks int64."""
    return ir.DataType.INT32 if op.target.lacks("int64") else INT64


class LossContext:
    """A model to which something is being attached; ``own`` are its own outputs."""

    def __init__(self, model: ir.Model, op: OpBuilder) -> None:
        self.model, self.graph, self.op = model, model.graph, op
        self.own = list(model.graph.outputs)
        self._wide: dict[ir.Value, ir.Value] = {}

    @property
    def inputs(self) -> dict[str, ir.Value]:
        """The inputs of the graph by name, those that were added included."""
        return {x.name or "": x for x in self.graph.inputs}

    def wide(self, x: ir.Value) -> ir.Value:
        """Return a prediction in float32 if it is in half precision."""
        if x.dtype not in _NARROW:
            return x
        if x not in self._wide:
            self._wide[x] = self.op.cast(x, FLOAT)
        return self._wide[x]

    def predictions(self, loss: Loss, names: Sequence[str]) -> list[ir.Value]:
        """Return the outputs that a loss looks at."""
        floats = [y for y in self.own if S.is_float(y)]
        floats = [y for y in floats if not _is_stored(y)] or floats
        scores = [y for y in floats if y.name == _LOGITS]
        if names:
            floats = [self.find(name) for name in names]
        elif loss.predictions == 1 and scores:
            floats = scores  # beside hidden states, attentions and the like
        elif len(floats) not in (1, loss.predictions):
            listing = ", ".join(y.name or "" for y in self.own)
            name = floats[0].name if floats else "logits"
            raise PrepareError(
                f"which output does {type(loss).__name__} look at? the model has {listing}\n"
                f"hint: LossTerm({type(loss).__name__}(), output={name!r}), say"
            )
        wrong = [x for x in floats if not S.is_float(x)]
        if wrong:
            raise PrepareError(f"a loss looks at floats, not at {S.describe_value(wrong[0])}")
        return floats

    def find(self, name: str) -> ir.Value:
        """Return an output or an inner value by name."""
        for y in self.own:
            if y.name == name:
                return y
        inner = {y.name or "": y for node in self.graph for y in node.outputs}
        if name not in inner:
            outputs = [y.name or "" for y in self.own]
            near = difflib.get_close_matches(name, [*outputs, *inner], n=3, cutoff=0.5)
            raise PrepareError(
                f"no such output: {name!r}\nhint: the model has {', '.join(near or outputs)}"
            )
        return inner[name]

    def new_input(self, name: str, target: TargetSpec) -> ir.Value:
        """Add an input; class labels are int32 where a runtime lacks int64."""
        dtype = label_type(self.op) if target.dtype == INT64 else target.dtype
        return self.op.input(name, dtype, target.dims)

    def shared_input(self, name: str, target: TargetSpec, loss: Loss) -> ir.Value:
        """Return the input of that name, whether it is there already or not."""
        if name not in self.inputs:
            if name in self.op.names.taken:
                raise PrepareError(f"{name!r} is taken by a value of the model\nhint: rename it")
            return self.new_input(name, target)
        value = self.inputs[name]
        if S.is_float(value) and target.dtype == INT64 and not isinstance(loss, CrossEntropy):
            raise PrepareError(
                f"{type(loss).__name__} wants class indices, not {S.describe_value(value)}"
            )
        if target.dtype != INT64:
            return self.op.cast(value, target.dtype)
        integers = (INT64, ir.DataType.INT32)
        return value if value.dtype in integers or S.is_float(value) else self.op.cast(value, INT64)

    def named(self, value: ir.Value, name: str, replaced: Collection[ir.Value] = ()) -> ir.Value:
        """Return a value under a name of its own, clearing the name of what nobody sees."""
        if value.name == name:
            return value
        outside = {*self.graph.inputs, *self.graph.initializers.values(), *self.own} - {*replaced}
        for other in outside:
            if other.name == name:
                raise PrepareError(
                    f"the name {name!r} is taken by {S.describe_value(other)}\n"
                    f"hint: rename it in the model, or pass it as loss={name!r} if it is the loss"
                )
        for node in self.graph.all_nodes():
            for y in node.outputs:
                if y.name == name:
                    y.name = self.op.names.fresh(name)
        if value in outside or value.producer() is None:
            value = self.op.Identity(value)
        value.name = name
        self.op.names.taken.add(name)
        return value

    def call(self, function: Callable[..., Any], names: Sequence[str]) -> ir.Value:
        """Call a function over the builder with outputs, by name or in order."""
        parameters = list(inspect.signature(function).parameters.values())[1:]
        outputs = {y.name or "": y for y in self.own}
        if names:
            value = function(self.op, *(self.find(name) for name in names))
        elif any(p.kind == p.VAR_POSITIONAL for p in parameters):
            value = function(self.op, *self.own)
        elif all(p.name in outputs for p in parameters if p.default is p.empty):
            value = function(
                self.op, **{p.name: outputs[p.name] for p in parameters if p.name in outputs}
            )
        elif sum(p.default is p.empty for p in parameters) == len(self.own):
            value = function(self.op, *self.own)
        else:
            takes = ", ".join(p.name for p in parameters)
            raise PrepareError(
                f"the loss function takes ({takes}), but the model has {', '.join(outputs)}\n"
                "hint: name its parameters after outputs, or use LossTerm(function, output=[...])"
            )
        if not isinstance(value, ir.Value):
            raise PrepareError(
                f"the loss function gave {type(value).__name__}\n"
                "hint: it must return a value that it made with the builder"
            )
        return value


def _is_stored(y: ir.Value) -> bool:
    """Return whether an output is a tensor of the file as it is: a version number, say."""
    producer = y.producer()
    while producer is not None and producer.op_type == "Identity":
        (x,) = producer.inputs
        assert x is not None
        y, producer = x, x.producer()
    return y.is_initializer()
