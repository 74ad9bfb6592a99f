"""Operators through which no gradient flows, with the reason.

Comparisons, logic and rounding are declared with the elementwise operators.
"""

from __future__ import annotations

from onnxtrain.autodiff.registry import no_gradient

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

# What standard operators can say of ai.onnx.ml, `prepare` has rewritten.
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
    no_gradient(f"ai.onnx.ml::{_op}", why="this form of it is not known as tensors", refuse=True)
for _op in ("LabelEncoder", "OneHotEncoder", "CategoryMapper", "CastMap", "DictVectorizer"):
    no_gradient(f"ai.onnx.ml::{_op}", why="works on categories")
no_gradient("ai.onnx.ml::ZipMap", why="the result is a map")
