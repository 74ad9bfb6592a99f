"""Which input of which operator is a weight, and which is a setting."""

from __future__ import annotations

from onnxtrain.graph.roles.role import Role, constant, parameter

WEIGHT = parameter("weight", "an operand of a product")
KERNEL = parameter("weight", "the kernel of a convolution")
BIAS = parameter("bias", "a bias")
NORM = parameter("normalisation", "scale or bias of a normalisation")
EMBEDDING = parameter("embedding", "a table that rows are taken from")
RECURRENT = parameter("recurrent weight", "a weight of a recurrent layer")
SLOPE = parameter("slope", "a slope of PRelu")
SCALE = parameter("scale", "a learned scale")
TABLE = parameter("table", "a learned table added to activations")
TOKEN = parameter("token", "a learned token beside activations")

STATISTIC = constant("running statistics", "statistic")
QUANTISED = constant("a quantisation scale or zero point", "quantisation")
ROTARY = constant("a table of sines and cosines")
FIXED_BIAS = constant("the bias of a fixed filter")
ANGLES = constant("frequencies of sines and cosines")
EXPONENT = constant("an exponent")
NUMBER = constant("a single number in arithmetic")
STATE = constant("an initial state")

_NORM_TWO = {1: NORM, 2: NORM}
_CONV = {1: KERNEL, 2: BIAS}

ROLES: dict[str, dict[int, Role]] = {
    "MatMul": {0: WEIGHT, 1: WEIGHT},
    "Gemm": {0: WEIGHT, 1: WEIGHT, 2: BIAS},
    "Conv": _CONV,
    "ConvTranspose": _CONV,
    "DeformConv": {1: KERNEL, 3: BIAS},
    "LSTM": {1: RECURRENT, 2: RECURRENT, 3: RECURRENT, 5: STATE, 6: STATE, 7: RECURRENT},
    "GRU": {1: RECURRENT, 2: RECURRENT, 3: RECURRENT, 5: STATE},
    "RNN": {1: RECURRENT, 2: RECURRENT, 3: RECURRENT, 5: STATE},
    "BatchNormalization": {1: NORM, 2: NORM, 3: STATISTIC, 4: STATISTIC},
    "InstanceNormalization": _NORM_TWO,
    "LayerNormalization": _NORM_TWO,
    "GroupNormalization": _NORM_TWO,
    "RMSNormalization": {1: NORM},
    "SimplifiedLayerNormalization": {1: NORM},
    "PRelu": {1: SLOPE},
    "RotaryEmbedding": {1: ROTARY, 2: ROTARY},
    "Attention": {3: constant("an attention mask")},
    "QuantizeLinear": {1: QUANTISED, 2: QUANTISED},
    "DequantizeLinear": {1: QUANTISED, 2: QUANTISED},
    "Clip": {1: constant("a bound of Clip"), 2: constant("a bound of Clip")},
    "Range": dict.fromkeys(range(3), constant("a bound of Range")),
    "Pad": {2: constant("a filler of Pad")},
    "Resize": {1: constant("a region of Resize"), 2: constant("scales of Resize")},
    "Upsample": {1: constant("scales of Resize")},
    "OneHot": {2: constant("on and off of OneHot")},
    "Dropout": {1: constant("a rate of Dropout")},
    "STFT": {2: constant("a window function")},
    "GridSample": {1: constant("a grid of places")},
    "ConstantOfShape": {0: constant("a shape")},
    "com.microsoft::FusedConv": _CONV,
    "com.microsoft::NhwcFusedConv": _CONV,
    "com.microsoft::NhwcConv": _CONV,
    "com.microsoft::FusedGemm": {0: WEIGHT, 1: WEIGHT, 2: BIAS},
    "com.microsoft::FusedMatMul": {0: WEIGHT, 1: WEIGHT},
    "com.microsoft::TransposeMatMul": {0: WEIGHT, 1: WEIGHT},
    "com.microsoft::FusedMatMulActivation": {0: WEIGHT, 1: WEIGHT},
    "com.microsoft::GemmFloat8": {0: WEIGHT, 1: WEIGHT, 2: BIAS},
    "com.microsoft::Attention": {1: WEIGHT, 2: BIAS},
    "com.microsoft::PackedAttention": {1: WEIGHT, 2: BIAS},
    "com.microsoft::MultiHeadAttention": {3: BIAS},
    "com.microsoft::PackedMultiHeadAttention": {3: BIAS},
    "com.microsoft::DecoderMaskedMultiHeadAttention": {10: BIAS},
    "com.microsoft::GroupQueryAttention": {7: ROTARY, 8: ROTARY},
    "com.microsoft::SparseAttention": {9: ROTARY, 10: ROTARY},
    "com.microsoft::WordConvEmbedding": {1: WEIGHT, 2: BIAS, 3: EMBEDDING},
    "com.microsoft::RotaryEmbedding": {2: ROTARY, 3: ROTARY},
    "com.microsoft::LayerNormalization": _NORM_TWO,
    "com.microsoft::SimplifiedLayerNormalization": {1: NORM},
    "com.microsoft::SkipLayerNormalization": {2: NORM, 3: NORM, 4: BIAS},
    "com.microsoft::SkipSimplifiedLayerNormalization": {2: NORM, 3: BIAS},
    "com.microsoft::EmbedLayerNormalization": {
        **dict.fromkeys((2, 3, 4), EMBEDDING),
        **dict.fromkeys((5, 6), NORM),
    },
    "com.microsoft::GroupNorm": _NORM_TWO,
    "com.microsoft::SkipGroupNorm": {1: NORM, 2: NORM, 4: BIAS},
    "com.microsoft::BiasGelu": {1: BIAS},
    "com.microsoft::FastGelu": {1: BIAS},
    "com.microsoft::BiasSplitGelu": {1: BIAS},
    "com.microsoft::BiasAdd": {1: BIAS},
    "com.microsoft::BiasDropout": {1: BIAS},
    "com.microsoft::BiasSoftmax": {1: constant("an attention mask")},
    "com.microsoft::MatMulNBits": {2: QUANTISED, 3: QUANTISED, 5: BIAS},
    "com.microsoft::MatMulBnb4": {2: QUANTISED},
    "com.microsoft::GatherBlockQuantized": {2: QUANTISED, 3: QUANTISED},
    "com.microsoft::QuantizeLinear": {1: QUANTISED, 2: QUANTISED},
    "com.microsoft::DequantizeLinear": {1: QUANTISED, 2: QUANTISED},
    "com.microsoft::MoE": {
        **dict.fromkeys((2, 4, 6), WEIGHT),
        **dict.fromkeys((3, 5, 7), BIAS),
    },
    "com.microsoft::CausalConvWithState": {1: KERNEL, 2: BIAS},
}
"""Roles by operator and input; what is not listed is judged by its neighbours."""

