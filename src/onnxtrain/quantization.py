"""Quantization-aware training: insert quantizers before training, fold them after it.

``quantize_aware`` inserts the QuantizeLinear and DequantizeLinear pairs that
``onnxruntime.quantization`` inserts, and leaves weights in float, so that
``build(straight_through=True)`` trains them. ``fold_quantizers`` then stores the weights as the
integers that runtimes compute with.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.errors import MissingExtraError, PrepareError
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.io import Source, load, save
from onnxtrain.graph.nodes import is_op, nodes

_TYPES = {
    "int4": "QInt4",
    "uint4": "QUInt4",
    "int8": "QInt8",
    "uint8": "QUInt8",
    "int16": "QInt16",
    "uint16": "QUInt16",
}
_METHODS = {"minmax": "MinMax", "entropy": "Entropy", "percentile": "Percentile"}


def quantize_aware(
    model: Source,
    data: Mapping[str, np.ndarray],
    *,
    weights: str = "int8",
    activations: str = "uint8",
    per_channel: bool = False,
    calibration: str = "minmax",
    operators: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
    batch_size: int = 32,
    **extra_options: Any,
) -> onnx.ModelProto:
    """Return a model with quantizers at activations and weights, ready to be trained with them.

    >>> import onnxtrain
    >>> data = onnxtrain.examples.digits_data(64)
    >>> model = onnxtrain.examples.digits_model()
    >>> model = onnxtrain.quantize_aware(model, {"image": data["image"]})
    >>> options = {"loss": "cross_entropy", "optimizer": "adamw", "straight_through": True}
    >>> artifacts = onnxtrain.build(model, **options)
    >>> [p.name for p in artifacts.manifest.parameters]
    ['fc1.weight', 'fc1.bias', 'fc2.weight', 'fc2.bias']

    With ``train=["*.weight", "*.bias", "*_scale"]`` the scales train too, as in learned step size
    quantization (LSQ).

    Args:
        model: a float model, trained or not.
        data: inputs by name, to measure the ranges of activations; some hundred rows suffice.
        weights: integer type of weights: ``int4``, ``uint4``, ``int8``, ``uint8``, ``int16`` or
            ``uint16``.
        activations: integer type of activations.
        per_channel: one scale for each output channel of a weight.
        calibration: how ranges are measured: ``minmax``, ``entropy`` or ``percentile``.
        operators: types of operators to quantize; by default all that onnxruntime quantizes.
        exclude: names of nodes to leave in float.
        batch_size: rows per run.
        extra_options: further ``extra_options`` of ``onnxruntime.quantization.quantize_static``.

    Raises:
        PrepareError: if an option is unknown, or nothing is quantized.
    """
    quantization = _import_quantization()
    for name, given, known in (
        ("weights", weights, _TYPES),
        ("activations", activations, _TYPES),
        ("calibration", calibration, _METHODS),
    ):
        if given not in known:
            raise PrepareError(
                f"unknown {name}: {given!r} (expected one of {', '.join(map(repr, known))})"
            )
    loaded = load(model)
    inputs = [x.name or "" for x in loaded.graph.inputs]
    missing = [n for n in inputs if n not in data]
    if missing:
        raise PrepareError(f"data lacks the inputs {', '.join(missing)}")
    if not len(data[inputs[0]]):
        raise PrepareError("data has no rows")
    batches = iter(
        {n: np.asarray(data[n][i : i + batch_size]) for n in inputs}
        for i in range(0, len(data[inputs[0]]), batch_size)
    )

    class Reader(quantization.CalibrationDataReader):
        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(batches, None)

    with tempfile.TemporaryDirectory() as folder, _silent():
        source, result = Path(folder) / "float.onnx", Path(folder) / "quantized.onnx"
        save(loaded, source)
        quantization.quantize_static(
            source,
            result,
            Reader(),
            quant_format=quantization.QuantFormat.QDQ,
            op_types_to_quantize=None if operators is None else list(operators),
            per_channel=per_channel,
            activation_type=getattr(quantization.QuantType, _TYPES[activations]),
            weight_type=getattr(quantization.QuantType, _TYPES[weights]),
            nodes_to_exclude=list(exclude),
            calibrate_method=getattr(quantization.CalibrationMethod, _METHODS[calibration]),
            extra_options={
                "AddQDQPairToWeight": True,
                "QuantizeBias": False,
                "QDQKeepRemovableActivations": True,
                **extra_options,
            },
        )
        made = onnx.load(str(result))
    if not any(n.op_type == "QuantizeLinear" for n in made.graph.node):
        raise PrepareError("no operator of the model is quantized\nhint: choose other operators")
    return made


def _import_quantization() -> Any:
    try:
        from onnxruntime import quantization
    except ImportError as error:
        raise MissingExtraError(
            'onnxruntime is not installed\nhint: pip install "onnxtrain[cpu]" (or [gpu])'
        ) from error
    return quantization


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Silence the root logger, on which the quantizer advises to preprocess the model."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def fold_quantizers(model: Source) -> onnx.ModelProto:
    """Return a model whose quantized weights are stored as integers.

    QuantizeLinear of a weight is computed. Biases of Conv and Gemm between quantized inputs and
    weights become 32-bit integers, so that onnxruntime computes these operators in integers.
    """
    work = load(model)
    graph = work.graph
    for node in nodes(graph, "QuantizeLinear"):
        weight = _fold_weight(node)
        if weight is not None:
            graph.register_initializer(weight)
            node.outputs[0].replace_all_uses_with(weight)
            graph.remove(node, safe=True)
    op = OpBuilder(graph, "fold/")
    for node in nodes(graph, "Conv", "Gemm"):
        _fold_bias(op, node)
    unused = [n for n, x in graph.initializers.items() if not x.uses() and x not in graph.outputs]
    for name in unused:
        del graph.initializers[name]
    return ir.to_proto(work)


def _constant(x: ir.Value | None) -> np.ndarray | None:
    if x is None or x.const_value is None or not x.is_initializer():
        return None
    return x.const_value.numpy()


def _fold_weight(node: ir.Node) -> ir.Value | None:
    """Return the quantized tensor of a QuantizeLinear of constants, as an initializer."""
    x, scale, *rest = node.inputs
    array, step = _constant(x), _constant(scale)
    point = rest[0] if rest else None
    blocks = node.attributes.get("block_size")
    if array is None or step is None or (blocks is not None and blocks.as_int()):
        return None
    kind = node.outputs[0].dtype if point is None else point.dtype
    if kind is None or not kind.is_integer() or (point is not None and _constant(point) is None):
        return None
    axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 1
    shape = [1] * array.ndim
    if step.ndim:
        shape[axis] = -1
    zero = np.zeros(1) if point is None else np.asarray(_constant(point)).astype(np.float64)
    levels = np.rint(array / step.reshape(shape)) + zero.reshape(shape if zero.ndim else [])
    low, high = _limits(kind)
    assert x is not None
    integers = np.clip(levels, low, high).astype(kind.numpy())
    return ir.Value(
        name=f"{x.name}.quantized",
        type=ir.TensorType(kind),
        shape=ir.Shape(array.shape),
        const_value=ir.Tensor(integers, dtype=kind, name=f"{x.name}.quantized"),
    )


def _limits(kind: ir.DataType) -> tuple[int, int]:
    bits = kind.bitwidth
    return (-(1 << bits - 1), (1 << bits - 1) - 1) if kind.is_signed() else (0, (1 << bits) - 1)


def _fold_bias(op: OpBuilder, node: ir.Node) -> None:
    """Store the bias in 32 bits, with the scale of the products of input and weight."""
    if len(node.inputs) < 3 or node.inputs[2] is None:
        return
    scales = []
    for x in node.inputs[:2]:
        source = None if x is None else x.producer()
        scale = None
        if source is not None and is_op(source, "DequantizeLinear"):
            scale = _constant(source.inputs[1])
        if scale is None:
            return
        scales.append(scale.astype(np.float64))
    bias = node.inputs[2]
    array = _constant(bias)
    if array is None or scales[0].size != 1 or scales[1].size not in (1, array.size):
        return
    step = (scales[0].reshape(()) * scales[1]).astype(np.float32)
    levels = np.clip(np.rint(array / step), -(2**31), 2**31 - 1).astype(np.int32)
    stored = ir.Value(
        name=f"{bias.name}.quantized",
        type=ir.TensorType(ir.DataType.INT32),
        shape=ir.Shape(levels.shape),
        const_value=ir.Tensor(levels, name=f"{bias.name}.quantized"),
    )
    op.graph.register_initializer(stored)
    before = OpBuilder(op.graph, "fold/", before=node)
    axis = {"axis": 0} if step.ndim and step.size > 1 else {}
    scale = before.const(step if axis else step.reshape(()))
    node.replace_input_with(2, before.DequantizeLinear(stored, scale, **axis))
