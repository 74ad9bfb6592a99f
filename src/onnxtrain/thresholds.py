"""Sizes at which one variant of a computation becomes faster than another.

Variants compute the same values; which one is faster depends on size and machine. Names say what is
counted. Modules read thresholds as attributes (`T.UNROLLED_TAPS`) when they are called, so that
tests and benchmarks can change one.

Each section says which command measures its thresholds. `python -m benchmarks.passes` measures
whole training steps of nets with and without the variant, and `python -m benchmarks.passes --sizes
NAME` small nets around the threshold. docs/speed.md has both tables. A new threshold
needs a line in `benchmarks/threshold_nets.py` to be measured.
"""

from __future__ import annotations

# Convolutions on the CPU: `python -m benchmarks.passes --sizes NAME`.

CONV_FORWARD_MATMUL_POSITIONS = 8
"""Up to this many output positions, a forward convolution is one matmul over the batch."""
CONV_FORWARD_MATMUL_ROWS = 512
"""The same with twice the positions, up to this many windows in the batch."""

UNROLLED_TAPS = 64
"""Up to this many taps, the weight gradient has one slice per tap; beyond, one convolution."""
SMALL_KERNEL_TAPS = 9
"""Up to this many taps, the weight gradient copies what all windows read to one matrix."""
NARROW_CHANNELS = 8
"""Below this many input channels, taps share one matmul, because one per tap is too small."""
TINY_IMAGE_POSITIONS = 16
"""Up to this many output positions, larger kernels use a convolution with one more axis."""
IM2COL_WEIGHT_GRAD_POSITIONS = 64
"""Up to this many output positions, the weight gradient is one matmul with im2col."""
IM2COL_WEIGHT_GRAD_POSITIONS_ONE_TAP = 16
"""The same for kernels with one tap."""
DEPTHWISE_WEIGHT_GRAD_PAIRS = 10_000
"""Up to this many pairs of input and output positions, a depthwise weight gradient computes all."""
DEPTHWISE_WEIGHT_GRAD_PAIRS_STRIDED = 16_384
"""The same for strided convolutions."""
COL2IM_INPUT_GRAD_POSITIONS = 16
"""Up to this many output positions, the input gradient is a matmul and Col2Im."""
COL2IM_INPUT_GRAD_POSITIONS_WIDE = 49
"""The same for at least `WIDE_OUTPUT_CHANNELS` channels."""
WIDE_OUTPUT_CHANNELS = 256
"""From this many output channels on, a convolution counts as wide."""
DEPTHWISE_INPUT_GRAD_PAIRS = 4096
"""Up to this many pairs of positions, a depthwise input gradient is one matmul per channel."""

# Other operators on the CPU: `python -m benchmarks.passes --sizes NAME`.

WINDOW_MATRIX_SIZE = 128
"""Up to this size of an axis, the gradient of pooling sums is a matmul; beyond, a convolution."""
REPEATED_POSITIONS = 32
"""Up to this many positions, vectors per channel are expanded to all of them."""
SOFTMAX_CLASSES = 256
"""From this many classes on, cross entropy computes Softmax, and logarithms at labels only."""
SCALED_COLUMNS = 512
"""From this many columns on, a scale of rows moves behind the matmuls that read the matrix."""
SCALED_COLUMNS_PER_RESULT = 2
"""It moves if the matrix is this many times as wide as what is scaled instead."""
TRANSPOSED_WEIGHT_ELEMENTS = 1 << 17
"""From this many elements of a weight on, its gradient transposes a narrow left operand first."""
TRANSPOSED_COLUMNS_RATIO = 3
"""An operand is narrower if the other one has this many times its columns."""
TRANSPOSED_RESULT_ROWS = 2000
"""From this many rows of a weight on, its gradient is computed transposed."""
TRANSPOSED_RESULT_OPERAND_ROWS = 512
"""The same, from this many rows of the operands on."""

# Operators on NVIDIA GPUs: `python -m benchmarks.passes --target cuda`, and where a comment says so
# `python -m benchmarks.cuda.forms`, which times single operators.

DEPTHWISE_WEIGHT_GRAD_PAIRS_GPU = 100_000  # benchmarks.cuda.forms weight
"""Up to this many pairs of positions, a depthwise weight gradient computes all."""
DEPTHWISE_WEIGHT_GRAD_ROW_PAIRS_GPU = 1 << 16  # benchmarks.cuda.forms weight
"""Up to this many pairs of positions in a row, it computes pairs of rows instead."""
FLOAT32_ACCUMULATION_ROWS = 16384
"""From this many rows on, 16-bit sums are computed in float32."""
CHANNEL_SCALE_FOLD_RATIO = 3
"""From this many times a weight's elements on, a gradient's channel scale goes into the weight.

Two passes over the weight and its gradient replace one over the activation.
"""
SCATTER_ROW_ELEMENTS = 16
"""From this many elements on, scattered rows get an index per element."""
ONE_HOT_ROWS = 1024
"""Up to this many rows, rows are added to a table by a matmul with one-hot vectors."""
COALESCED_BROADCAST_ELEMENTS = 1 << 16
"""From this many elements on, axes that a broadcast treats alike are coalesced."""
ROW_SUBTRACTION_COLUMN_RATIO = 6
"""From this ratio of a matmul's columns to its inner size on, it also subtracts from its rows.

Two copies of the operands replace a pass over the result.
"""
NORM_KERNEL_POSITIONS = 128  # benchmarks.cuda.forms norm
"""From this many positions of an image on, normalization kernels beat elementwise passes."""
GROUP_NORM_KERNEL_ROWS = 64
"""From this many rows on, a group of channels is one row; below, images are normalized one by one.

A GPU works on about this many rows at a time.
"""
AFFINE_KERNEL_CHANNELS = 512
"""Channels that the kernel for per-channel scale and bias gets, if possible.

It runs a block per channel, and a GPU runs a few blocks per multiprocessor.
"""
PADDED_VOCABULARY_CLASSES = 4096
"""From this many classes on, unaligned rows of logits are padded."""
PADDED_ATTENTION_KEYS = 64
"""From this many keys and queries on, unaligned rows of attention scores are padded."""
PADDED_ATTENTION_SCORES = 1 << 20
"""The same, from this many scores of the batch on."""
MASK_IN_MATMUL_RATIO = 8
"""From this many times the width of a head on, padded keys are masked inside the matmul."""
LONG_ATTENTION_RATIO = 16
"""From this many times the width of a head on, attention scores are recomputed, not stored."""
ATTENTION_CHUNK_BYTES = 256 << 20
"""Bytes of such scores at a time; more are computed in chunks of the batch."""
MEMORY_BOUND_ELEMENTS = 1 << 18
"""From this many elements on, an elementwise pass takes longer than the launch of its kernel."""
REMATERIALIZE_BYTES = 4 << 20
"""From this many bytes on, values that one pass recomputes are not stored.

Below, launching the kernel takes longer than the pass.
"""

