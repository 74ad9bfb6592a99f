"""Sizes at which one form gives way to another, all in one place.

The forms give the same numbers; on which side of a size each is faster depends on the machine.
``python -m benchmarks.thresholds`` measures them, and docs/speed.md has its table. Names say what
is counted. Modules read them as attributes when they are called (``T.FORWARD_PRODUCT_POSITIONS``),
so that a test or the benchmark can change one.
"""

from __future__ import annotations

# Convolutions: the forward pass.

CONV_FORWARD_MATMUL_POSITIONS = 8
"""Up to so many output positions a convolution is one product over the batch, forward, too.

``python -m benchmarks.thresholds FORWARD_PRODUCT_POSITIONS``
"""
CONV_FORWARD_MATMUL_ROWS = 512
"""So, too, with twice the positions, up to so many windows in the whole batch.

``python -m benchmarks.thresholds FORWARD_PRODUCT_ROWS``
"""

# Convolutions: the gradient of the weight.

UNROLLED_TAPS = 64
"""Up to so many taps are unrolled, one slice each; more are one convolution.

``python -m benchmarks.thresholds UNROLLED_TAPS``
"""
SMALL_KERNEL_TAPS = 9
"""Up to so many taps, what all windows read is copied out as one matrix.

``python -m benchmarks.thresholds SMALL_KERNEL_TAPS``
"""
NARROW_CHANNELS = 8
"""Below so many input channels the taps share one product, as one alone is too small.

``python -m benchmarks.thresholds NARROW_CHANNELS``
"""
TINY_IMAGE_POSITIONS = 16
"""Up to so many output positions, larger kernels have a convolution with one axis more.

``python -m benchmarks.thresholds TINY_IMAGE_POSITIONS``
"""
IM2COL_WEIGHT_GRAD_POSITIONS = 64
"""Up to so many output positions the weight's gradient is one product with all windows.

``python -m benchmarks.thresholds TAP_COLUMNS_POSITIONS``
"""
IM2COL_WEIGHT_GRAD_POSITIONS_ONE_TAP = 16
"""The same where the kernel has one tap.

``python -m benchmarks.thresholds TAP_COLUMNS_POSITIONS_ONE_TAP``
"""
DEPTHWISE_WEIGHT_GRAD_PAIRS = 10_000
"""Up to so many pairs of positions, a depthwise weight's gradient computes all of them.

``python -m benchmarks.thresholds WEIGHT_PAIRS``
"""
DEPTHWISE_WEIGHT_GRAD_PAIRS_STRIDED = 16_384
"""The same where windows are strided.

``python -m benchmarks.thresholds WEIGHT_PAIRS_STRIDED``
"""
DEPTHWISE_WEIGHT_GRAD_PAIRS_MATMUL = 4096
"""The same for targets that take products only, such as WebGPU.

No command varies it; ``make bench-web`` times whole steps.
"""

DEPTHWISE_WEIGHT_GRAD_PAIRS_GPU = 100_000
"""The same on an NVIDIA GPU.

``python -m benchmarks.cuda.forms weight``
"""
DEPTHWISE_WEIGHT_GRAD_ROW_PAIRS_GPU = 1 << 16
"""Up to so many pairs of positions in a line, an NVIDIA GPU takes the pairs of lines instead.

``python -m benchmarks.cuda.forms weight``
"""
WINDOW_TABLE_ELEMENTS = 1 << 20
"""Up to so many reads of an image a file holds a table of where they are, for groups of channels.

No choice of speed: it bounds the size of a file.
"""
FLOAT32_ACCUMULATION_ROWS = 16384
"""From so many rows on, 16-bit numbers are made float32 to be summed on an NVIDIA GPU.

No command varies it; kernels of whole steps show it: ``python -m benchmarks.cuda.real``.
"""
CUDA_GRAPH_CONCAT_INPUTS = 32
"""So many tensors CUDA joins at most while it records a graph.

No choice of speed: onnxruntime refuses more.
"""

# Convolutions: the gradient of the input.

