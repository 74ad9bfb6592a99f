"""What a block is: a piece of a graph that builds itself on the active model.

Every small block: each adds a node or two and gives the name of its output.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.compat.ort.errors import OrtError, OrtLookupError
from onnxtrain.compat.ort.onnxblock.model import active, add_initializer, add_input, splice


class Block(ABC):
    """A piece of a graph; a call builds it on the active model and gives the name of its output.

    Args:
        temp_file_name: not used, nothing is written; an absolute path is refused as it always was.
    """

    base: onnx.ModelProto
    """The live model, while the block is built and afterwards."""

    def __init__(self, temp_file_name: str = "temp.onnx") -> None:
        if os.path.isabs(temp_file_name):
            raise OrtError("Please pass in a relative path for the temp_file_name.")

    @abstractmethod
    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Add nodes to ``self.base``; return the name of the output, or names."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Build on the active model; return what ``build`` gives."""
        self.base = active().model
        return self.build(*args, **kwargs)

    def infer_shapes_on_base(self) -> onnx.ModelProto:
        """Return the active model with the shapes of its values written down."""
        return onnx.shape_inference.infer_shapes(active().model)


class _BinaryOp(Block):
    """A node with two inputs."""

    def __init__(self, op_name: str) -> None:
        super().__init__()
        self._op_name = op_name

    def build(self, input_name1: str, input_name2: str) -> Any:
        """Return the name of the result."""
        name = _known(self._op_name)
        return splice(
            active(), name.lower(), [input_name1, input_name2], lambda op, a, b: op.emit(name, a, b)
        )


class Add(_BinaryOp):
    """``a + b``."""

    def __init__(self) -> None:
        super().__init__("Add")


class Sub(_BinaryOp):
    """``a - b``."""

    def __init__(self) -> None:
        super().__init__("Sub")


class Mul(_BinaryOp):
    """``a * b``."""

    def __init__(self) -> None:
        super().__init__("Mul")


class Div(_BinaryOp):
    """``a / b``."""

    def __init__(self) -> None:
        super().__init__("Div")


class _UnaryOp(Block):
    """A node with one input."""

    def __init__(self, op_name: str, **attributes: Any) -> None:
        super().__init__()
        self._op_name = op_name
        self._attributes = attributes

    def build(self, input_name: str) -> Any:
        """Return the name of the result."""
        name = _known(self._op_name)
        values = {k: int(v) if isinstance(v, bool) else v for k, v in self._attributes.items()}
        return splice(
            active(), name.lower(), [input_name], lambda op, x: op.emit(name, x, **values)
        )


class ReduceMean(_UnaryOp):
    """The mean of all elements."""

    def __init__(self, keepdims: bool = True) -> None:
        super().__init__("ReduceMean", keepdims=keepdims)


class ReduceSum(_UnaryOp):
    """The sum of all elements."""

    def __init__(self, keepdims: bool = True) -> None:
        super().__init__("ReduceSum", keepdims=keepdims)


class Sigmoid(_UnaryOp):
    """``1 / (1 + e^-x)``."""

    def __init__(self) -> None:
        super().__init__("Sigmoid")


class Log(_UnaryOp):
    """The natural logarithm."""

    def __init__(self) -> None:
        super().__init__("Log")


class Neg(_UnaryOp):
    """``-x``."""

    def __init__(self) -> None:
        super().__init__("Neg")


class Abs(_UnaryOp):
    """``|x|``."""

    def __init__(self) -> None:
        super().__init__("Abs")


class Pow(Block):
    """``x`` to a constant power."""

    def __init__(self, exponent: float) -> None:
        super().__init__()
        self._exponent = exponent

    def build(self, pow_input_name: str) -> Any:
        """Return the name of the result."""
        return splice(
            active(), "pow", [pow_input_name], lambda op, x: op.Pow(x, [float(self._exponent)])
        )


class Constant(Block):
    """A float initializer of shape [1]."""

    def __init__(self, value_float: float) -> None:
        super().__init__()
        self._value = value_float

    def build(self) -> str:
        """Return the name of the initializer."""
        return add_initializer(active(), "initializer", np.array([self._value], np.float32))


class SequenceConstruct(Block):
    """A sequence of tensors."""

    def build(self, *sequence_input_names: str) -> Any:
        """Return the name of the sequence."""
        return splice(
            active(),
            "sequenceconstruct",
            sequence_input_names,
            lambda op, *xs: op.SequenceConstruct(*xs),
        )


