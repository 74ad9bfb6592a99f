"""Replace the classification head of a model, and reinitialize other weights.

:func:`replace_head` walks from a value back to the last Gemm, MatMul or Conv and gives it new
weights for another number of classes, as the first step of transfer learning. Detectors have a
layer on each level; :class:`_Levels` finds them all behind Split, Concat and Reshape:

    Conv (boxes)   -> Concat -> Reshape [N, 64 + 18, -1] -> Concat (levels) -> Split -> class logits
    Conv (classes) ->
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
    new size, initialized like ``torch.nn.Linear``. All other weights stay. ``output`` may also be
    the class logits ``[N, C, ...]`` of a detector, before Sigmoid: the convolutions of all levels
    are replaced, and their biases begin at the mean of the old ones, as most positions are empty.

    >>> from onnxtrain.examples import digits_model
    >>> larger = replace_head(digits_model(), "logits", add_classes=1)
    >>> [i.dims for i in larger.graph.initializer if i.name == "fc2.bias"]
    [[11]]

    Args:
        model: a path, bytes, ``ModelProto`` or ``ir.Model``; it is not changed.
        output: name of the output, or of the class logits inside of a detector.
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
    y = _find_value(graph, output)
    rng = np.random.default_rng(seed)
    levels = _Levels.behind(y)
    if levels is not None:
        levels.resize(graph, count, rng, keep=add_classes is not None)
        reinitialize_weights(graph, reinitialize, rng)
        return ir.to_proto(work)
    layer = _last_layer(y)
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


def _find_value(graph: ir.Graph, name: str) -> ir.Value:
    """Return an output or an inner value."""
    outputs = {y.name or "": y for y in graph.outputs}
    inner = (y for node in graph for y in node.outputs if y.name == name)
    y = outputs.get(name) or next(inner, None)
    if y is None:
        raise PrepareError(f"unknown output: {name!r}\nhint: the model has {', '.join(outputs)}")
    return y


@dataclasses.dataclass
class _Levels:
    """The convolutions of all levels of a detector, and the sizes that depend on their channels."""

    y: ir.Value
    layers: list[_Layer] = dataclasses.field(default_factory=list[_Layer])
    sizes: dict[ir.Node, tuple[int, int]] = dataclasses.field(
        default_factory=dict[ir.Node, tuple[int, int]]
    )
    """Node with sizes -> the element that contains the classes, and its value."""

    @classmethod
    def behind(cls, y: ir.Value) -> _Levels | None:
        """Return the levels of class logits ``[N, C, ...]``; None if one layer computes them."""
        node = y.producer()
        if node is None or node.op_type not in ("Concat", "Split", "Reshape"):
            return None
        classes = (S.dims_of(y) or (None, None))[1:2]
        if node.op_type == "Split":
            sizes = _constant_sizes(node)
            classes = (None if sizes is None else sizes[node.outputs.index(y)],)
        if not classes or not isinstance(classes[0], int):
            return None
        levels = cls(y)
        levels.walk(y, 0, classes[0])
        return levels

    def walk(self, x: ir.Value | None, first: int, count: int) -> None:
        """Go back to the layers that compute ``count`` channels of a value, from ``first`` on."""
        node = None if x is None else x.producer()
        if x is None or node is None:
            raise self.refusal(node)
        elif node.op_type == "Conv":
            self.layers.append(self.layer(node, first, count))
        elif node.op_type == "Split" and node.attributes.get_int("axis", 0) == 1:
            sizes, k = _constant_sizes(node), node.outputs.index(x)
            if sizes is None or first or sizes[k] != count:
                raise self.refusal(node)
            self.sizes[node] = (k, count)
            self.walk(node.inputs[0], sum(sizes[:k]), count)
        elif node.op_type == "Reshape":
            size = _channels_of_reshape(node)
            if size is None:
                raise self.refusal(node)
            self.sizes[node] = (1, size)
            self.walk(node.inputs[0], first, count)
        elif node.op_type == "Concat" and node.attributes.get_int("axis", 0) == 1:
            for part in node.inputs:
                size = None if part is None else _conv_channels(part)
                if size is None or first < size:
                    return self.walk(part, first, count)
                first -= size
            raise self.refusal(node)
        elif node.op_type == "Concat":
            for part in node.inputs:
                self.walk(part, first, count)
        else:
            raise self.refusal(node)
        return None

    def layer(self, node: ir.Node, first: int, count: int) -> _Layer:
        """Return a convolution that computes the classes and nothing else."""
        weight = None if node.inputs[1] is None else _constant_weight(node, node.inputs[1])
        grouped = node.attributes.get_int("group", 1) != 1
        if weight is None or grouped or first or _shape(weight)[0] != count:
            raise self.refusal(node)
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        bias = None if bias is None else _constant_weight(node, bias)
        return _Layer(node, weight, 0, bias, (node.outputs[0],))

    def refusal(self, node: ir.Node | None) -> PrepareError:
        """Return the error for a graph that is not followed."""
        where = "an input" if node is None else f"{node.op_type} {node.name!r}"
        return PrepareError(
            f"the class layers of {self.y.name!r} were not found: {where} is on the way\n"
            "hint: replace_head follows Split, Concat and Reshape along channels back to Conv"
        )

    def resize(self, graph: ir.Graph, count: int, rng: np.random.Generator, *, keep: bool) -> None:
        """Give all layers ``count`` classes, or with ``keep`` add ``count`` classes."""
        old = _shape(self.layers[0].weight)[0]
        changed = count if keep else count - old
        after = self._values_after()
        for layer in self.layers:
            shape = list(_shape(layer.weight))
            fan_in = math.prod(shape[1:])
            _replace(layer.weight, _uniform([count, *shape[1:]], fan_in, rng), keep=keep)
            if layer.bias is not None:
                assert layer.bias.const_value is not None
                mean = float(layer.bias.const_value.numpy().mean())
                _replace(layer.bias, np.full(count, mean), keep=keep)
        for node, (index, size) in self.sizes.items():
            _set_size(graph, node, index, size + changed)
        for y in after:
            dims = list(y.shape or ())
            if y in graph.outputs and len(dims) > 1 and isinstance(dims[1], int):
                dims[1] += changed
                y.shape = ir.Shape(dims)
            elif y not in graph.outputs:
                y.shape = None

    def _values_after(self) -> list[ir.Value]:
        """Return all values whose number of channels changes."""
        values, queue = dict[ir.Value, None](), [layer.node.outputs[0] for layer in self.layers]
        while queue:
            x = queue.pop()
            if x in values:
                continue
            values[x] = None
            for use in x.uses():
                node = use.node
                if node.op_type == "Shape":
                    continue
                if node.op_type == "Split" and node in self.sizes:
                    queue.append(node.outputs[self.sizes[node][0]])
                elif node in self.sizes or node.op_type in ("Concat", *_PASSTHROUGH_OPS):
                    queue += node.outputs
                else:
                    raise PrepareError(
                        f"{node.op_type} {node.name!r} reads {x.name!r}, whose number of classes "
                        "changes\nhint: replace_head follows activations and Concat behind a head"
                    )
        return list(values)


def _constant_sizes(node: ir.Node) -> list[int] | None:
    sizes = node.inputs[1] if len(node.inputs) > 1 else None
    array = None if sizes is None else S.constant_of(sizes)
    return None if array is None else array.tolist()


def _channels_of_reshape(node: ir.Node) -> int | None:
    """Return the second size of a Reshape: of a constant, or of a Concat of sizes."""
    sizes = _constant_sizes(node)
    if sizes is None:
        pieces = node.inputs[1] and node.inputs[1].producer()
        second = pieces.inputs[1] if pieces and len(pieces.inputs) == 3 else None
        array = None if second is None else S.constant_of(second)
        sizes = None if array is None or array.size != 1 else [0, int(array.item())]
    return sizes[1] if sizes is not None and len(sizes) > 1 and sizes[1] > 0 else None


def _conv_channels(x: ir.Value) -> int | None:
    """Return the number of channels of the output of a convolution."""
    node = x.producer()
    if node is None or node.op_type != "Conv" or node.inputs[1] is None:
        return None
    return None if node.inputs[1].const_value is None else _shape(node.inputs[1])[0]


def _set_size(graph: ir.Graph, node: ir.Node, index: int, size: int) -> None:
    """Change a constant size that a node reads; other readers keep theirs."""
    x = node.inputs[1]
    assert x is not None
    array = S.constant_of(x)
    if array is None:
        pieces = x.producer()
        assert pieces is not None
        piece = pieces.inputs[index]
        known = None if piece is None else S.constant_of(piece)
        if known is not None and known.item() == size:  # another level has changed it
            return
        node, slot, array = pieces, index, np.array([size])
    else:
        slot, array = 1, array.copy()
        array[index] = size
    names = {*graph.initializers}
    name = next(f"{x.name}.{i}" for i in range(len(names) + 1) if f"{x.name}.{i}" not in names)
    tensor = ir.Tensor(array.astype(np.int64), name=name)
    value = ir.Value(
        name=name, type=ir.TensorType(tensor.dtype), shape=tensor.shape, const_value=tensor
    )
    graph.register_initializer(value)
    before = node.inputs[slot]
    node.replace_input_with(slot, value)
    if before is not None and before.is_initializer() and not before.uses():
        del graph.initializers[before.name or ""]


def _replace(x: ir.Value, array: np.ndarray, *, keep: bool) -> None:
    assert x.const_value is not None
    _set(x, np.concatenate([x.const_value.numpy(), array]) if keep else array)


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
