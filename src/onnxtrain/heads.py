"""Replace the classification head of a model, and reinitialize other weights.

:func:`replace_head` walks from an output back to the last Gemm, MatMul or Conv and gives it new
weights for another number of classes, as the first step of transfer learning.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Sequence

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.errors import PrepareError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.io import Source, load

# Operators allowed between the head and the output: they keep the class axis.
_PASSTHROUGH_OPS = (
    *("Identity", "Cast", "Dropout", "Flatten", "Relu", "Sigmoid", "Softmax", "LogSoftmax"),
    *("AveragePool", "GlobalAveragePool", "GlobalMaxPool"),
)


@dataclasses.dataclass(frozen=True)
class _Layer:
    """The last layer: weight, the output axis of the weight, and bias."""

    node: ir.Node
    weight: ir.Value
    axis: int
    bias: ir.Value | None
    between: tuple[ir.Value, ...]
    """Values from the layer to the output, which change their shape."""


def replace_head(
    model: Source,
    output: str,
    classes: int | None = None,
    *,
    add_classes: int | None = None,
    reinitialize: str | Sequence[str] = (),
    seed: int = 0,
) -> onnx.ModelProto:
    """Return the model with a new last layer for another number of classes, or with more classes.

    The layer that computes ``output`` (Gemm, MatMul with or without bias, Conv) gets weights of the
    new size, initialized like ``torch.nn.Linear``. All other weights stay.

    >>> from onnxtrain.examples import digits_model
    >>> larger = replace_head(digits_model(), "logits", add_classes=1)
    >>> [i.dims for i in larger.graph.initializer if i.name == "fc2.bias"]
    [[11]]

    Args:
        model: a path, bytes, ``ModelProto`` or ``ir.Model``; it is not changed.
        output: name of the output.
        classes: new number of classes; all weights of the layer are new.
        add_classes: classes to add behind the present ones, which keep their weights.
        reinitialize: names or globs of other weights to reinitialize.
        seed: random seed of the new weights.

    Raises:
        PrepareError: if the output is unknown or not computed by such a layer.
    """
    if (classes is None) == (add_classes is None):
        raise PrepareError("replace_head needs either classes= or add_classes=")
    count = add_classes if classes is None else classes
    assert count is not None
    if count < 1:
        name = "classes" if add_classes is None else "add_classes"
        raise PrepareError(f"{name} must be at least 1: {count}")
    work = load(model)
    graph = work.graph
    outputs = {y.name or "": y for y in graph.outputs}
    if output not in outputs:
        raise PrepareError(f"unknown output: {output!r}\nhint: the model has {', '.join(outputs)}")
    rng = np.random.default_rng(seed)
    layer = _last_layer(outputs[output])
    shape = list(_shape(layer.weight))
    old = shape[layer.axis]
    fan_in = math.prod(shape) // old
    new = count if add_classes is None else old + count

    def resize(x: ir.Value, axis: int) -> None:
        shape = list(_shape(x))
        if shape[axis] != old and add_classes is not None:  # a bias that all classes share
            return
        shape[axis] = count if shape[axis] == old else shape[axis]
        array = _uniform(shape, fan_in, rng)
        if add_classes is not None:
            assert x.const_value is not None
            array = np.concatenate([x.const_value.numpy(), array], axis)
        _set(x, array)

    resize(layer.weight, layer.axis)
    if layer.bias is not None:
        resize(layer.bias, -1)
    for value in layer.between:
        if value.shape is not None:
            axis = 1 if layer.node.op_type == "Conv" or len(value.shape) < 2 else -1
            dims = list(value.shape)
            dims[axis] = new if dims[axis] == old else dims[axis]
            value.shape = ir.Shape(dims)
    reinitialize_weights(graph, reinitialize, rng)
    return ir.to_proto(work)


def reinitialize_weights(
    graph: ir.Graph, names: str | Sequence[str], rng: np.random.Generator
) -> list[str]:
    """Reinitialize weights in place; return their names.

    Matrices and kernels become uniform in ``+-1 / sqrt(fan_in)``, scales and running variances of
    normalization layers one, other vectors zero.
    """
    weights: dict[str, None] = {}
    for pattern in [names] if isinstance(names, str) else names:
        matches = [n for n in fnmatch.filter(graph.initializers, pattern) if _is_weight(graph, n)]
        if not matches:
            raise PrepareError(f"unknown weight in `reinitialize`: {pattern!r}")
        weights.update(dict.fromkeys(matches))
    for name in weights:
        x = graph.initializers[name]
        shape = _shape(x)
        if len(shape) > 1:
            _set(x, _uniform(shape, _fan_in(x, shape), rng))
        else:
            _set(x, np.full(shape, 1.0 if _is_scale(x) else 0.0))
    return list(weights)


def _last_layer(y: ir.Value) -> _Layer:
    """Return the layer that computes an output, through activations, pooling and a bias."""
    between = [y]
    node = y.producer()
    bias: ir.Value | None = None
    while node is not None and node.op_type in (*_PASSTHROUGH_OPS, "Add"):
        x = node.inputs[0]
        if node.op_type == "Add":
            x, bias = _split_bias(node)
        if x is None:
            break
        between.append(x)
        node = x.producer()
    if node is None or node.op_type not in ("Gemm", "MatMul", "Conv"):
        operator = "no node" if node is None else f"{node.op_type} {node.name!r}"
        raise PrepareError(
            f"{y.name!r} is computed by {operator}, which is not a layer with weights\n"
            "hint: replace_head supports Gemm, MatMul and Conv"
        )
    if any(len(v.uses()) > 1 for v in between) or y.uses():
        raise PrepareError(f"the last layer {node.name!r} also feeds other nodes")
    if node.op_type == "Conv" and node.attributes.get_int("group", 1) != 1:
        raise PrepareError(f"{node.name!r} is a grouped convolution, which cannot be replaced")
    weight, axis = node.inputs[1], 0 if node.op_type == "Conv" else -1
    if node.op_type == "Gemm" and node.attributes.get_int("transB", 0):
        axis = 0
    producer = None if weight is None else weight.producer()
    if producer is not None and producer.op_type == "Transpose":
        weight, axis = producer.inputs[0], 0 if axis else -1
        producer.outputs[0].shape = None
    if node.op_type != "MatMul" and len(node.inputs) > 2:
        bias = node.inputs[2]
    return _Layer(
        node,
        _constant_weight(node, weight),
        axis,
        None if bias is None else _constant_weight(node, bias),
        tuple(between),
    )


def _split_bias(node: ir.Node) -> tuple[ir.Value | None, ir.Value | None]:
    a, b = node.inputs
    if a is not None and a.is_initializer():
        a, b = b, a
    return (a, b) if b is not None and b.is_initializer() else (None, None)


def _constant_weight(node: ir.Node, x: ir.Value | None) -> ir.Value:
    if x is None or not x.is_initializer() or x.const_value is None:
        raise PrepareError(f"the weights of {node.name!r} are computed, not stored")
    if len(x.uses()) > 1:
        raise PrepareError(
            f"{x.name!r} is shared with another layer\nhint: untie it before replacing the head"
        )
    return x


def _is_weight(graph: ir.Graph, name: str) -> bool:
    x = graph.initializers[name]
    return S.is_float(x) and x.const_value is not None


def _is_scale(x: ir.Value) -> bool:
    return any(u.node.op_type.endswith("Normalization") and u.idx in (1, 4) for u in x.uses())


def _shape(x: ir.Value) -> tuple[int, ...]:
    assert x.const_value is not None
    return tuple(x.const_value.numpy().shape)


def _uniform(shape: Sequence[int], fan_in: int, rng: np.random.Generator) -> np.ndarray:
    """Return the default initialization of torch.nn.Linear: uniform in +-1 / sqrt(fan_in)."""
    bound = 1.0 / math.sqrt(max(fan_in, 1))
    return rng.uniform(-bound, bound, tuple(shape))


def _fan_in(x: ir.Value, shape: tuple[int, ...]) -> int:
    """Return the number of inputs of each output element."""
    node = next((use.node for use in x.uses()), None)
    inputs_first = node is not None and (
        node.op_type == "MatMul"
        or (node.op_type == "Gemm" and not node.attributes.get_int("transB", 0))
    )
    return shape[-2] if inputs_first else math.prod(shape[1:])


def _set(x: ir.Value, array: np.ndarray) -> None:
    assert x.const_value is not None
    array = array.astype(x.const_value.numpy().dtype)
    x.const_value = ir.Tensor(array, dtype=x.dtype, name=x.name)
    x.shape = ir.Shape(array.shape)
