"""Operators through which no gradient flows, with the reason.

First the standard domain (comparisons, logic and rounding are declared with the elementwise rules),
then onnxruntime's own domain.
"""

from __future__ import annotations

from onnxtrain.autodiff.rule_registry import no_gradient

no_gradient("Shape", "Size", why="the result is a shape; it does not depend on the values")
no_gradient("ArgMax", "ArgMin", "NonZero", "NonMaxSuppression", why="the result is indices")
no_gradient("Constant", why="a constant")
no_gradient("ConstantOfShape", "EyeLike", why="a constant; the input only gives the shape")
no_gradient("RandomNormal", "RandomUniform", why="random numbers that depend on no input")
no_gradient(
    "RandomNormalLike", "RandomUniformLike", why="random numbers; the input only gives the shape"
)
no_gradient("Bernoulli", "Multinomial", why="random draws, which do not move with the input")
no_gradient(
    "HammingWindow", "HannWindow", "BlackmanWindow", why="the only input is an integer size"
)
no_gradient("MelWeightMatrix", why="edges of bands are rounded to whole bins")
no_gradient(
    "BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "BitwiseNot", why="works on integers"
)
no_gradient("BitCast", why="reads the bits of a number as another type")
no_gradient(
    "StringConcat", "StringNormalizer", "StringSplit", "RegexFullMatch", why="works on strings"
)
no_gradient("TfIdfVectorizer", why="counts integers or strings")
no_gradient("ImageDecoder", why="decodes bytes")
no_gradient("SequenceLength", "OptionalHasElement", why="the result does not depend on the values")
no_gradient("SequenceEmpty", why="a constant")

# `prepare` has replaced the ai.onnx.ml operators that standard operators can express.
_TREE = "a tree has no gradient with respect to its input or its thresholds"
for _op in ("TreeEnsemble", "TreeEnsembleClassifier", "TreeEnsembleRegressor"):
    no_gradient(f"ai.onnx.ml::{_op}", why=_TREE, refuse=True)
for _op in ("SVMClassifier", "SVMRegressor"):
    no_gradient(
        f"ai.onnx.ml::{_op}",
        why="its vectors lie in attributes; only a linear kernel, without probabilities, trains",
        refuse=True,
    )
for _op in ("LinearClassifier", "LinearRegressor", "Normalizer"):
    no_gradient(f"ai.onnx.ml::{_op}", why="no standard operators express this variant", refuse=True)
for _op in ("LabelEncoder", "OneHotEncoder", "CategoryMapper", "CastMap", "DictVectorizer"):
    no_gradient(f"ai.onnx.ml::{_op}", why="works on categories")
no_gradient("ai.onnx.ml::ZipMap", why="the result is a map")


def _none(*ops: str, why: str) -> None:
    no_gradient(*(f"com.microsoft::{op}" for op in ops), why=why, refuse=True)


_none(
    *("BeamSearch", "GreedySearch", "Sampling", "WhisperBeamSearch"),
    why="it generates tokens one after the other, which are integers",
)
_none(
    *("BifurcationDetector", "NGramRepeatBlock", "DynamicTimeWarping", "Unique", "Tokenizer"),
    why="the result is indices, tokens or a choice of elements",
)
_none(
    *("MurmurHash3", "NGramHashMapping", "VarlenNGramHashMapping"),
    why="it hashes integers or strings",
)
_none(
    *("PackedSparseAttentionIndexer", "SparseAttentionIndexer"),
    why="the result is indices of keys",
)
_none("EPContext", "Snpe", why="its body is a binary for one device")
_none(
    *("QuantizeBFP", "DequantizeBFP", "QuantizeWithOrder", "DequantizeWithOrder"),
    why="the layout of its integers belongs to one device",
)
_none(
    *("QOrderedAttention", "QOrderedGelu", "QOrderedLayerNormalization"),
    *("QOrderedLongformerAttention", "QOrderedMatMul"),
    why="the layout of its integers belongs to one device",
)
_none(
    *("MatMulInteger16", "MulInteger", "ReduceSumInteger"),
    why="works on integers; it stays as it is where nothing is trained in front of it",
)
_none(
    *("DynamicQuantizeLSTM", "QAttention", "QEmbedLayerNormalization", "QLinearReduceMean"),
    why="works on integers; it stays as it is where nothing is trained in front of it",
)
_none(
    *("DynamicQuantizeMatMul", "MatMulIntegerToFloat", "QGemm", "QLinearAdd"),
    *("QLinearAveragePool", "QLinearConcat", "QLinearConv", "QLinearGlobalAveragePool"),
    *("QLinearLeakyRelu", "QLinearMul", "QLinearSigmoid", "QLinearSoftmax", "QLinearWhere"),
    why="it rounds to integers",
)
_none(
    *("GemmFloat8", "MatMulBlockQuantizedFp4Weight", "MatMulBlockQuantizedFp8Weight"),
    why="8 or 4 bit floats, whose products have kernels on one device only",
)
_none("MatMulFpQ4", why="its weights are a blob in a packing that the file does not describe")
_none(
    *("PagedAttention", "SparsePagedAttention"),
    why="keys and values lie in pages of a buffer that it writes to, and no kernel for a CPU says "
    "what it means; use GroupQueryAttention",
)
_none(
    *("DynamicSparseAttention", "LongformerAttention"),
    why="which keys a query sees is an input, and no CPU kernel documents its meaning; use "
    "GroupQueryAttention with a bias",
)
_none(
    *("GatedDeltaNet", "VarlenCausalConvWithState"),
    why="sequences may lie one behind the other, and no CPU kernel documents its meaning; use "
    "LinearAttention or CausalConvWithState, which have a batch axis",
)
_none("SparseToDenseMatMul", why="its first operand is a sparse tensor")
_none("AttnLSTM", why="no optimizer or exporter writes it any more; use LSTM")
_none(
    "DecoderAttention",
    why="inputs decide at run time what it computes, and no CPU kernel documents it; use "
    "MultiHeadAttention",
)
_none(
    "MaxpoolWithMask",
    why="for internal use of the runtime, which does not define it: its kernel leaves a row of a "
    "window at the first masked element, and reads the masks of other channels beside their place",
)
