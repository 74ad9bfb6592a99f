"""A trained model made ready for another task."""

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

# What may stand between the last layer and the output: the class axis stays what it is.
_PASSTHROUGH_OPS = (
    *("Identity", "Cast", "Dropout", "Flatten", "Relu", "Sigmoid", "Softmax", "LogSoftmax"),
    *("AveragePool", "GlobalAveragePool", "GlobalMaxPool"),
)


@dataclasses.dataclass(frozen=True)
class _Layer:
    """Weights and bias of a layer, and the axis of each that counts outputs."""

    node: ir.Node
    weight: ir.Value
    axis: int
    bias: ir.Value | None
    between: tuple[ir.Value, ...]
    """Values from the layer to the output, whose shapes will change."""


def replace_head(
    model: Source,
    output: str,
    classes: int,
    *,
    reinitialize: str | Sequence[str] = (),
    seed: int = 0,
) -> onnx.ModelProto:
    """Return the model with a fresh last layer for another number of classes.

    The layer that makes ``output`` (Gemm, MatMul with or without a bias, Conv) gets new weights of
    the new size, drawn as torch initialises such layers; all other weights stay.

    Args:
        model: a path, bytes, ``ModelProto`` or ``ir.Model``; it is not changed.
        output: the name of the output.
        classes: how many classes there are now.
        reinitialize: names or globs of further weights to draw anew, at their old size.
        seed: of the drawn weights.

    Raises:
        PrepareError: if the output does not exist or is not made by such a layer.
    """
    if classes < 1:
        raise PrepareError(f"classes must be at least 1: {classes}")
    work = load(model)
    graph = work.graph
    known = {y.name or "": y for y in graph.outputs}
    if output not in known:
        raise PrepareError(f"unknown output: {output!r}\nhint: the model has {', '.join(known)}")
    rng = np.random.default_rng(seed)
    layer = _last_layer(known[output])
    sizes = list(_sizes(layer.weight))
    old, sizes[layer.axis] = sizes[layer.axis], classes
    fan_in = math.prod(sizes) // classes
    _set(layer.weight, _draw(sizes, fan_in, rng))
    if layer.bias is not None:
        shape = list(_sizes(layer.bias))
        shape[-1] = classes if shape[-1] == old else shape[-1]
        _set(layer.bias, _draw(shape, fan_in, rng))
    for value in layer.between:
        if value.shape is not None:
            axis = 1 if layer.node.op_type == "Conv" or len(value.shape) < 2 else -1
            dims = list(value.shape)
            dims[axis] = classes if dims[axis] == old else dims[axis]
            value.shape = ir.Shape(dims)
    reinitialize_weights(graph, reinitialize, rng)
    return ir.to_proto(work)


def reinitialize_weights(
    graph: ir.Graph, names: str | Sequence[str], rng: np.random.Generator
) -> list[str]:
    """Draw weights anew at their own size, in place; return their names.

    Matrices and kernels are uniform within ``1 / sqrt(fan_in)``; scales and running variances of
    normalisations become one, other vectors zero.
    """
    weights: dict[str, None] = {}
    for pattern in [names] if isinstance(names, str) else names:
        hits = [n for n in fnmatch.filter(graph.initializers, pattern) if _is_weight(graph, n)]
        if not hits:
            raise PrepareError(f"no such weight in `reinitialize`: {pattern!r}")
        weights.update(dict.fromkeys(hits))
    for name in weights:
        x = graph.initializers[name]
        shape = _sizes(x)
        if len(shape) > 1:
            _set(x, _draw(shape, _fan_in(x, shape), rng))
        else:
            _set(x, np.full(shape, 1.0 if _is_scale(x) else 0.0))
    return list(weights)


def _last_layer(y: ir.Value) -> _Layer:
    between = [y]
    node = y.producer()
    bias: ir.Value | None = None
    while node is not None and node.op_type in (*_PASSTHROUGH_OPS, "Add"):
        x = node.inputs[0]
        if node.op_type == "Add":
            x, bias = _sum_and_bias(node)
        if x is None:
            break
        between.append(x)
        node = x.producer()
    if node is None or node.op_type not in ("Gemm", "MatMul", "Conv"):
        producer = "no node" if node is None else f"{node.op_type} {node.name!r}"
        raise PrepareError(
            f"{y.name!r} is made by {producer}, not by a layer with weights\n"
            "hint: Gemm, MatMul and Conv can be replaced"
        )
    if any(len(v.uses()) > 1 for v in between) or y.uses():
        raise PrepareError(f"the last layer {node.name!r} feeds other nodes as well")
    if node.op_type == "Conv" and node.attributes.get_int("group", 1) != 1:
        raise PrepareError(f"{node.name!r} is a grouped convolution, which cannot be replaced")
    weight, axis = node.inputs[1], 0 if node.op_type == "Conv" else -1
    if node.op_type == "Gemm" and node.attributes.get_int("transB", 0):
        axis = 0
    maker = None if weight is None else weight.producer()
    if maker is not None and maker.op_type == "Transpose":
        weight, axis = maker.inputs[0], 0 if axis else -1
        maker.outputs[0].shape = None
    if node.op_type != "MatMul" and len(node.inputs) > 2:
        bias = node.inputs[2]
    return _Layer(
        node,
        _stored(node, weight),
        axis,
        None if bias is None else _stored(node, bias),
        tuple(between),
    )


def _sum_and_bias(node: ir.Node) -> tuple[ir.Value | None, ir.Value | None]:
    a, b = node.inputs
    if a is not None and a.is_initializer():
        a, b = b, a
    return (a, b) if b is not None and b.is_initializer() else (None, None)


def _stored(node: ir.Node, x: ir.Value | None) -> ir.Value:
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


def _sizes(x: ir.Value) -> tuple[int, ...]:
    assert x.const_value is not None
    return tuple(x.const_value.numpy().shape)


def _draw(shape: Sequence[int], fan_in: int, rng: np.random.Generator) -> np.ndarray:
    """Return uniform numbers within 1 / sqrt(fan_in), as torch's layers start."""
    bound = 1.0 / math.sqrt(max(fan_in, 1))
    return rng.uniform(-bound, bound, tuple(shape))


def _fan_in(x: ir.Value, shape: tuple[int, ...]) -> int:
    """Return how many numbers each output of the layer sums up."""
    node = next((use.node for use in x.uses()), None)
    rows = node is not None and (
        node.op_type == "MatMul"
        or (node.op_type == "Gemm" and not node.attributes.get_int("transB", 0))
    )
    return shape[-2] if rows else math.prod(shape[1:])


def _set(x: ir.Value, array: np.ndarray) -> None:
    assert x.const_value is not None
    array = array.astype(x.const_value.numpy().dtype)
    x.const_value = ir.Tensor(array, dtype=x.dtype, name=x.name)
    x.shape = ir.Shape(array.shape)