COL2IM_INPUT_GRAD_POSITIONS = 16
"""Up to so many output positions the input's gradient is a product and Col2Im.

``python -m benchmarks.thresholds INPUT_COLUMNS_POSITIONS``
"""
COL2IM_INPUT_GRAD_POSITIONS_WIDE = 49
"""The same where there are many output channels.

``python -m benchmarks.thresholds INPUT_COLUMNS_POSITIONS_WIDE``
"""
WIDE_OUTPUT_CHANNELS = 256
"""From so many output channels on there are many.

``python -m benchmarks.thresholds WIDE_OUTPUT_CHANNELS``
"""
DEPTHWISE_INPUT_GRAD_PAIRS = 4096
"""Up to so many pairs of positions, a depthwise input's gradient is one product per channel.

``python -m benchmarks.thresholds INPUT_PAIRS``
"""

CHANNEL_SCALE_FOLD_RATIO = 3
"""From so many times a weight's elements on, a gradient's scale of channels goes into the weight.

No command varies it: two passes over the weight and its gradient stand for one over the other.
"""

# Other operators.

WINDOW_MATRIX_SIZE = 128
"""Up to this size of an axis, sums of windows go back by a matrix; a convolution beyond.

``python -m benchmarks.thresholds WINDOW_MATRIX_SIZE``
"""
REPEATED_POSITIONS = 32
"""Up to so many positions, numbers per channel are repeated for each of them.

``python -m benchmarks.thresholds REPEATED_POSITIONS``
"""
SOFTMAX_CLASSES = 256
"""From so many classes on, cross entropy computes Softmax and logarithms at the labels only.

``python -m benchmarks.thresholds SOFTMAX_CLASSES``
"""
SHARED_CONSTANT_ELEMENTS = 64
"""Up to so many elements, equal constants become one, so that equal nodes have equal inputs.

No choice of speed: it bounds the bytes that are compared.
"""
STORED_INDEX_ELEMENTS = 4096
"""Up to so many elements, their positions are a constant in the file; beyond, a Range.

No choice of speed: it bounds the size of the file.
"""
CONSTANT_INDEX_ELEMENTS = 1 << 16
"""Up to so many indices are computed from constants while a gradient is written.

No choice of speed: it bounds the time that takes.
"""
SCATTER_ROW_ELEMENTS = 16
"""From so many elements on, those of a scattered row have indices of their own on an NVIDIA GPU.

No command varies it; kernels of whole steps show it: ``python -m benchmarks.cuda.real``.
"""
ONE_HOT_ROWS = 1024
"""Up to so many rows, an NVIDIA GPU adds to a table by a product with zeros and ones.

No command varies it; kernels of whole steps show it: ``python -m benchmarks.cuda.real``.
"""
ONE_HOT_ELEMENTS = 1 << 24
"""If there are no more zeros and ones than so many.

No choice of speed: it bounds the memory that they take.
"""
SCATTER_INDEX_ELEMENTS = 1 << 23
"""Up to so many such indices there are; beyond, one is for several elements.

No choice of speed: it bounds the memory that they take.
"""

CONSTANT_MASK_ELEMENTS = 1 << 22
"""Up to so many different elements, a mask that depends on no input is a constant in the file.

No choice of speed: it bounds the size of a file.
"""
COMPUTED_MASK_ELEMENTS = 1 << 25
"""Up to so many elements, equal ones among them, such a mask is computed to see what it holds.

No choice of speed: it bounds the time and the memory of a build.
"""
COALESCED_BROADCAST_ELEMENTS = 1 << 16
"""From so many elements on, axes that a broadcast treats alike are joined on an NVIDIA GPU.

No command varies it; kernels of whole steps show it: ``python -m benchmarks.cuda.real``.
"""
ROW_SUBTRACTION_COLUMN_RATIO = 6
"""From so many columns per column of its left operand on, a product subtracts from its rows.

No command varies it: two copies of the operands stand for a pass over the result.
"""
FUSED_SOFTMAX_COLUMNS = 1024
"""Up to so many columns, onnxruntime adds a mask inside the softmax that reads it, in one kernel.

No choice of speed: beyond, its kernel is another one.
"""