ARITHMETIC = frozenset({"Add", "Sub", "Mul", "Div", "Sum", "Mean"})
BOUNDS = frozenset({"Max", "Min"})
COMPARISONS = frozenset({"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"})
PRODUCTS = frozenset(
    (
        *("MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum", "MatMulInteger", "ConvInteger"),
        *("com.microsoft::MatMulNBits", "com.microsoft::FusedMatMul", "com.microsoft::FusedConv"),
        *("com.microsoft::MatMulBnb4", "com.microsoft::NhwcConv", "DeformConv"),
    )
)
MOVES = frozenset(
    (
        *("Identity", "Cast", "CastLike", "Transpose", "Reshape", "Flatten", "Unsqueeze"),
        *("Squeeze", "Slice", "Split", "Expand", "Tile", "DepthToSpace", "SpaceToDepth"),
        *("QuantizeLinear", "DequantizeLinear", "Trilu", "Pad", "Dropout"),
    )
)
"""Operators whose first input is still the same tensor behind them."""

RANDOM = frozenset({"RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike"})
_INTEGER_PREFIXES = ("QLinear", "com.microsoft::QLinear", "com.microsoft::DynamicQuantize")
_INTEGER = frozenset(
    (
        *("com.microsoft::QAttention", "com.microsoft::QGemm", "com.microsoft::QMoE"),
        *("com.microsoft::MatMulIntegerToFloat", "com.microsoft::QEmbedLayerNormalization"),
        *("com.microsoft::QOrderedMatMul",),
    )
)


def works_on_integers(key: str) -> bool:
    """Return whether the floats that an operator reads are quantisation scales."""
    return key in _INTEGER or key.startswith(_INTEGER_PREFIXES)
