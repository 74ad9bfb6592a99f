"""Small nets that meet the choices of ``onnxtrain.thresholds``, at sizes around each of them."""

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
    """Where a threshold chooses.

    Attributes:
        side: on which side of the threshold its form is used: "up to", "below" or "from" it on.
        counts: what is counted, in words.
        nets: makers of nets by the size that the threshold is compared with.
    """

    side: str
    counts: str
    nets: dict[float, Callable[[], Net]]


def mean_square(op: OpBuilder, y: ir.Value) -> ir.Value:
    """Return a loss that needs no target."""
    return op.ReduceMean(op.Mul(y, y), keepdims=0)


def _net(
    shape: Sequence[int],
    body: Callable[[OpBuilder, ir.Value, Callable[..., ir.Value]], ir.Value],
    labels: int | None = None,
) -> Net:
    """Return a net of one input that is scaled by a parameter, so that it needs a gradient, too."""
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
    """Return a maker of a convolution; ``outs=0`` makes it depthwise."""
    group = 1 if outs else channels
    pads = [(kernel - 1) // 2] * 2 + [kernel // 2] * 2

    def body(op: OpBuilder, x: ir.Value, parameter: Callable[..., ir.Value]) -> ir.Value:
        w = parameter(outs or channels, channels // group, kernel, kernel)
        y = op.Conv(x, w, group=group, kernel_shape=[kernel] * 2, pads=pads, strides=[stride] * 2)
        return op.Relu(y)

    return lambda: _net([batch, channels, *image], body)


def batch_norm(batch: int, channels: int, image: Image) -> Callable[[], Net]:
    """Return a maker of a normalisation over the batch."""

    def body(op: OpBuilder, x: ir.Value, parameter: Callable[..., ir.Value]) -> ir.Value:
        scale, bias = parameter(channels, ones=True), parameter(channels)
        mean, var = parameter(channels), parameter(channels, ones=True)
        return op.Relu(op.BatchNormalization(x, scale, bias, mean, var))

    return lambda: _net([batch, channels, *image], body)


def average_pool(batch: int, channels: int, size: int) -> Callable[[], Net]:
    """Return a maker of an average over overlapping windows."""

    def body(op: OpBuilder, x: ir.Value, parameter: Callable[..., ir.Value]) -> ir.Value:
        return op.AveragePool(x, kernel_shape=[3, 3], pads=[1] * 4, strides=[2, 2])

    return lambda: _net([batch, channels, size, size], body)


def linear(rows: int, width: int, out: int) -> Callable[[], Net]:
    """Return a maker of a linear layer with bias, its weight stored as torch's."""

    def body(op: OpBuilder, x: ir.Value, parameter: Callable[..., ir.Value]) -> ir.Value:
        return op.Relu(op.Gemm(x, parameter(out, width), parameter(out), transB=1))

    return lambda: _net([rows, width], body)


def turned_linear(rows: int, width: int, out: int) -> Callable[[], Net]:
    """Return a maker of a linear layer whose weight is stored as ``[in, out]``."""

    def body(op: OpBuilder, x: ir.Value, parameter: Callable[..., ir.Value]) -> ir.Value:
        return op.Relu(op.MatMul(x, parameter(width, out)))

    return lambda: _net([rows, width], body)


def layer_norm(rows: int, width: int, out: int) -> Callable[[], Net]:
    """Return a maker of a layer normalisation in front of a linear layer."""

    def body(op: OpBuilder, x: ir.Value, parameter: Callable[..., ir.Value]) -> ir.Value:
        normal = op.LayerNormalization(x, parameter(width, ones=True), parameter(width), axis=-1)
        return op.Relu(op.Add(op.MatMul(normal, parameter(width, out)), parameter(out)))

    return lambda: _net([rows, width], body)


def classes(rows: int, width: int, count: int) -> Callable[[], Net]:
    """Return a maker of a layer of scores with cross entropy."""

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
    "NORM_ROWS_PER_COLUMN": Case(
        "from",
        "rows per column",
        {r: layer_norm(int(256 * r), 256, 256) for r in (0.75, 1.5, 3.0)},
    ),
    "SCALED_COLUMNS": Case("from", "columns", {n: classes(256, 64, n) for n in (256, 512, 1024)}),
    "SCALED_COLUMNS_PER_RESULT": Case(
        "from", "columns per column", {r: classes(256, 1024 // r, 1024) for r in (1, 2, 4)}
    ),
    "TRANSPOSED_WEIGHT_ELEMENTS": Case(
        "from",
        "elements of a weight",
        {m * n: turned_linear(512, m, n) for m, n in ((128, 512), (128, 1024), (256, 1024))},
    ),
    "TRANSPOSED_COLUMNS_RATIO": Case(
        "from",
        "columns per column",
        {r: turned_linear(512, 256, int(256 * r)) for r in (2.0, 3.0, 6.0)},
    ),
    "TRANSPOSED_RESULT_ROWS": Case(
        "from", "rows of a weight", {m: linear(512, 64, m) for m in (1000, 2000, 4000)}
    ),
    "TRANSPOSED_RESULT_OPERAND_ROWS": Case(
        "from", "rows of the operands", {n: linear(n, 64, 4000) for n in (256, 512, 1024)}
    ),
    "BIAS_COLUMN_ROWS": Case("from", "rows", {n: linear(n, 256, 2048) for n in (128, 256, 512)}),
    "BIAS_COLUMN_RATIO": Case(
        "from", "columns per column", {r: linear(1024, 256, 256 * r) for r in (1, 2, 4)}
    ),
    "BIAS_COLUMN_ELEMENTS": Case(
        "from",
        "elements of the result",
        {n * 512: linear(n, 128, 512) for n in (256, 512, 1024)},
    ),
}
"""By the name of the threshold."""

NOT_MEASURED: dict[str, str] = {
    "SHARED_CONSTANT_ELEMENTS": "bounds what is compared, no choice of speed",
    "STORED_INDEX_ELEMENTS": "bounds the size of a file, no choice of speed",
    "DEPTHWISE_WEIGHT_GRAD_PAIRS_MATMUL": (
        "for GPUs in browsers, of which `make bench-web` times whole steps"
    ),
    "PACKED_PARAMETER_ELEMENTS": "for wasm, of which `make bench-web` times whole steps",
    "FLATTENED_PARAMETER_ELEMENTS": "for GPUs in browsers; `make bench-web` times whole steps",
    "FLATTENED_VECTOR_ELEMENTS": "bounds the size of a buffer, no choice of speed",
    "MULTI_STEP_BYTES": "for wasm, of which `make bench-web` times whole steps",
    "STEPS_PER_CALL": "for wasm, of which `make bench-web` times whole steps",
    "UPDATE_CHUNK_ELEMENTS": "cuts the update, not a graph: `python -m benchmarks`",
    "UPDATE_CHUNKS_PER_THREAD": "needs several threads: `python -m benchmarks --threads 2`",
    "DEVICE_UPDATE_CHUNK_ELEMENTS": "for GPUs: `python -m benchmarks.cuda.real --only vit`",
    "SECOND_COPY_BYTES": "chooses the memory of a step: `python -m benchmarks`",
    "PADDED_VOCABULARY_CLASSES": "for NVIDIA GPUs: `python -m benchmarks.cuda.real --only gpt2`",
    "PADDED_ATTENTION_KEYS": "for NVIDIA GPUs: `python -m benchmarks.cuda.real --only vit`",
    "PADDED_ATTENTION_SCORES": "for NVIDIA GPUs: `python -m benchmarks.cuda.real --only vit`",
    "MASK_IN_MATMUL_RATIO": "for NVIDIA GPUs: `python -m benchmarks.cuda.real --only whisper`",
    "CUDA_GRAPH_CONCAT_INPUTS": "what onnxruntime refuses beyond, no choice of speed",
    "FUSED_RUNNING_STATS": "where joining takes fewer kernels, no choice of speed",
    "CHANNEL_SCALE_FOLD_RATIO": "for NVIDIA GPUs: `python -m benchmarks.cuda.real --only resnet50`",
    "STAGED_BATCH_BYTES": "for NVIDIA GPUs: `python -m benchmarks.cuda.real --only resnet50`",
    "DEQUANTIZE_AT_USE_ELEMENTS": "bounds what is kept in memory, no choice of speed",
    "LOSS_CHUNK_SCORES": "bounds what is kept in memory, no choice of speed",
    "CHUNKED_LOSS_CLASSES": "bounds what is kept in memory, no choice of speed",
    "LOSS_CHUNK_CLASSES": "bounds what is kept in memory, no choice of speed",
    "LONG_ATTENTION_RATIO": "for NVIDIA GPUs: `python -m benchmarks.cuda.real --only whisper`",
    "ATTENTION_CHUNK_BYTES": "for NVIDIA GPUs: `python -m benchmarks.cuda.real --only whisper`",
    "MEMORY_BOUND_ELEMENTS": "for NVIDIA GPUs: `python -m benchmarks.cuda.real --only gpt2`",
    "REMATERIALIZE_BYTES": "for NVIDIA GPUs: `python -m benchmarks.cuda.real --only bert`",
    "NORM_KERNEL_POSITIONS": "for NVIDIA GPUs: `python -m benchmarks.cuda.forms norm`",
    "GROUP_NORM_KERNEL_ROWS": "for NVIDIA GPUs: `python -m benchmarks.cuda.real --only unet`",
    "AFFINE_KERNEL_CHANNELS": "for NVIDIA GPUs: `python -m benchmarks.cuda.real --only unet`",
    "DEPTHWISE_WEIGHT_GRAD_PAIRS_GPU": "for NVIDIA GPUs: `python -m benchmarks.cuda.forms weight`",
    "FLOAT32_ACCUMULATION_ROWS": "for NVIDIA GPUs: `python -m benchmarks.cuda.real`",
    "CONSTANT_INDEX_ELEMENTS": "bounds the time of a build, no choice of speed",
    "ONE_HOT_ROWS": "for NVIDIA GPUs: `python -m benchmarks.cuda.real --only bert`",
    "ONE_HOT_ELEMENTS": "bounds what is kept in memory, no choice of speed",
    "SCATTER_ROW_ELEMENTS": "for NVIDIA GPUs: `python -m benchmarks.cuda.real --only bert`",
    "SCATTER_INDEX_ELEMENTS": "bounds what is kept in memory, no choice of speed",
    "WINDOW_TABLE_ELEMENTS": "bounds the size of a file, no choice of speed",
    "DEPTHWISE_WEIGHT_GRAD_ROW_PAIRS_GPU": (
        "for NVIDIA GPUs: `python -m benchmarks.cuda.forms weight`"
    ),
    "CONSTANT_MASK_ELEMENTS": "bounds the size of a file, no choice of speed",
    "COMPUTED_MASK_ELEMENTS": "bounds the memory of a build, no choice of speed",
    "COALESCED_BROADCAST_ELEMENTS": "for NVIDIA GPUs: `python -m benchmarks.cuda.real`",
    "ROW_SUBTRACTION_COLUMN_RATIO": "for NVIDIA GPUs: `python -m benchmarks.cuda.real --only gpt2`",
    "FUSED_SOFTMAX_COLUMNS": "what onnxruntime's kernel takes, no choice of speed",
    "FUSED_SGD_REMAINING_PARAMETERS": "chooses between one call and two: `python -m benchmarks`",
}
"""Thresholds that choose between no forms of a graph on one CPU thread, with the reason."""

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