NORM_KERNEL_POSITIONS = 128
"""From so many positions of an image on, kernels for normalisation are faster than plain passes.

On an NVIDIA GPU: ``python -m benchmarks.cuda.forms norm``
"""

GROUP_NORM_KERNEL_ROWS = 64
"""From so many rows on, a group of channels is one; below, each image is normalised on its own.

No command varies it: a GPU takes about as many rows at a time. ``python -m benchmarks.cuda.real
--only unet`` times whole steps.
"""

AFFINE_KERNEL_CHANNELS = 512
"""So many channels, if it can be, are given to the kernel that puts channels on a line.

No command varies it: a GPU takes a channel per block, and a few blocks per processor.
"""

PADDED_VOCABULARY_CLASSES = 4096
"""From so many classes on, a few more are added where rows are no whole words.

On an NVIDIA GPU: ``python -m benchmarks.cuda.real --only gpt2``
"""

PADDED_ATTENTION_KEYS = 64
"""From so many keys and queries on, attention gets a few keys more where rows are no whole words.

On an NVIDIA GPU: ``python -m benchmarks.cuda.real --only vit``
"""
PADDED_ATTENTION_SCORES = 1 << 20
"""And from so many scores of the whole batch on.

On an NVIDIA GPU: ``python -m benchmarks.cuda.real --only vit``
"""
MASK_IN_MATMUL_RATIO = 8
"""From so many times the width of a head on, such keys are closed inside the product.

On an NVIDIA GPU: ``python -m benchmarks.cuda.real --only whisper``
"""

FUSED_RUNNING_STATS = 3
"""From so many running averages of one length on, they are joined, averaged and split again.

No choice of speed: it is where that takes fewer kernels.
"""

# Linear layers.

NORM_ROWS_PER_COLUMN = 1.5
"""From so many rows per column of the readers' weights on, these absorb scale and shift.

``python -m benchmarks.thresholds NORM_ROWS_PER_COLUMN``
"""
SCALED_COLUMNS = 512
"""From so many columns on, a scale of rows moves behind the products that read the matrix.

``python -m benchmarks.thresholds SCALED_COLUMNS``
"""
SCALED_COLUMNS_PER_RESULT = 2
"""And if the matrix has so many times the columns of what is scaled in its place.

``python -m benchmarks.thresholds SCALED_COLUMNS_PER_RESULT``
"""
TRANSPOSED_WEIGHT_ELEMENTS = 1 << 17
"""From so many elements of a weight on, the smaller operand of its gradient is transposed first.

``python -m benchmarks.thresholds TRANSPOSED_WEIGHT_ELEMENTS``
"""
TRANSPOSED_COLUMNS_RATIO = 3
"""An operand is the smaller one if the other has so many times its columns.

``python -m benchmarks.thresholds TRANSPOSED_COLUMNS_RATIO``
"""
TRANSPOSED_RESULT_ROWS = 2000
"""From so many rows of a weight on, its gradient is computed transposed and turned.

``python -m benchmarks.thresholds TRANSPOSED_RESULT_ROWS``
"""
TRANSPOSED_RESULT_OPERAND_ROWS = 512
"""And from so many rows of the operands on.

``python -m benchmarks.thresholds TRANSPOSED_RESULT_OPERAND_ROWS``
"""
BIAS_COLUMN_ROWS = 256
"""From so many rows on, the bias of a wide layer is one more column of its weight.

``python -m benchmarks.thresholds BIAS_COLUMN_ROWS``
"""
BIAS_COLUMN_RATIO = 2
"""A layer is wide if its result has so many times the columns of its input.

``python -m benchmarks.thresholds BIAS_COLUMN_RATIO``
"""
BIAS_COLUMN_ELEMENTS = 1 << 18
"""And if its result has so many elements.

``python -m benchmarks.thresholds BIAS_COLUMN_ELEMENTS``
"""

# The update, and steps that share a call.