# The update and memory of a step: `python -m benchmarks`, with `--threads 2` for threads, and
# `python -m benchmarks.cuda.real` for devices.

UPDATE_CHUNK_ELEMENTS = 1 << 15
"""Elements that the CPU updates at a time; with their state they fit the second-level cache."""
UPDATE_CHUNKS_PER_THREAD = 8
"""From this many chunks per thread on, waking another thread costs less than it saves."""
STAGED_BATCH_BYTES = 4 << 20
"""From this many bytes on, threads copy a batch to pinned memory."""
DEVICE_UPDATE_CHUNK_ELEMENTS = 1 << 24
"""Elements that a device updates at a time: enough to keep it busy."""
SECOND_COPY_BYTES = 64 << 20
"""From this many bytes of parameters and state on, a second copy costs more than another call."""
FUSED_SGD_REMAINING_PARAMETERS = 8
"""Up to this many parameters without a matmul gradient, SGD updates them in the training graph."""
DEQUANTIZE_AT_USE_ELEMENTS = 1 << 12
"""From this many elements on, a frozen quantized weight is dequantized each time it is read.

Below, the memory saved is less than the extra nodes take.
"""

# The web: `make bench-web`.

DEPTHWISE_WEIGHT_GRAD_PAIRS_MATMUL = 4096
"""Pairs of positions of a depthwise weight gradient, for targets with fast matmuls only."""
PACKED_PARAMETER_ELEMENTS = 1 << 14
"""Up to this many elements, parameters are updated together; beyond, copies cost too much."""
FLATTENED_PARAMETER_ELEMENTS = 1 << 18
"""The same on WebGPU."""
FLATTENED_VECTOR_ELEMENTS = 1 << 22
"""Elements of such a vector at most: four of them fit one WebGPU buffer."""
MULTI_STEP_BYTES = 20_000_000
"""Up to this many bytes of parameters and state, a call runs several steps on wasm."""
STEPS_PER_CALL = 8
"""Number of these steps."""

# Losses over large vocabularies: memory.

CHUNKED_LOSS_CLASSES = 1 << 12
"""From this many classes on, the loss of a language model is computed in chunks of rows.

Below, the logits of a batch are smaller than what a layer stores.
"""
LOSS_CHUNK_CLASSES = 1 << 11
"""Words of a frozen, packed last layer that are unpacked at a time.

2,048 words of 576 elements are 5 MB. Twice as many are not faster.
"""
LOSS_CHUNK_SCORES = 1 << 22
"""Logits computed at a time: 16 MB, and as much again for the loss.

With fewer, the packed weights of the last layer are unpacked too often.
"""

# Limits of file sizes, build times and kernels; not a matter of speed.

SHARED_CONSTANT_ELEMENTS = 64
"""Up to this many elements, equal constants are merged. Limits the bytes compared."""
STORED_INDEX_ELEMENTS = 4096
"""Up to this many elements, a file stores their indices; beyond, a Range computes them."""
CONSTANT_INDEX_ELEMENTS = 1 << 16
"""Up to this many indices are computed while a gradient is built."""
WINDOW_TABLE_ELEMENTS = 1 << 20
"""Up to this many reads of an image, a file stores their positions, for groups of channels."""
ONE_HOT_ELEMENTS = 1 << 24
"""Elements of a one-hot matrix at most. Limits memory."""
SCATTER_INDEX_ELEMENTS = 1 << 23
"""Indices of a scatter per element at most; beyond, one index covers several elements."""
CONSTANT_MASK_ELEMENTS = 1 << 22
"""Up to this many distinct elements, a file stores a mask that depends on no input."""
COMPUTED_MASK_ELEMENTS = 1 << 25
"""Up to this many elements, such a mask is computed at build time."""
FUSED_SOFTMAX_COLUMNS = 1024
"""Up to this many columns, onnxruntime fuses a mask into the softmax that reads it."""
CUDA_GRAPH_CONCAT_INPUTS = 32
"""Operands that onnxruntime's CUDA Concat takes at most during graph capture."""
UNROLLED_LOOP_NODES = 1 << 14
"""Up to this many nodes, loops of a known number of steps are unrolled for graph capture."""
FUSED_RUNNING_STATS = 3
"""From this many running statistics of one length on, updating them together saves kernels."""