class ReduceAllL2(Block):
    """The norm of several tensors taken as one vector, of shape [1]."""

    def build(self, *reduce_node_input_names: str) -> Any:
        """Return the name of the norm."""

        def build(op: Any, *xs: ir.Value) -> ir.Value:
            squares = [op.cast(op.ReduceSumSquare(x, keepdims=0), ir.DataType.FLOAT) for x in xs]
            return op.Reshape(op.Sqrt(op.Sum(*squares)), [1])

        return splice(active(), "reducealll2", reduce_node_input_names, build)


class Clip(Block):
    """Elements cut off at a least and a greatest value."""

    def __init__(self, clip_min: float | None = None, clip_max: float | None = None) -> None:
        super().__init__()
        self._min = clip_min
        self._max = clip_max

    def build(self, clip_input_name: str) -> Any:
        """Return the name of the result."""

        def build(op: Any, x: ir.Value) -> ir.Value:
            bounds = (None if b is None else op.const(b, x.dtype) for b in (self._min, self._max))
            return op.Clip(x, *bounds)

        return splice(active(), "clip", [clip_input_name], build)


class PassThrough(Block):
    """Nothing: the names come back."""

    def build(self, *input_names: str) -> tuple[str, ...]:
        """Return the names."""
        return input_names


class InputLike(Block):
    """A new graph input of the type and shape of another input or output."""

    def __init__(self, like: str) -> None:
        super().__init__()
        self._like = like

    def build(self, input_name: str | None = None) -> str:
        """Return the name of the new input."""
        graph = self.base.graph
        for value in (*graph.input, *graph.output):
            if value.name == self._like:
                name = input_name or active().fresh("input")
                return add_input(self.base, name, value.type)
        raise OrtLookupError(f"Could not find input or output with name {self._like}")


class LabelEncoder(Block):
    """A table from keys to values."""

    def __init__(
        self,
        default_float: float = 0.0,
        default_int64: int = -1,
        default_string: str = "_Unused",
        keys_floats: Sequence[float] | None = None,
        keys_int64s: Sequence[int] | None = None,
        keys_strings: Sequence[str] | None = None,
        values_floats: Sequence[float] | None = None,
        values_int64s: Sequence[int] | None = None,
        values_strings: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        self._attributes = {
            "default_float": default_float,
            "default_int64": default_int64,
            "default_string": default_string,
            "keys_floats": keys_floats,
            "keys_int64s": keys_int64s,
            "keys_strings": keys_strings,
            "values_floats": values_floats,
            "values_int64s": values_int64s,
            "values_strings": values_strings,
        }

    def build(self, label_encoder_input_name: str) -> Any:
        """Return the name of the result."""

        def build(op: Any, x: ir.Value) -> ir.Value:
            return op.emit("LabelEncoder", x, _domain="ai.onnx.ml", **self._attributes)

        return splice(active(), "label_encoder", [label_encoder_input_name], build)


class Cast(Block):
    """The same numbers in another type."""

    def __init__(self, to: onnx.TensorProto.DataType) -> None:
        super().__init__()
        self._to = to

    def build(self, cast_input_name: str) -> Any:
        """Return the name of the result."""
        return splice(
            active(), "cast", [cast_input_name], lambda op, x: op.Cast(x, to=int(self._to))
        )


class Linear(Block):
    """``alpha x W + beta b``, with normally distributed weights of shape [in, out]."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        alpha: float = 1.0,
        beta: float = 1.0,
    ) -> None:
        super().__init__()
        self._sizes = (in_features, out_features)
        self._bias = bias
        self._factors = {"alpha": alpha, "beta": beta}

    def build(self, linear_input_name: str) -> Any:
        """Return the name of the result."""
        accessor = active()
        names = [linear_input_name]
        shapes = {"linear.weight": self._sizes, "linear.bias": self._sizes[1:]}
        for token, shape in shapes.items():
            if token == "linear.weight" or self._bias:
                array = np.random.randn(*shape).astype(np.float32)
                names.append(add_initializer(accessor, token, array))
        return splice(accessor, "linear", names, lambda op, *xs: op.Gemm(*xs, **self._factors))


def _known(op_name: str) -> str:
    if not op_name:
        raise OrtError("Unknown op name. Please override _op_name")
    return op_name
