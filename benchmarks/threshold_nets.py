"""Small nets with sizes around each threshold of `onnxtrain.thresholds`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.graph.builder import OpBuilder

Image = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Net:
    """A model with fixed sizes, its loss, and a batch for it."""

    model: onnx.ModelProto
    loss: Any
    batch: tuple[np.ndarray, ...]


@dataclasses.dataclass(frozen=True)
class Case:
    """How a threshold is measured.

    Attributes:
        side: on which side of the threshold its variant is used: "up to", "below" or "from".
        counts: what the threshold counts.
        nets: functions that make nets, by the size that is compared with the threshold.
    """

    side: str
    counts: str
    nets: dict[float, Callable[[], Net]]


def mean_square(op: OpBuilder, y: ir.Value) -> ir.Value:
    """Return the mean square of the output, a loss without targets."""
    return op.ReduceMean(op.Mul(y, y), keepdims=0)


def _net(
    shape: Sequence[int],
    body: Callable[[OpBuilder, ir.Value, Callable[..., ir.Value]], ir.Value],
    labels: int | None = None,
) -> Net:
    """Return a net whose input is scaled by a parameter, so that the input needs a gradient."""
    rng = np.random.default_rng(0)
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="net")
    op = OpBuilder(graph)

    def parameter(*sizes: int, ones: bool = False) -> ir.Value:
        scale = 1.0 / math.sqrt(max(math.prod(sizes[1:]), 1))
        array = np.ones(sizes) if ones else rng.standard_normal(sizes) * scale
        name = op.names.fresh("p")
        tensor = ir.Tensor(array.astype(np.float32), name=name)
        value = ir.Value(name=name, const_value=tensor, shape=tensor.shape)
        value.type = ir.TensorType(ir.DataType.FLOAT)
        graph.register_initializer(value)
        return value

    x = op.input("x", ir.DataType.FLOAT, list(shape))
    scale = parameter(shape[1], *[1] * (len(shape) - 2), ones=True)
    y = body(op, op.Mul(x, scale), parameter)
    y.name = "y"
    graph.outputs.append(y)
    batch = [rng.standard_normal(shape).astype(np.float32)]
    if labels is not None:
        batch.append(rng.integers(0, labels, shape[0]))
    model = ir.to_proto(ir.Model(graph, ir_version=10))
    return Net(model, mean_square if labels is None else "cross_entropy", tuple(batch))


def conv(
    batch: int, channels: int, outs: int, image: Image, kernel: int = 3, stride: int = 1
) -> Callable[[], Net]:
    """Return a function that makes a convolution; ``outs=0`` makes it depthwise."""
    group = 1 if outs else channels
    pads = [(kernel - 1) // 2] * 2 + [kernel // 2] * 2

    def body(op: OpBuilder, x: ir.Value, parameter: Callable[..., ir.Value]) -> ir.Value:
        w = parameter(outs or channels, channels // group, kernel, kernel)
        y = op.Conv(x, w, group=group, kernel_shape=[kernel] * 2, pads=pads, strides=[stride] * 2)
        return op.Relu(y)

    return lambda: _net([batch, channels, *image], body)


def batch_norm(batch: int, channels: int, image: Image) -> Callable[[], Net]:
    """Return a function that makes a batch normalization."""

    def body(op: OpBuilder, x: ir.Value, parameter: Callable[..., ir.Value]) -> ir.Value:
        scale, bias = parameter(channels, ones=True), parameter(channels)
        mean, var = parameter(channels), parameter(channels, ones=True)
        return op.Relu(op.BatchNormalization(x, scale, bias, mean, var))

    return lambda: _net([batch, channels, *image], body)


def average_pool(batch: int, channels: int, size: int) -> Callable[[], Net]:
    """Return a function that makes an average over overlapping windows."""

    def body(op: OpBuilder, x: ir.Value, parameter: Callable[..., ir.Value]) -> ir.Value:
        return op.AveragePool(x, kernel_shape=[3, 3], pads=[1] * 4, strides=[2, 2])

    return lambda: _net([batch, channels, size, size], body)


def linear(rows: int, width: int, out: int) -> Callable[[], Net]:
    """Return a function that makes a linear layer with bias, with its weight stored as in torch."""

    def body(op: OpBuilder, x: ir.Value, parameter: Callable[..., ir.Value]) -> ir.Value:
        return op.Relu(op.Gemm(x, parameter(out, width), parameter(out), transB=1))

    return lambda: _net([rows, width], body)


def transposed_linear(rows: int, width: int, out: int) -> Callable[[], Net]:
    """Return a function that makes a linear layer whose weight is stored as ``[in, out]``."""

    def body(op: OpBuilder, x: ir.Value, parameter: Callable[..., ir.Value]) -> ir.Value:
        return op.Relu(op.MatMul(x, parameter(width, out)))

    return lambda: _net([rows, width], body)


def classes(rows: int, width: int, count: int) -> Callable[[], Net]:
    """Return a function that makes a layer of scores with cross entropy."""

    def body(op: OpBuilder, x: ir.Value, parameter: Callable[..., ir.Value]) -> ir.Value:
        return op.MatMul(x, parameter(width, count))

    return lambda: _net([rows, width], body, labels=count)


def _images(images: Sequence[Image], **options: Any) -> dict[float, Callable[[], Net]]:
    """Return convolutions without stride by the positions of their output."""
    return {h * w: conv(image=(h, w), **options) for h, w in images}


def _pairs(
    images: Sequence[Image], stride: int, channels: int, batch: int
) -> dict[float, Callable[[], Net]]:
    """Return depthwise convolutions by their pairs of an input and an output position."""
    return {
        (h * w) ** 2 // stride**2: conv(batch, channels, 0, (h, w), stride=stride)
        for h, w in images
    }


POSITIONS, PAIRS = "output positions", "pairs of positions"
TINY: list[Image] = [(2, 4), (4, 4), (4, 8)]

CASES: dict[str, Case] = {
    "CONV_FORWARD_MATMUL_POSITIONS": Case(
        "up to",
        POSITIONS,
        _images([(2, 2), (2, 4), (4, 4)], batch=256, channels=128, outs=128),
    ),
    "CONV_FORWARD_MATMUL_ROWS": Case(
        "up to",
        "windows of a batch",
        {16 * n: conv(n, 128, 128, (4, 4)) for n in (16, 32, 64)},
    ),
    "UNROLLED_TAPS": Case(
        "up to", "taps", {k * k: conv(8, 16, 16, (24, 24), k) for k in (6, 8, 11)}
    ),
    "SMALL_KERNEL_TAPS": Case(
        "up to", "taps", {k * k: conv(32, 64, 64, (8, 8), k) for k in (2, 3, 4)}
    ),
    "NARROW_CHANNELS": Case(
        "below", "input channels", {c: conv(16, c, 32, (28, 28)) for c in (4, 8, 16)}
    ),
    "TINY_IMAGE_POSITIONS": Case(
        "up to", POSITIONS, _images(TINY, batch=32, channels=128, outs=128, kernel=5)
    ),
    "IM2COL_WEIGHT_GRAD_POSITIONS": Case(
        "up to",
        POSITIONS,
        _images([(4, 8), (8, 8), (8, 16)], batch=32, channels=64, outs=64),
    ),
    "IM2COL_WEIGHT_GRAD_POSITIONS_ONE_TAP": Case(
        "up to",
        POSITIONS,
        _images([(3, 3), (4, 4), (4, 8)], batch=64, channels=128, outs=128, kernel=1),
    ),
    "DEPTHWISE_WEIGHT_GRAD_PAIRS": Case(
        "up to", PAIRS, _pairs([(7, 10), (10, 10), (10, 14)], stride=1, channels=128, batch=16)
    ),
    "DEPTHWISE_WEIGHT_GRAD_PAIRS_STRIDED": Case(
        "up to", PAIRS, _pairs([(12, 14), (16, 16), (16, 22)], stride=2, channels=128, batch=16)
    ),
    "COL2IM_INPUT_GRAD_POSITIONS": Case(
        "up to", POSITIONS, _images(TINY, batch=32, channels=128, outs=128)
    ),
    "COL2IM_INPUT_GRAD_POSITIONS_WIDE": Case(
        "up to",
        POSITIONS,
        _images([(4, 6), (7, 7), (7, 14)], batch=8, channels=256, outs=256),
    ),
    "WIDE_OUTPUT_CHANNELS": Case(
        "from", "output channels", {c: conv(8, 128, c, (5, 5)) for c in (128, 256, 512)}
    ),
    "DEPTHWISE_INPUT_GRAD_PAIRS": Case(
        "up to", PAIRS, _pairs([(5, 9), (8, 8), (9, 10)], stride=1, channels=128, batch=16)
    ),
    "WINDOW_MATRIX_SIZE": Case(
        "up to", "size of an axis", {n: average_pool(2, 8, n) for n in (64, 128, 256)}
    ),
    "REPEATED_POSITIONS": Case(
        "up to",
        "positions",
        {h * w: batch_norm(16, 256, (h, w)) for h, w in ((4, 4), (4, 8), (8, 8))},
    ),
    "SOFTMAX_CLASSES": Case("from", "classes", {n: classes(256, 64, n) for n in (128, 256, 512)}),
    "SCALED_COLUMNS": Case("from", "columns", {n: classes(256, 64, n) for n in (256, 512, 1024)}),
    "SCALED_COLUMNS_PER_RESULT": Case(
        "from", "columns per column", {r: classes(256, 1024 // r, 1024) for r in (1, 2, 4)}
    ),
    "TRANSPOSED_WEIGHT_ELEMENTS": Case(
        "from",
        "elements of a weight",
        {m * n: transposed_linear(512, m, n) for m, n in ((128, 512), (128, 1024), (256, 1024))},
    ),
    "TRANSPOSED_COLUMNS_RATIO": Case(
        "from",
        "columns per column",
        {r: transposed_linear(512, 256, int(256 * r)) for r in (2.0, 3.0, 6.0)},
    ),
    "TRANSPOSED_RESULT_ROWS": Case(
        "from", "rows of a weight", {m: linear(512, 64, m) for m in (1000, 2000, 4000)}
    ),
    "TRANSPOSED_RESULT_OPERAND_ROWS": Case(
        "from", "rows of the operands", {n: linear(n, 64, 4000) for n in (256, 512, 1024)}
    ),
}
"""By the name of the threshold."""

CUDA_SIDES = {
    "PADDED_VOCABULARY_CLASSES": "from",
    "PADDED_ATTENTION_KEYS": "from",
    "MASK_IN_MATMUL_RATIO": "from",
    "FUSED_RUNNING_STATS": "from",
    "CHANNEL_SCALE_FOLD_RATIO": "from",
    "LONG_ATTENTION_RATIO": "from",
    "ATTENTION_CHUNK_BYTES": "from",
    "MEMORY_BOUND_ELEMENTS": "from",
    "REMATERIALIZE_BYTES": "from",
    "NORM_KERNEL_POSITIONS": "from",
    "GROUP_NORM_KERNEL_ROWS": "from",
    "AFFINE_KERNEL_CHANNELS": "from",
    "DEPTHWISE_WEIGHT_GRAD_PAIRS_GPU": "up to",
    "DEPTHWISE_WEIGHT_GRAD_ROW_PAIRS_GPU": "up to",
    "FLOAT32_ACCUMULATION_ROWS": "from",
    "ONE_HOT_ROWS": "up to",
    "SCATTER_ROW_ELEMENTS": "from",
    "COALESCED_BROADCAST_ELEMENTS": "from",
    "ROW_SUBTRACTION_COLUMN_RATIO": "from",
}
"""Thresholds of NVIDIA GPUs: on which side of each its variant is used."""