UPDATE_CHUNK_ELEMENTS = 1 << 15
"""So many elements are updated at once on the CPU; what they need fits the second-level cache.

No command varies it; ``python -m benchmarks`` times whole steps.
"""
UPDATE_CHUNKS_PER_THREAD = 8
"""From so many pieces per thread on, waking another thread costs less than it saves.

No command varies it; ``python -m benchmarks --threads 2`` times whole steps.
"""
STAGED_BATCH_BYTES = 4 << 20
"""From so many bytes on, threads copy a batch to memory that a GPU reads by itself.

No command varies it; ``python -m benchmarks.cuda.real --only resnet50`` times whole steps.
"""
DEVICE_UPDATE_CHUNK_ELEMENTS = 1 << 24
"""So many elements are updated at once on a device: enough to keep it busy.

No command varies it; ``python -m benchmarks.cuda.real`` times whole steps.
"""
SECOND_COPY_BYTES = 64 << 20
"""From so many bytes of parameters and state on, a second copy of them costs more than a call.

No command varies it; ``python -m benchmarks`` times whole steps.
"""
PACKED_PARAMETER_ELEMENTS = 1 << 14
"""Up to so many elements, parameters are updated as one: beyond, copies cost as much as nodes.
No command varies it; ``make bench-web`` times whole steps."""
FLATTENED_PARAMETER_ELEMENTS = 1 << 18
"""Up to so many elements, parameters of a step on WebGPU are joined: beyond, copies cost as much.
No command varies it; ``make bench-web`` times whole steps."""
FLATTENED_VECTOR_ELEMENTS = 1 << 22
"""So many elements at most are joined to one vector: four such rows still fit a buffer of WebGPU.

No command varies it; ``make bench-web`` times whole steps.
"""
MULTI_STEP_BYTES = 20_000_000
"""Up to so many bytes of parameters and state, a call makes several steps on wasm.

No command varies it; ``make bench-web`` times whole steps.
"""
STEPS_PER_CALL = 8
"""How many steps these are. No command varies it; ``make bench-web`` times whole steps."""
FUSED_SGD_REMAINING_PARAMETERS = 8
"""Up to so many parameters without a product of their own are updated in the training graph, too.

No command varies it; ``python -m benchmarks`` times whole steps.
"""
DEQUANTIZE_AT_USE_ELEMENTS = 1 << 12
"""From so many elements on, a frozen quantised weight is dequantised each time it is read.

No command varies it; below, what is kept is smaller than what the extra nodes cost.
"""

# What is kept for the backward pass of a GPU.

LONG_ATTENTION_RATIO = 16
"""From so many times the width of a head on, attention's scores are made again, not kept.

No command varies it; ``python -m benchmarks.cuda.real --only whisper`` times whole steps.
"""
ATTENTION_CHUNK_BYTES = 256 << 20
"""So many bytes of such scores are there at a time; more are computed in parts of the batch.

No command varies it; ``python -m benchmarks.cuda.real --only whisper`` times whole steps.
"""
MEMORY_BOUND_ELEMENTS = 1 << 18
"""From so many elements on, a pass over them takes longer than the start of its kernel.
No command varies it; ``python -m benchmarks.cuda.real --only gpt2`` times whole steps."""
REMATERIALIZE_BYTES = 4 << 20
"""From so many bytes on, a value that one pass makes again is not kept.

No command varies it; below, the start of a kernel takes longer than the pass.
"""

# Losses.

CHUNKED_LOSS_CLASSES = 1 << 12
"""From so many classes on, the loss of a language model is computed for some rows at a time.

No command varies it; below, all scores of a batch are smaller than what a layer keeps.
"""
LOSS_CHUNK_CLASSES = 1 << 11
"""How many words of a frozen, packed last layer are unpacked at a time for the loss.

No command varies it; 2,048 words of 576 numbers are 5 MB. Twice as many are no faster.
"""
LOSS_CHUNK_SCORES = 1 << 22
"""How many scores are computed at a time then: 16 MB of them, and as much again for the loss.

No command varies it; with fewer, packed weights of the last layer are unpacked too often.
"""
